"""The names of ``torch.autograd`` that ``flow.autograd`` has."""

from __future__ import annotations

from torch.autograd import (
    Function,
    backward,
    detect_anomaly,
    enable_grad,
    grad,
    gradcheck,
    gradgradcheck,
    inference_mode,
    no_grad,
    set_detect_anomaly,
    set_grad_enabled,
)

from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "Function", "backward", "detect_anomaly", "enable_grad", "grad", "gradcheck", "gradgradcheck", "inference_mode",
    "no_grad", "set_detect_anomaly", "set_grad_enabled",
]  # fmt: skip

answer_with_nearest(__name__)
