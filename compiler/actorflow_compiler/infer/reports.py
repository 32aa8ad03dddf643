"""What inference says about what it found, for people: values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on one device, as inference estimates them: what lives long, without what is needed for a moment."""

    variables: float
    activations: float  # held for the backward pass
    gradients: float  # held for the optimizer

    @property
    def peak(self) -> float:
        """Activations go as gradients come."""
        return self.variables + max(self.activations, self.gradients)


@dataclass(frozen=True, slots=True)
class Alternative:
    """An option that an op or a variable could have had."""

    text: str  # "S(0), B -> S(0)"
    seconds: float  # more than what was chosen, if nothing else changed
    chosen: bool
    source: str  # "table" | "registered" | "discovered"
    against: str = ""  # why it is out of the question, whatever it costs


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an op or a variable could have been, and what it is."""

    name: str
    op: str
    axis: int
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class AxisReport:
    """How one axis was decided."""

    axis: int
    mode: str
    start: str  # the template that led here, or "solver"
    items: int
    classes: int  # of items that are repetitions of each other
    seconds: float  # estimated, of communication and redundant work in an iteration
    bound: float | None  # no choice costs less; None where the solver was not used
    held: Held  # of the device that holds most
    explanations: tuple[Explanation, ...] = ()
