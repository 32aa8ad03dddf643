"""Warm-ups of learning-rate schedules: the fraction of the base rate in the first calls."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow.support.nearest_names import answer_with_nearest
from actorflow_compiler.core.errors import StateError

__all__ = ["Warmup", "constant", "linear"]


@dataclass(frozen=True, slots=True)
class Warmup:
    """A warm-up in the first ``steps`` calls of a train job."""

    steps: int

    def factor(self, step: int) -> float:
        """The fraction of the base rate in call ``step``, counted from 0 and below ``steps``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class constant(Warmup):  # noqa: N801 (OneFlow's name)
    """A constant ``multiplier`` of the base rate.  Raises StateError for a multiplier outside (0, 1)."""

    multiplier: float

    def __post_init__(self) -> None:
        _check("constant", "multiplier", self.steps, self.multiplier, self.multiplier > 0)

    def factor(self, step: int) -> float:
        """See ``Warmup``."""
        return self.multiplier


@dataclass(frozen=True, slots=True)
class linear(Warmup):  # noqa: N801 (OneFlow's name)
    """A linear increase from ``start_multiplier`` times the base rate to the base rate.

    Raises StateError for a ``start_multiplier`` outside [0, 1).
    """

    start_multiplier: float

    def __post_init__(self) -> None:
        _check("linear", "start_multiplier", self.steps, self.start_multiplier, self.start_multiplier >= 0)

    def factor(self, step: int) -> float:
        """See ``Warmup``."""
        return self.start_multiplier + (1 - self.start_multiplier) * step / self.steps


def _check(kind: str, key: str, steps: int, multiplier: float, enough: bool) -> None:
    if steps < 0 or not enough or not multiplier < 1:
        least = "0" if kind == "linear" else "above 0"
        raise StateError(
            f"optimizer.warmup.{kind}({steps}, {multiplier}) was found; 0 steps or more, and a {key} from {least} to "
            f"below 1, were expected"
        )


answer_with_nearest(__name__)
