"""Reports of the choices of inference, and their text for users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actorflow_compiler.core.op_call import SignatureSource
from actorflow_compiler.core.units import seconds_text
from actorflow_compiler.hints.goal import ParallelMode

SHOWN = 12  # most alternatives shown of one op


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device, as inference estimates them; temporary buffers of single ops are not counted."""

    variables: float
    activations: float  # held for the backward pass
    gradients: float  # held for the optimizer

    @property
    def peak(self) -> float:
        """The most that is held at once: activations are freed as gradients are made."""
        return self.variables + max(self.activations, self.gradients)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A signature that an op, or a layout that a variable, could have had."""

    text: str  # "S(0), B -> S(0)"
    seconds: float  # more than the chosen one, if nothing else changed
    chosen: bool
    source: SignatureSource
    against: str = ""  # why it is excluded regardless of its cost; "" if it is not


@dataclass(frozen=True, slots=True)
class Explanation:
    """The alternatives of one op or variable, the cheapest first."""

    name: str
    op: str
    axis: int
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class AxisReport:
    """How the layouts along one mesh axis were decided."""

    axis: int
    mode: ParallelMode
    start: str  # the template that the search started from, or "solver"
    items: int
    classes: int  # of items that are repetitions of each other
    seconds: float  # estimated, of communication and redundant work in an iteration
    bound: float | None  # s; no choice costs less.  None if the solver was not used
    unclosed: str  # why the gap to the bound is not closed, or why there is no bound; "" if there is nothing to say
    held: MemoryUse  # of the device that holds the most
    explanations: tuple[Explanation, ...] = ()


def report_lines(reports: Sequence[AxisReport]) -> Iterator[str]:
    """One line for each mesh axis: the choice, the start it was found from, and the largest gap to the optimum."""
    for r in reports:
        gap = ""
        if r.bound is not None:
            share = 1 - r.bound / r.seconds if r.seconds else 0.0
            why = f": {r.unclosed}" if r.unclosed else ""
            gap = f"; no layout of repeated blocks needs less than {seconds_text(r.bound)} (gap {share:.1%}{why})"
        elif r.unclosed:
            gap = f"; no bound is known: {r.unclosed}"
        yield (
            f"layouts of mesh axis {r.axis}, {r.mode}: about {seconds_text(r.seconds)} of communication and repeated "
            f"work in an iteration, found from {r.start}{gap}; {r.items} ops and variables, {r.classes} of them "
            f"different; a device holds {size_text(r.held.variables)} of variables, {size_text(r.held.activations)} of "
            f"activations, {size_text(r.held.gradients)} of gradients"
        )


def explanation_lines(reports: Sequence[AxisReport]) -> Iterator[str]:
    """A paragraph for each op or variable to explain: every alternative with its price."""
    for r in reports:
        for e in r.explanations:
            yield "\n".join(_paragraph(e))


def _paragraph(e: Explanation) -> Iterator[str]:
    name = f"{e.name}: " if e.name else ""
    yield f"{name}{e.op}, mesh axis {e.axis}"
    width = max(len(a.text) for a in e.alternatives)
    for a in e.alternatives[:SHOWN]:
        price = a.against or f"{'+' if a.seconds >= 0 else '-'}{seconds_text(abs(a.seconds))}"
        price = "chosen" if a.chosen else price
        source = "" if a.source == SignatureSource.TABLE else f"  [{a.source}]"
        yield f"    {a.text:<{width}}  {price}{source}"
    if len(e.alternatives) > SHOWN:
        yield f"    … and {len(e.alternatives) - SHOWN} that cost more"


def size_text(n: float) -> str:
    """Bytes as a short text, in powers of 1000 as ``memory_budget=`` takes them: 20 GB."""
    for unit in ("B", "KB", "MB"):
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
