"""PyTorch's learning-rate schedules by a stated list."""

from __future__ import annotations

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LambdaLR", "LinearLR", "LRScheduler", "MultiplicativeLR", "MultiStepLR", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau", "SequentialLR", "StepLR",
]  # fmt: skip

_ELSEWHERE = {  # OneFlow's names → what to use
    "WarmUpLR": "use LinearLR or ConstantLR, then the other schedule, in SequentialLR",
    "CosineDecayLR": "use CosineAnnealingLR(optimizer, decay_steps, eta_min=alpha * lr), which rises again after them",
    "NaturalExpLR": "use LambdaLR(optimizer, lambda step: math.exp(-decay_rate * step / decay_steps))",
    "InverseTimeLR": "use LambdaLR(optimizer, lambda step: 1 / (1 + decay_rate * step / decay_steps))",
}

answer_with_nearest(__name__, instead=_ELSEWHERE)
