"""Forecast a plan of many micro-batches from two plans of fewer, to compare it with others.

Once its pipeline is full, each further micro-batch takes a step equally long, and holds nothing more: two short plans
tell what the whole one takes, for a fraction of the firings, whose number decides how long orders are searched for, and
in how much memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import PLAIN, Variant
from actorflow_scheduler.cost import moved_by_all
from actorflow_scheduler.extrapolation import extrapolated, on_line, steps_beyond
from actorflow_scheduler.forecast import Forecast, forecast
from actorflow_scheduler.schedule import Memory, schedule_folded

MANY = 100_000  # firings of an iteration, of one rank of each class: fewer are scheduled in seconds
FULL = 2  # micro-batches for each stage, after which a pipeline is full
FEWEST = 8  # micro-batches of the shorter plan: with fewer, what is exchanged beside computing is not yet steady


def forecast_draft(
    make: Callable[[Variant], FoldedPlan],
    hardware: Hardware,
    memory: Memory | None = None,
    name: str = "auto",
    room: Memory | None = None,
    beside: bool = True,
) -> tuple[Forecast, int]:
    """The forecast of the plan that ``schedule_folded`` finds, and the bytes that all ranks send in an iteration.

    Nothing is proved.  A plan of ``MANY`` firings is forecast from two with fewer micro-batches (``Forecast.drafted``).
    Raises as ``schedule_folded`` and ``forecast``.
    """

    def found(pieces: int) -> tuple[Forecast, int]:
        fewer = functools.cache(lambda variant: with_pieces(make(variant), pieces))
        plan = schedule_folded(fewer, hardware, memory, name, room, beside, proven=False)
        return forecast(plan, hardware), moved_by_all(plan)

    plan = make(PLAIN).plan
    pieces = pieces_of_drafts(plan)
    if pieces is None:
        return found(plan.pieces)
    (few, moved), (more, moved_more) = map(found, pieces)
    further = steps_beyond(*pieces, plan.pieces)
    line = replace(extrapolated(few, more, further, further), micro_batches=plan.pieces)
    return line, round(on_line(moved, moved_more, further))


def pieces_of_drafts(plan: Plan) -> tuple[int, int] | None:
    """The numbers of micro-batches of two plans that tell what a plan takes; None where it is not worth it.

    It is where both together have at most half of its micro-batches, which all take part in everything that some do.
    """
    if sum(actor.rate for actor in plan.actors) < MANY or not _is_even(plan):
        return None
    stages = 1 + max(actor.stage for actor in plan.actors)
    few = max(FEWEST, FULL * stages)
    more = few + max(FEWEST // 2, stages)
    return (few, more) if few + more <= plan.pieces // 2 else None


def with_pieces(folded: FoldedPlan, pieces: int) -> FoldedPlan:
    """A plan whose steps have another number of equal micro-batches, of which each is what it was."""
    plan = folded.plan
    if pieces == plan.pieces:
        return folded

    def of(count: int) -> int:
        return pieces if count == plan.pieces else count

    actors = tuple(replace(a, rate=of(a.rate)) for a in plan.actors)
    registers = tuple(
        replace(r, fill=of(r.fill), readers=tuple(replace(read, firings=of(read.firings)) for read in r.readers))
        for r in plan.registers
    )
    return replace(folded, plan=replace(plan, actors=actors, registers=registers, pieces=pieces))


# ---- inside


def _is_even(plan: Plan) -> bool:
    """Whether everything happens once in an iteration, or once for each micro-batch."""
    known = {1, plan.pieces}
    return all(a.rate in known for a in plan.actors) and all(
        {r.fill, *(read.firings for read in r.readers)} <= known for r in plan.registers
    )
