"""PyTorch's optimizers by a stated list; ``optim.lr_scheduler``."""

from __future__ import annotations

from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from actorflow.optim import lr_scheduler
from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "ASGD", "LBFGS", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "Optimizer",
    "RAdam", "RMSprop", "Rprop", "SparseAdam", "lr_scheduler",
]  # fmt: skip

_ELSEWHERE = {  # OneFlow's names → what to use
    "LAMB": "torch has none; AdamW is nearest",
    "FTRL": "torch has none; Adagrad is nearest",
    "FTLR": "torch has none; Adagrad is nearest",
}

answer_with_nearest(__name__, instead=_ELSEWHERE)
