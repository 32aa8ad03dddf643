"""Summarize a plan in five lines: parallelism, communication, bubble, memory and expected step time."""

from __future__ import annotations

from collections.abc import Iterator

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.core.units import bytes_text, ranges_text, seconds_text
from actorflow_compiler.plan.plan import Plan, Variable
from actorflow_scheduler.forecast import Forecast, forecast

__all__ = ["summary_lines"]

_STATE = (("parameter", "parameters"), ("optimizer", "optimizer state"))


def summary_lines(plan: Plan, hardware: Hardware) -> list[str]:
    """Parallelism, bytes that move, bubble, memory, and how long a step is expected to take."""
    found = forecast(plan, hardware)
    moved = ", ".join(f"{kind} {bytes_text(nbytes)}" for kind, nbytes in plan.summary.moved)
    total = sum(nbytes for _, nbytes in plan.summary.moved)
    return [
        f"parallelism    {'; '.join(_parallelism(plan))}",
        f"communication  {bytes_text(total)} a step{f': {moved}' if moved else ''}",
        f"bubble         {found.bubble:.1%} of the computing time",
        f"memory         {_memory(found)}",
        f"step           {seconds_text(found.period)} expected on {hardware.name}",
    ]


def _parallelism(plan: Plan) -> Iterator[str]:
    stages = [stage for stage in plan.summary.stages if stage]
    pieces = f" in {plan.pieces} micro-batches" if plan.pieces > 1 else ""
    if plan.world == 1:
        yield f"one device{pieces}"
        return
    yield (
        f"{len(stages)} stages on {plan.world} devices{pieces}" if len(stages) > 1 else f"{plan.world} devices{pieces}"
    )
    for kind, words in _STATE:
        variables = [v for v in plan.variables if v.kind == kind and v.placement.size > 1]
        split = sorted({_parts(v) for v in variables} - {1})
        if not variables:
            continue
        whole = sum(_parts(v) == 1 for v in variables)
        if not split:
            yield f"{words} whole on each of {ranges_text(sorted({v.placement.size for v in variables}))}"
        else:
            yield f"{words}: {len(variables) - whole} of {len(variables)} split in {ranges_text(split)} parts"


def _parts(variable: Variable) -> int:
    """The number of different parts into which a variable is split."""
    found = 1
    for entry, count in zip(variable.sbp, variable.placement.hierarchy, strict=True):
        found *= count if isinstance(entry, Split) else 1
    return found


def _memory(found: Forecast) -> str:
    worst = max(found.ranks, key=lambda rank: rank.total)
    ranks = f"rank{'s' * (len(worst.ranks) > 1)} {ranges_text(worst.ranks)}"
    verdict = "" if found.fits is None else ", which fits" if found.fits else ", which does not fit"
    shared = f", for collectives {bytes_text(worst.shared)}" if worst.shared else ""
    return (
        f"{bytes_text(worst.total)} at most, on {ranks}: variables {bytes_text(worst.variables)}, registers "
        f"{bytes_text(worst.registers)}, at work {bytes_text(worst.workspace)}{shared}{verdict}"
    )
