"""Say how much longer firings take where the ranks of a host share its cores, as its ranks compute on few of them.

Each rank is given its share of the cores.  Computing takes as many of them as the rank has threads, and so does a
collective in shared memory, which the thread that computes carries out; other communication takes one.  Whenever all
together want more cores than there are, all of it goes slower by as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.core.hardware import SharedCores
from actorflow_compiler.plan.plan import Actor, Collective, Plan, Plane
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.firing_times import ITERATIONS, FiringTimes

__all__ = ["on_shared_cores"]


def on_shared_cores(plan: Plan, times: Durations, cores: SharedCores | None, ranks: Mapping[int, int]) -> Durations:
    """The durations of a scheduled plan's firings where its ranks share cores, from those of ranks that do not.

    ``ranks``: rank → how many ranks it stands for, for all whose actors the plan lists.  A plan that gets stuck keeps
    the durations it has.
    """
    if cores is None or not plan.actors:
        return times
    firings = FiringTimes(plan, times)
    if not firings.run(ITERATIONS):
        return times
    clock = _Clock(plan, firings, cores, ranks)
    alone = firings.durations
    longer = {a.id: clock.mean(firings.ends[a.id], alone[a.id]) for a in plan.actors}
    again = FiringTimes(plan, Durations({id: round(time) for id, time in longer.items()}, times.latency))
    again.run(ITERATIONS)
    before, after = _end(plan, firings), _end(plan, again)
    # as all firings of an actor take its mean, those that wait for each other can add up to more than the clock says
    part = min(1.0, (clock.end - before) / (after - before)) if after > before else 1.0
    return Durations({id: max(1, round(alone[id] + part * (longer[id] - alone[id]))) for id in longer}, times.latency)


class _Clock:
    """What time it is where cores are shared when it would be a time in nanoseconds if they were not."""

    def __init__(self, plan: Plan, firings: FiringTimes, cores: SharedCores, ranks: Mapping[int, int]) -> None:
        ends = [np.array(firings.ends[a.id], np.int64) for a in plan.actors]
        starts = [end - firings.durations[a.id] for a, end in zip(plan.actors, ends, strict=True)]
        wanted = [
            np.full(len(end), ranks[a.rank] * _wanted(a, cores)) for a, end in zip(plan.actors, ends, strict=True)
        ]
        at, change = np.concatenate([*starts, *ends]), np.concatenate([*wanted, *(-w for w in wanted)])
        order = np.argsort(at, kind="stable")
        self._at: NDArray[np.int64] = at[order]
        load = np.cumsum(change[order])[:-1] / (cores.share * sum(ranks.values()))
        self._time = np.concatenate([[0.0], np.cumsum(np.maximum(1.0, load) * np.diff(self._at))])

    @property
    def end(self) -> float:
        """When all is done."""
        return float(self._time[-1])

    def mean(self, ends: Sequence[int], duration: int) -> float:
        """The nanoseconds that firings which end at these times take, on the mean."""
        last = np.array(ends, np.int64)
        begun, ended = (np.interp(at, self._at, self._time) for at in (last - duration, last))
        return float(np.mean(ended - begun))


def _end(plan: Plan, firings: FiringTimes) -> int:
    return max((firings.ends[a.id][-1] for a in plan.actors), default=0)


def _wanted(actor: Actor, cores: SharedCores) -> int:
    """The cores that an actor runs on."""
    comm = actor.comm
    if comm is None or (isinstance(comm, Collective) and comm.plane == Plane.SHARED):
        return cores.threads
    return 1
