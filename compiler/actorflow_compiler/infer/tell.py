"""What inference reports goes in; lines of text for people come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actorflow_compiler.infer.choose import size
from actorflow_compiler.infer.reports import AxisReport, Explanation

SHOWN = 12  # alternatives of one op


def tell(reports: Sequence[AxisReport]) -> Iterator[str]:
    """One line for each mesh axis: what was found, from where, and how far it can be from the best."""
    for r in reports:
        gap = ""
        if r.bound is not None:
            share = 1 - r.bound / r.seconds if r.seconds else 0.0
            gap = f"; no layout of repeated blocks needs less than {seconds(r.bound)} (gap {share:.1%})"
        yield (
            f"layouts of mesh axis {r.axis}, {r.mode}: about {seconds(r.seconds)} of communication and repeated work "
            f"in an iteration, found from {r.start}{gap}; {r.items} ops and variables, {r.classes} of them different; "
            f"a device holds {size(r.held.variables)} of variables, {size(r.held.activations)} of activations, "
            f"{size(r.held.gradients)} of gradients"
        )


def explained(reports: Sequence[AxisReport]) -> Iterator[str]:
    """A paragraph for each op or variable that was asked for: every layout that it could have had, and its price."""
    for r in reports:
        for e in r.explanations:
            yield "\n".join(_paragraph(e))


def _paragraph(e: Explanation) -> Iterator[str]:
    name = f"{e.name}: " if e.name else ""
    yield f"{name}{e.op}, mesh axis {e.axis}"
    width = max(len(a.text) for a in e.alternatives)
    for a in e.alternatives[:SHOWN]:
        price = a.against or f"{'+' if a.seconds >= 0 else '-'}{seconds(abs(a.seconds))}"
        price = "chosen" if a.chosen else price
        source = "" if a.source == "table" else f"  [{a.source}]"
        yield f"    {a.text:<{width}}  {price}{source}"
    if len(e.alternatives) > SHOWN:
        yield f"    … and {len(e.alternatives) - SHOWN} that cost more"


def seconds(s: float) -> str:
    """A time for people."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if s >= scale:
            return f"{s / scale:.3g} {unit}"
    return f"{s / 1e-6:.3g} µs"
