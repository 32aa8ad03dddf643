"""Gradient clipping for ``flow.optimizer``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.support.nearest_names import answer_with_nearest
from actorflow_compiler.core.errors import StateError

__all__ = ["by_global_norm"]


@dataclass(frozen=True, slots=True)
class by_global_norm:  # noqa: N801 (OneFlow's name)
    """Scales all gradients of a ``minimize`` by one factor, so that their norm is at most ``clip_norm``.

    It calls torch's ``clip_grad_norm_``.  Raises StateError for a ``clip_norm`` that is not a finite number above 0.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        if not self.clip_norm > 0 or not math.isfinite(self.clip_norm):
            raise StateError(f"by_global_norm({self.clip_norm!r}) was found; a number above 0 was expected")

    def __call__(self, parameters: Iterable[Tensor]) -> None:
        """Clip the gradients of ``parameters``."""
        torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)


answer_with_nearest(__name__)
