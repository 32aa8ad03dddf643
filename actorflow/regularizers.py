"""L1 and L2 regularizers of variables (``flow.regularizers``): terms that are added to gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actorflow.support.nearest_names import answer_with_nearest
from actorflow_compiler.core.errors import StateError

__all__ = ["Regularizer", "l1", "l1_l2", "l2"]


@dataclass(frozen=True, slots=True)
class Regularizer:
    """Adds ``l1 · sign(variable) + l2 · variable`` to the gradient, before clipping; the loss value does not change."""

    l1: float
    l2: float

    def __post_init__(self) -> None:
        for key, value in (("l1", self.l1), ("l2", self.l2)):
            if not math.isfinite(value) or value < 0:
                raise StateError(f"a regularizer with {key}={value!r} was found; a number, 0 or more, was expected")


def l1_l2(l1: float = 0.01, l2: float = 0.01) -> Regularizer:
    """Both penalties: ``l1 · Σ|w| + l2 / 2 · Σw²``.  Raises StateError for factors below 0."""
    return Regularizer(l1, l2)


def l1(l: float = 0.01) -> Regularizer:  # noqa: E741 (OneFlow's name)
    """The penalty ``l · Σ|w|``, which makes weights sparse.  Raises StateError for a factor below 0."""
    return Regularizer(l, 0.0)


def l2(l: float = 0.01) -> Regularizer:  # noqa: E741 (OneFlow's name)
    """The penalty ``l / 2 · Σw²``, which is weight decay for SGD.  Raises StateError for a factor below 0."""
    return Regularizer(0.0, l)


answer_with_nearest(__name__)
