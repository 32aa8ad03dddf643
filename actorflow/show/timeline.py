"""A plan and the hardware enter; the timeline that is foretold leaves, in the form that a measured one has, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler import timeline as simulated
from actorflow_scheduler.cost import Durations, variable_bytes
from actorflow_scheduler.critical_path import critical_firings
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.forecast import ITERATIONS, steady_after
from actorflow_scheduler.rank_classes import fold
from actorflow_scheduler.timeline import nanoseconds, stuck

__all__ = ["ALL_RANKS", "Span", "Timeline", "foretold", "from_costs"]

ALL_RANKS = 8  # ranks that are all drawn; of more, one of those that are alike


@dataclass(frozen=True, slots=True)
class Span:
    """One firing of an actor."""

    rank: int
    queue: str
    actor: int
    firing: int  # since the timeline's first iteration
    piece: int  # which of the actor's firings in its iteration
    kind: str  # the actor's, one of ``plan.KINDS``
    start: float  # seconds on the timeline's clock
    end: float  # seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the queues of the ranks do in some iterations, foretold or measured.

    ``begin`` and ``end`` bound the iteration that is looked at first.  ``alike`` says for each rank that has spans
    which ranks do the same at the same times, itself among them; a rank that it does not name stands for itself.
    ``memory`` holds for each rank the instants (seconds) at which the bytes that it holds change, ascending, and how
    many it holds from each on.
    """

    spans: tuple[Span, ...]
    begin: float  # seconds
    end: float  # seconds
    critical: frozenset[tuple[int, int]] = frozenset()  # (actor, firing) of the firings that each waited for the last
    rank_classes: Mapping[int, Sequence[int]] = field(default_factory=lambda: MappingProxyType({}))
    memory: Mapping[int, tuple[Sequence[float], Sequence[int]]] = field(default_factory=lambda: MappingProxyType({}))

    def ranks_of(self, rank: int) -> Sequence[int]:
        """The ranks that a listed one stands for."""
        return self.rank_classes.get(rank, (rank,))


def foretold(plan: Plan, hardware: Hardware) -> Timeline:
    """What a scheduled plan will do, until its iterations are alike; of many ranks, one of those that are alike.

    Raises DeadlockError if the plan gets stuck and PlanError if a queue has no order.
    """
    return from_costs(plan, nanoseconds(plan, hardware))


def from_costs(plan: Plan, times: Durations) -> Timeline:
    """The same, from what a firing of each actor takes."""
    classes: Mapping[int, Sequence[int]] = {}
    whole = plan
    if plan.world > ALL_RANKS:
        folded = fold(plan, times)
        plan, classes = folded.plan, folded.rank_classes
    firings = FiringTimes(plan, times)
    cycle = 0
    while not cycle and firings.iterations < ITERATIONS:
        if not firings.run():
            raise stuck(whole, firings.iterations)
        cycle = steady_after(firings)
    if not firings.run():  # one more, so that the iteration that is looked at has a next one
        raise stuck(whole, firings.iterations)
    run = simulated.Timeline(plan, firings.iterations, firings.fired, firings.ends, firings.durations)
    actors = {a.id: a for a in plan.actors}
    spans = tuple(
        Span(s.rank, s.queue, s.actor, s.firing, s.firing % actors[s.actor].rate, actors[s.actor].kind, s.start, s.end)
        for s in run.spans
    )
    seen, cycle = run.iterations - 2, cycle or 1
    begin = min(
        (s.start for s in spans if s.firing // actors[s.actor].rate == seen and s.kind not in ("source", "sink")),
        default=0.0,
    )
    ends = (0, *run.iteration_ends)
    critical = {
        (member, n - back * actors[member].rate)
        for actor, n in critical_firings(firings, ends[-1] - ends[-1 - cycle])
        for member in firings.members(actor)
        for back in range(0, run.iterations, cycle)  # in steady iterations it is always the same
    }
    return Timeline(spans, begin, ends[-2] / 1e9, frozenset(critical), classes, _memory(plan, run))


def _memory(plan: Plan, run: simulated.Timeline) -> dict[int, tuple[Sequence[float], Sequence[int]]]:
    """Rank → what variables, live registers and actors that fire take, over time."""
    variables = variable_bytes(plan)
    found: dict[int, tuple[Sequence[float], Sequence[int]]] = {}
    for rank, (when, live) in run.live_bytes.items():
        whens, changes = [when], [np.diff(live, prepend=0)]
        for a in plan.actors:
            if a.rank == rank and a.workspace:
                ends = np.array(run.ends[a.id], np.int64)
                whens += [ends - run.durations[a.id], ends]
                changes += [np.full(len(ends), a.workspace), np.full(len(ends), -a.workspace)]
        at, change = np.concatenate(whens), np.concatenate(changes)
        order = np.lexsort((change, at))
        at, held = at[order], variables[rank] + np.cumsum(change[order])
        final = np.append(at[1:] != at[:-1], True)  # of several changes at an instant, what is left after the last
        found[rank] = tuple((at[final] / 1e9).tolist()), tuple(held[final].tolist())
    return found
