"""Learning-rate schedules: the learning rate of each call of a train job; calls are counted from 0.

The formulas are OneFlow's.  During a warm-up the rate is a fraction of the base rate; the schedule after it counts
calls from the first one, not from the end of the warm-up.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from actorflow.optimizer.warmup import Warmup, linear
from actorflow_compiler.core.errors import StateError

__all__ = [
    "CosineScheduler",
    "ExponentialScheduler",
    "InverseTimeScheduler",
    "LinearCosineScheduler",
    "LrScheduler",
    "NaturalExpScheduler",
    "PiecewiseConstantScheduler",
    "PiecewiseScalingScheduler",
    "PolynomialScheduler",
]


@dataclass(frozen=True)
class LrScheduler:
    """A learning rate for each call."""

    def rate(self, step: int) -> float:
        """The learning rate of call ``step``, counted from 0."""
        warmup = self.begins
        return self.start * warmup.factor(step) if warmup and step < warmup.steps else self.after(step)

    @property
    def start(self) -> float:
        """The base learning rate."""
        return float(self.base_lr)  # type: ignore[attr-defined]  # a field of most subclasses

    @property
    def begins(self) -> Warmup | None:
        """The warm-up, or None."""
        found: Warmup | None = self.warmup  # type: ignore[attr-defined]  # a field of each subclass
        return found

    @property
    def few(self) -> bool:
        """Whether the schedule has only a few different rates."""
        return False

    def after(self, step: int) -> float:
        """The rate of call ``step`` without the warm-up."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        steps = getattr(self, "steps", 1)
        if not steps > 0 or not math.isfinite(self.start) or self.start < 0:
            raise StateError(f"{self} was found; steps above 0 and a learning rate, 0 or more, were expected")
        if self.begins is not None and not isinstance(self.begins, Warmup):
            raise StateError(f"{self} was found; warmup=flow.optimizer.warmup.linear(…) or .constant(…) was expected")


@dataclass(frozen=True)
class _Piecewise(LrScheduler):
    """A schedule that changes at given calls and is constant in between."""

    @property
    def few(self) -> bool:
        """See ``LrScheduler``."""
        return not isinstance(self.begins, linear)

    def _check(self, boundaries: Sequence[int], values: Sequence[float], expected: int) -> None:
        if len(values) != expected or list(boundaries) != sorted(boundaries):
            raise StateError(
                f"{type(self).__name__}(boundaries={list(boundaries)}, …) with {len(values)} values was found; growing "
                f"boundaries and {expected} values were expected"
            )


@dataclass(frozen=True)
class PiecewiseConstantScheduler(_Piecewise):
    """``values[i]`` up to and including call ``boundaries[i]``; after the last boundary the last value.

    There is one value more than there are boundaries.
    """

    boundaries: Sequence[int]
    values: Sequence[float]
    warmup: Warmup | None = None

    def __post_init__(self) -> None:
        self._check(self.boundaries, self.values, len(self.boundaries) + 1)
        super().__post_init__()

    @property
    def start(self) -> float:
        """See ``LrScheduler``."""
        return float(self.values[0])

    def after(self, step: int) -> float:
        """See ``LrScheduler``."""
        return float(self.values[bisect_left(self.boundaries, step)])


@dataclass(frozen=True)
class PiecewiseScalingScheduler(_Piecewise):
    """``base_lr`` up to and including call ``boundaries[0]``; after ``boundaries[i]``, ``base_lr * scale[i]``.

    If ``scale`` is a single number, it applies after every boundary.
    """

    base_lr: float
    boundaries: Sequence[int]
    scale: float | Sequence[float]
    warmup: Warmup | None = None

    def __post_init__(self) -> None:
        self._check(self.boundaries, self._scales, len(self.boundaries))
        super().__post_init__()

    @property
    def _scales(self) -> Sequence[float]:
        return self.scale if isinstance(self.scale, Sequence) else [self.scale] * len(self.boundaries)

    def after(self, step: int) -> float:
        """See ``LrScheduler``."""
        return self.base_lr * [1.0, *self._scales][bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class PolynomialScheduler(LrScheduler):
    """From ``base_lr`` to ``end_learning_rate`` by a power of the remaining fraction of ``steps``.

    With ``cycle``, ``steps`` is replaced by its next multiple when it is exceeded, so that the rate rises again;
    otherwise the rate stays at ``end_learning_rate``.
    """

    base_lr: float
    steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    warmup: Warmup | None = None

    def after(self, step: int) -> float:
        """See ``LrScheduler``."""
        length = self.steps * math.ceil(max(step, 1) / self.steps) if self.cycle else self.steps
        done = (max(step, 1) if self.cycle else min(step, self.steps)) / length
        left: float = (1 - done) ** self.power
        return (self.base_lr - self.end_learning_rate) * left + self.end_learning_rate


@dataclass(frozen=True)
class CosineScheduler(LrScheduler):
    """Half a cosine wave from ``base_lr`` to ``alpha · base_lr`` in ``steps`` calls; constant afterwards."""

    base_lr: float
    steps: int
    alpha: float = 0.0
    warmup: Warmup | None = None

    def after(self, step: int) -> float:
        """See ``LrScheduler``."""
        wave = (1 + math.cos(math.pi * min(step, self.steps) / self.steps)) / 2
        return self.base_lr * ((1 - self.alpha) * wave + self.alpha)


@dataclass(frozen=True)
class LinearCosineScheduler(LrScheduler):
    """``base_lr · ((alpha + remaining) · wave + beta)``, constant after ``steps`` calls.

    ``remaining`` falls from 1 to 0 in ``steps`` calls.  ``wave`` is a cosine between 0 and 1 with ``num_periods``
    periods in that time; it begins at 1.
    """

    base_lr: float
    steps: int
    num_periods: float = 0.5
    alpha: float = 0.0
    beta: float = 0.001
    warmup: Warmup | None = None

    def after(self, step: int) -> float:
        """See ``LrScheduler``."""
        done = min(step, self.steps) / self.steps
        wave = (1 + math.cos(2 * math.pi * self.num_periods * done)) / 2
        return self.base_lr * ((self.alpha + 1 - done) * wave + self.beta)


@dataclass(frozen=True)
class _Decaying(LrScheduler):
    """A base class for ``base_lr`` times a function of ``step / steps``; ``staircase`` rounds this ratio down."""

    base_lr: float
    steps: int
    decay_rate: float
    staircase: bool = False
    warmup: Warmup | None = None

    def _ratio(self, step: int) -> float:
        ratio = step / self.steps
        return math.floor(ratio) if self.staircase else ratio


@dataclass(frozen=True)
class ExponentialScheduler(_Decaying):
    """``base_lr · decay_rate ** (step / steps)``; ``staircase`` rounds the exponent down."""

    def after(self, step: int) -> float:
        """See ``LrScheduler``."""
        return float(self.base_lr * self.decay_rate ** self._ratio(step))


@dataclass(frozen=True)
class InverseTimeScheduler(_Decaying):
    """``base_lr / (1 + decay_rate · step / steps)``; ``staircase`` rounds ``step / steps`` down."""

    def after(self, step: int) -> float:
        """See ``LrScheduler``."""
        return self.base_lr / (1 + self.decay_rate * self._ratio(step))


@dataclass(frozen=True)
class NaturalExpScheduler(_Decaying):
    """``base_lr · e ** (-decay_rate · step / steps)``; ``staircase`` rounds ``step / steps`` down."""

    def after(self, step: int) -> float:
        """See ``LrScheduler``."""
        return self.base_lr * math.exp(-self.decay_rate * self._ratio(step))
