"""A scheduled plan and the hardware enter; what will limit it leaves: period, bubble, busy queues, peak bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.cost import momentary_bytes, variable_bytes
from actorflow_scheduler.critical_path import critical_path
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.notation import COMPUTING, Notation, frozen
from actorflow_scheduler.rank_classes import FoldedPlan, fold
from actorflow_scheduler.timeline import Timeline, nanoseconds, stuck

ITERATIONS = 8  # at most; most plans are steady after 3


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What ranks that are alike will do."""

    ranks: Sequence[int]
    busy: Mapping[str, float]  # queue → share of the period in which it runs an actor
    registers: int  # bytes of registers that are live at a time, at most
    momentary: int  # bytes that an actor needs on top while it fires, at most
    variables: int  # bytes of variables: parameters, buffers, optimizer state
    order: tuple[str, ...]  # of the compute queue in an iteration: "0F0", "0F1", …

    @property
    def total(self) -> int:
        """Bytes at the worst moment; what an op takes for itself, and tells nobody, comes on top."""
        return self.registers + self.momentary + self.variables


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan will do on some hardware, called again and again."""

    name: str
    hardware: Hardware
    world: int
    micro_batches: int
    period: float  # seconds from one iteration's end to the next one's
    first: float  # seconds of the first iteration
    steady: bool  # the last iterations were exactly alike; else ``period`` is a mean
    bubble: float  # share of the period in which a compute queue runs nothing, mean over the ranks
    ranks: tuple[RankForecast, ...]  # a class of alike ranks each, by the first rank
    critical: tuple[tuple[int, str, float], ...]  # (rank, queue, share of the period that waits for it), most first

    @property
    def fits(self) -> bool | None:
        """Whether what every rank holds fits its memory; None if the hardware does not say."""
        memory = self.hardware.memory_bytes
        return None if memory is None else all(r.total <= memory for r in self.ranks)


def forecast(plan: Plan | FoldedPlan, hardware: Hardware) -> Forecast:
    """Foretell what a scheduled plan does; alike ranks are simulated once.

    A collective costs what its whole group makes of it.  Raises DeadlockError if the plan gets stuck
    and PlanError if a queue has no order.
    """
    whole = plan.plan if isinstance(plan, FoldedPlan) else plan
    times = nanoseconds(whole, hardware)
    folded = fold(plan, times)
    plan = folded.plan
    firings = FiringTimes(plan, times)
    cycle = 0
    while not cycle and firings.iterations < ITERATIONS:
        if not firings.run():
            raise stuck(whole, firings.iterations)
        cycle = steady_after(firings)
    timeline = Timeline(plan, firings.iterations, firings.fired, firings.ends, firings.lasts)
    over = cycle or max(1, firings.iterations // 2)  # iterations that the period is taken from
    ends = (0, *timeline.iteration_ends)
    span = ends[-1] - ends[-1 - over]
    worked = _worked(plan, firings.lasts)
    period = span / over or 1
    notation, orders = Notation(plan), frozen(plan)
    peaks, variables, momentary = timeline.peak_bytes, variable_bytes(plan), momentary_bytes(plan)
    ranks = tuple(
        RankForecast(
            ranks=folded.alike[rank],
            busy={queue: time / period for queue, time in worked[rank].items()},
            registers=peaks[rank],
            momentary=momentary[rank],
            variables=variables[rank],
            order=tuple(notation.words(orders.get(rank, ()))),
        )
        for rank in sorted(folded.alike)
    )
    idle = [(len(r.ranks), 1 - r.busy[COMPUTING]) for r in ranks if COMPUTING in r.busy]
    blame: Counter[tuple[int, str]] = Counter()
    for actor, time in critical_path(firings, span):
        blame[plan.actor(actor).rank, plan.actor(actor).queue] += time
    return Forecast(
        name=plan.name,
        hardware=hardware,
        world=plan.world,
        micro_batches=plan.pieces,
        period=period / 1e9,
        first=ends[1] / 1e9,
        steady=bool(cycle),
        bubble=sum(n * share for n, share in idle) / (sum(n for n, _ in idle) or 1),
        ranks=ranks,
        critical=tuple((rank, queue, time / span) for (rank, queue), time in blame.most_common()),
    )


def steady_after(firings: FiringTimes) -> int:
    """How many iterations the last ones repeat, later by the same time; 0 if they do not."""
    return next((c for c in range(1, firings.iterations // 2 + 1) if _repeats(firings, c)), 0)


def _repeats(firings: FiringTimes, cycle: int) -> bool:
    """Whether the last ``cycle`` iterations are those before them, all later by the same time."""
    by: int | None = None
    for actor in firings.plan.actors:
        half = cycle * actor.rate
        times = np.array(firings.ends[actor.id][-2 * half :], np.int64)
        later = times[half:] - times[:half]
        by = int(later[0]) if by is None else by
        if (later != by).any():
            return False
    return True


def _worked(plan: Plan, lasts: Mapping[int, int]) -> dict[int, dict[str, int]]:
    """Rank → queue → nanoseconds of work in an iteration."""
    worked: dict[int, dict[str, int]] = {}
    for a in plan.actors:
        queues = worked.setdefault(a.rank, {})
        queues[a.queue] = queues.get(a.queue, 0) + a.rate * lasts[a.id]
    return worked
