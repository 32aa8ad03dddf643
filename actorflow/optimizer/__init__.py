"""Optimizers of the first generation (``flow.optimizer``), each with a learning-rate schedule.

Each makes an optimizer of torch.  Of its hyperparameters only the learning rate, and settings derived from it, change
from call to call; they are computed on the host.
"""

from __future__ import annotations

from actorflow.optimizer import grad_clipping as grad_clipping
from actorflow.optimizer import warmup as warmup
from actorflow.optimizer.kinds import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from actorflow.optimizer.schedules import (
    CosineScheduler,
    ExponentialScheduler,
    InverseTimeScheduler,
    LinearCosineScheduler,
    LrScheduler,
    NaturalExpScheduler,
    PiecewiseConstantScheduler,
    PiecewiseScalingScheduler,
    PolynomialScheduler,
)
from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "CosineScheduler",
    "ExponentialScheduler",
    "InverseTimeScheduler",
    "LinearCosineScheduler",
    "LrScheduler",
    "NaturalExpScheduler",
    "Optimizer",
    "PiecewiseConstantScheduler",
    "PiecewiseScalingScheduler",
    "PolynomialScheduler",
    "RMSProp",
    "SGD",
    "grad_clipping",
    "warmup",
]

answer_with_nearest(__name__)
