"""A learning-rate schedule goes in, a loss inside of a job function is minimised: optimizers of the first generation.

They make torch's optimizers, of whose hyperparameters only the learning rate changes, on the host, with each call.
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
