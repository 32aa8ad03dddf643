"""Runs of a plan made by hand, in this process, as traces."""

from __future__ import annotations

from functools import cache

from actorflow.runtime.recorder import Recorder
from actorflow.testing.local_cluster import LocalCluster
from actorflow.tracing.chrome import RankRecording, events, joined
from actorflow.tracing.folder import RankInfo, TraceData, TracedPlan
from actorflow.tracing.measurement import Measurement
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.timeline import nanoseconds
from runtime.trainings import LIBRARY, batches, training, weights

CALLS = 6
LIMIT = 200.0  # seconds, which only a hang takes


@cache
def recorded(limit: int = 100) -> tuple[Plan, tuple[RankRecording, ...]]:
    """What each of two ranks recorded of some training steps."""
    plan = training()
    values = dict(zip(("w0", "w1"), weights(), strict=True))
    with LocalCluster(plan, variables=values, library=LIBRARY, trace=limit) as cluster:
        for x, t in batches(CALLS):
            cluster.issue({"x": x, "t": t}, {"step": -0.01})
        kept: list[Recorder] = []
        for worker in cluster.workers:
            worker.wait_all(LIMIT)
            assert worker.record is not None
            kept.append(worker.record)
    parts = tuple(
        RankRecording(rank, "here", 1, {0: plan.for_rank(rank)}, k.fired, k.arrivals, k.credits, k.begun)
        for rank, k in enumerate(kept)
    )
    return plan, parts


def trace(limit: int = 100, costs: Durations | None = None) -> TraceData:
    """The same as a trace of the run, with a forecast of its costs."""
    plan, parts = recorded(limit)
    ran = TracedPlan(0, plan, "a core", costs or nanoseconds(plan, CPU_CORE))
    ranks = tuple(RankInfo(rank, "here", 1, 0) for rank in range(plan.world))
    return TraceData("train.py", "0.1", ranks, (ran,), joined(map(events, parts)))


def as_forecast(plan: Plan, costs: Durations, iterations: int = CALLS) -> Measurement:
    """A run in which everything happened when the forecast says, and messages took no time."""
    firings = FiringTimes(plan, costs)
    assert firings.run(iterations)
    starts = {a.id: [end - firings.durations[a.id] for end in firings.ends[a.id]] for a in plan.actors}
    remote = [r for r in plan.registers if plan.actor(r.producer).rank != plan.home(r)]
    return Measurement(
        plan,
        starts,
        firings.ends,
        {r.id: firings.ends[r.producer] for r in remote},
        {r.id: firings.ends[r.readers[0].actor] for r in remote if len(r.readers) == 1},
        {rank: [0] * iterations for rank in range(plan.world)},
        {rank: [0] * iterations for rank in range(plan.world)},
    )
