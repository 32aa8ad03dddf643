"""The timeline of a run as pages draw it, forecast or measured, and how to make the forecast one from a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from actorflow_compiler.core.hardware import Hardware, SharedCores
from actorflow_compiler.plan.plan import ActorKind, Plan
from actorflow_scheduler import timeline as simulated
from actorflow_scheduler.cost import Durations, variable_bytes
from actorflow_scheduler.critical_path import critical_firings
from actorflow_scheduler.forecast import run_until_steady
from actorflow_scheduler.rank_classes import FoldedPlan, fold
from actorflow_scheduler.shared_cores import on_shared_cores
from actorflow_scheduler.timeline import nanoseconds, stuck

__all__ = ["ALL_RANKS", "TimelineSpan", "TimelineView", "forecast_timeline", "simulated_timeline"]

ALL_RANKS = 8  # up to so many ranks all are drawn; of more, one rank of each class


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One firing of an actor."""

    rank: int
    queue: str
    actor: int
    firing: int  # number of the firing since the timeline's first iteration
    piece: int  # number of the firing within its iteration
    kind: ActorKind
    start: float  # seconds on the timeline's clock
    end: float  # seconds


@dataclass(frozen=True, slots=True)
class TimelineView:
    """What the queues of the ranks do in some iterations, forecast or measured.

    ``begin`` and ``end`` bound the iteration that is shown first.  ``rank_classes`` gives, for a rank that has spans,
    all ranks that do the same at the same times, itself included; a rank that is not in it stands for itself.
    ``memory`` gives for each rank the instants (in seconds, ascending) at which its bytes change, and how many bytes
    it holds from each instant on.
    """

    spans: tuple[TimelineSpan, ...]
    begin: float  # seconds
    end: float  # seconds
    critical: frozenset[tuple[int, int]] = frozenset()  # (actor, firing) of the firings on the critical path
    rank_classes: Mapping[int, Sequence[int]] = field(default_factory=lambda: MappingProxyType({}))
    memory: Mapping[int, tuple[Sequence[float], Sequence[int]]] = field(default_factory=lambda: MappingProxyType({}))

    def ranks_of(self, rank: int) -> Sequence[int]:
        """The ranks that a listed one stands for."""
        return self.rank_classes.get(rank, (rank,))


def forecast_timeline(plan: Plan | FoldedPlan, hardware: Hardware) -> TimelineView:
    """Simulate a scheduled plan until its iterations repeat; of more than ALL_RANKS ranks, one of each class.

    Raises DeadlockError if the plan gets stuck and PlanError if a queue has no order.
    """
    times = nanoseconds(plan.on_planes if isinstance(plan, FoldedPlan) else plan, hardware)
    return simulated_timeline(plan, times, hardware.cores)


def simulated_timeline(made: Plan | FoldedPlan, times: Durations, cores: SharedCores | None = None) -> TimelineView:
    """Like ``forecast_timeline``, from given durations of the actors' firings, of ranks that share ``cores``."""
    classes: Mapping[int, Sequence[int]] = {}
    plan = whole = made.plan if isinstance(made, FoldedPlan) else made
    if isinstance(made, FoldedPlan) or plan.world > ALL_RANKS:
        folded = fold(made, times)
        plan, classes = folded.plan, folded.rank_classes
    sizes = {rank: len(classes.get(rank, (rank,))) for rank in {a.rank for a in plan.actors}}
    times = on_shared_cores(plan, times, cores, sizes)
    firings, cycle = run_until_steady(plan, times, whole)
    if not firings.run():  # one more, so that the iteration that is shown first has a next one
        raise stuck(whole, firings.iterations)
    run = simulated.Timeline(plan, firings.iterations, firings.fired, firings.ends, firings.durations)
    actors = {a.id: a for a in plan.actors}
    spans = tuple(
        TimelineSpan(
            s.rank, s.queue, s.actor, s.firing, s.firing % actors[s.actor].rate, actors[s.actor].kind, s.start, s.end
        )
        for s in run.spans
    )
    shown, cycle = run.iterations - 2, cycle or 1
    begin = min(
        (
            s.start
            for s in spans
            if s.firing // actors[s.actor].rate == shown and s.kind not in (ActorKind.SOURCE, ActorKind.SINK)
        ),
        default=0.0,
    )
    ends = (0, *run.iteration_ends)
    critical = {
        (member, n - back * actors[member].rate)
        for actor, n in critical_firings(firings, ends[-1] - ends[-1 - cycle])
        for member in firings.members(actor)
        for back in range(0, run.iterations, cycle)  # the critical path repeats with the iterations
    }
    return TimelineView(spans, begin, ends[-2] / 1e9, frozenset(critical), classes, _memory(plan, run))


def _memory(plan: Plan, run: simulated.Timeline) -> dict[int, tuple[Sequence[float], Sequence[int]]]:
    """Rank → the bytes of its variables, live registers and firing actors' workspace over time."""
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
