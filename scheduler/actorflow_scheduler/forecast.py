"""Forecast a scheduled plan on given hardware: period, bubble, load of its queues, peak memory, and bottlenecks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.folded import FoldedPlan, listed
from actorflow_compiler.plan.plan import Actor, OfInput, Plan, Send
from actorflow_scheduler.cost import Durations, max_workspace_bytes, shared_bytes, variable_bytes
from actorflow_scheduler.critical_path import critical_path
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.notation import COMPUTING, Notation, frozen
from actorflow_scheduler.rank_classes import fold
from actorflow_scheduler.shared_cores import on_shared_cores
from actorflow_scheduler.timeline import Timeline, nanoseconds, stuck

ITERATIONS = 8  # the most that are simulated; most plans are steady after 3


@dataclass(frozen=True, slots=True)
class RankForecast:
    """The forecast for the ranks of one class, which all do the same work at the same times."""

    ranks: Sequence[int]
    busy: Mapping[str, float]  # queue → fraction of the period in which it runs an actor
    registers: int  # peak bytes of live registers
    workspace: int  # most bytes that an actor needs in addition while it fires
    variables: int  # bytes of variables: parameters, buffers, optimizer state
    order: tuple[str, ...]  # the firings of the compute queue in an iteration: "0F0", "0F1", …
    shared: int = 0  # bytes in which it leaves what others of its machine read in collectives

    @property
    def total(self) -> int:
        """Peak bytes, without temporary buffers inside ops, whose sizes are not known."""
        return self.registers + self.workspace + self.variables + self.shared


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast for a plan that is called repeatedly on some hardware."""

    name: str
    hardware: Hardware
    world: int
    micro_batches: int
    period: float  # seconds from the end of one iteration to the end of the next
    first: float  # seconds of the first iteration
    steady: bool  # whether the last simulated iterations repeat exactly; if not, ``period`` is a mean
    bubble: float  # fraction of the period in which a compute queue runs nothing, mean over the ranks
    ranks: tuple[RankForecast, ...]  # one for each class of ranks, sorted by the first rank
    critical: tuple[tuple[int, str, float], ...]  # (rank, queue, fraction of the critical path), largest first
    # (what is done, fraction of the critical path), largest first; the time in which a token is under way is its send's
    spent: tuple[tuple[str, float], ...] = ()
    drafted: bool = False  # it lies on lines through the forecasts of shorter plans
    fed: bool = False  # whether sources take arguments of the call; the time to read these is not in the forecast

    @property
    def fits(self) -> bool | None:
        """Whether every rank's peak bytes fit its memory; None if the hardware file does not give the memory."""
        memory = self.hardware.memory_bytes
        return None if memory is None else all(r.total <= memory for r in self.ranks)


def forecast(plan: Plan | FoldedPlan, hardware: Hardware) -> Forecast:
    """Forecast a scheduled plan by simulating one rank of each class.

    A collective costs as much as in its whole group.  Raises DeadlockError if the plan gets stuck and PlanError if a
    queue has no order.
    """
    if isinstance(plan, FoldedPlan):
        plan = replace(plan, plan=plan.on_planes)
    whole = listed(plan)
    times = nanoseconds(whole, hardware)
    folded = fold(plan, times)
    plan = folded.plan
    sizes = {rank: len(alike) for rank, alike in folded.rank_classes.items()}
    times = on_shared_cores(plan, times, hardware.cores, sizes)
    firings, cycle = run_until_steady(plan, times, whole)
    timeline = Timeline(plan, firings.iterations, firings.fired, firings.ends, firings.durations)
    over = cycle or max(1, firings.iterations // 2)  # iterations that the period is taken from
    ends = (0, *timeline.iteration_ends)
    span = ends[-1] - ends[-1 - over]
    worked = _worked(plan, firings.durations)
    period = span / over or 1
    notation, orders = Notation(plan), frozen(plan)
    peaks, variables, workspace = timeline.peak_bytes, variable_bytes(plan), max_workspace_bytes(plan)
    shared = shared_bytes(plan)
    ranks = tuple(
        RankForecast(
            ranks=folded.rank_classes[rank],
            busy={queue: time / period for queue, time in worked[rank].items()},
            registers=peaks[rank],
            workspace=workspace[rank],
            variables=variables[rank],
            order=tuple(notation.words(orders.get(rank, ()))),
            shared=shared[rank],
        )
        for rank in sorted(folded.rank_classes)
    )
    idle = [(len(r.ranks), 1 - r.busy[COMPUTING]) for r in ranks if COMPUTING in r.busy]
    blame: Counter[tuple[int, str]] = Counter()
    spent: Counter[str] = Counter()
    for actor, time in critical_path(firings, span):
        blame[plan.actor(actor).rank, plan.actor(actor).queue] += time
        spent[_doing(plan.actor(actor), hardware)] += time
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
        spent=tuple((what, time / span) for what, time in spent.most_common()),
        fed=any(isinstance(operand, OfInput) for actor in whole.actors for operand in actor.operands),
    )


def _doing(actor: Actor, hardware: Hardware) -> str:
    """What an actor does, for people: computing, or a kind of communication and where it takes place."""
    comm = actor.comm
    if comm is None:
        return "computing" if actor.body is not None else "handing on"
    where = ""
    if hardware.node_size is not None:
        where = " inside a node" if len({rank // hardware.node_size for rank in comm.ranks}) == 1 else " between nodes"
    return ("sends" if isinstance(comm, Send) else f"{comm.kind.replace('_', '-')}s") + where


def run_until_steady(plan: Plan, times: Durations, whole: Plan) -> tuple[FiringTimes, int]:
    """Evaluate iterations of a (folded) plan until they repeat, at most ITERATIONS, and fewer of one with many firings.

    Returns the firings and the number of iterations after which they repeat (0: they do not).  Raises DeadlockError, in
    terms of the ``whole`` plan, if it gets stuck.
    """
    firings = FiringTimes(plan, times)
    cycle = 0
    while not cycle and firings.iterations < ITERATIONS and not firings.is_long:
        if not firings.run():
            raise stuck(whole, firings.iterations)
        cycle = _cycle(firings)
    return firings, cycle


def _cycle(firings: FiringTimes) -> int:
    """The length in iterations of the cycle that the last iterations repeat, shifted in time; 0 if there is none."""
    return next((c for c in range(1, firings.iterations // 2 + 1) if _repeats(firings, c)), 0)


def _repeats(firings: FiringTimes, cycle: int) -> bool:
    """Whether the last ``cycle`` iterations equal those before them, with all times shifted by the same amount."""
    by: int | None = None
    for actor in firings.plan.actors:
        half = cycle * actor.rate
        times = np.array(firings.ends[actor.id][-2 * half :], np.int64)
        later = times[half:] - times[:half]
        by = int(later[0]) if by is None else by
        if (later != by).any():
            return False
    return True


def _worked(plan: Plan, durations: Mapping[int, int]) -> dict[int, dict[str, int]]:
    """Rank → queue → nanoseconds of work in an iteration."""
    worked: dict[int, dict[str, int]] = {}
    for a in plan.actors:
        queues = worked.setdefault(a.rank, {})
        queues[a.queue] = queues.get(a.queue, 0) + a.rate * durations[a.id]
    return worked
