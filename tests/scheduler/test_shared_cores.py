"""Forecasts where the ranks of a host share its cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.core.hardware import Hardware, Link, SharedCores
from actorflow_compiler.plan.plan import Collective, FromRegister, Plan, Plane
from actorflow_scheduler import schedule
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.shared_cores import on_shared_cores
from actorflow_scheduler.timeline import Timeline, nanoseconds, simulate
from plans import Sketch, pipeline

UNIT = Hardware(flops_per_s=1.0, bytes_per_s=1e12, latency_s=0.0, fire_overhead_s=0.0)  # one operation a second


def on(share: float, threads: int = 1, hardware: Hardware = UNIT) -> Hardware:
    return replace(hardware, cores=SharedCores(share, threads))


def beside_a_collective(plane: Plane) -> Plan:
    """Two ranks that compute for 10 s while they carry out a collective of 4 bytes, which takes 4 s."""
    s = Sketch()
    for rank in (0, 1):
        s.actor("F", rank=rank, flops=10.0)
    for rank in (0, 1):
        s.actor("source", "source", rank, "source", flops=0.0)
    moved = s.collective((0, 1), operands=(FromRegister(0, 0),), targets=(FromRegister(1, 0),))
    s.join(2, moved[0])
    s.join(3, moved[1])
    plan = s.plan({})
    actors = tuple(
        replace(a, comm=replace(a.comm, plane=plane)) if isinstance(a.comm, Collective) else a for a in plan.actors
    )
    return replace(plan, actors=actors)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("share", "threads", "slower"), [(1, 1, 1), (2, 1, 1), (0.5, 1, 2), (0.25, 1, 4), (1, 3, 3)])
def test_ranks_that_compute_at_once_are_as_much_slower_as_cores_are_missing(
    ranks: int, share: float, threads: int, slower: float
) -> None:
    plan = schedule(pipeline(1, 2, replicas=ranks), UNIT)
    alone = forecast(plan, UNIT)
    found = forecast(plan, on(share, threads))
    assert found.period == pytest.approx(slower * alone.period)
    assert found.first == pytest.approx(slower * alone.first)
    assert found.bubble == pytest.approx(alone.bubble, abs=1e-6)


def test_a_stage_that_waits_leaves_its_cores_to_others() -> None:
    plan = schedule(pipeline(4, 4), UNIT)
    alone = forecast(plan, UNIT)
    work = sum(a.rate * a.flops for a in plan.actors)
    assert work < 4 * alone.period
    assert forecast(plan, on(1.0)).period == alone.period
    one_core = forecast(plan, on(0.25)).period
    assert one_core == pytest.approx(max(work, alone.period), rel=0.02)
    assert alone.period < forecast(plan, on(0.5)).period < one_core


def test_a_collective_in_shared_memory_is_work_of_the_thread_that_computes() -> None:
    slow = replace(UNIT, collectives=Link(1.0, 0.0))
    plan = beside_a_collective(Plane.SHARED)
    moved = nanoseconds(plan, slow).firing[4] / 1e9
    assert moved == pytest.approx(4.0)
    assert forecast(plan, slow).period == pytest.approx(10.0)
    assert forecast(plan, on(1, 1, slow)).period == pytest.approx(14.0)
    assert forecast(plan, on(4, 4, slow)).period == pytest.approx(14.0)
    gloo = beside_a_collective(Plane.GLOO)  # by threads of its own
    assert forecast(gloo, on(2, 1, slow)).period == pytest.approx(10.0)
    assert forecast(gloo, on(1, 1, slow)).period > 13


def test_a_rank_of_each_class_stands_for_all_of_them() -> None:
    plan = schedule(pipeline(2, 4, replicas=4, statistics=(1,)), UNIT)
    hardware = on(0.5)
    whole = on_shared_cores(plan, nanoseconds(plan, hardware), hardware.cores, dict.fromkeys(range(8), 1))
    found = forecast(plan, hardware)
    assert [len(r.ranks) for r in found.ranks] == [4, 4]
    firings = FiringTimes(plan, whole)
    assert firings.run(4)
    timeline = Timeline(plan, 4, firings.fired, firings.ends, firings.durations)
    assert found.period == pytest.approx(timeline.period)
    assert found.period > 1.4 * simulate(plan, 4, UNIT).period


def test_a_plan_without_actors_is_left_as_it_is() -> None:
    plan = Plan("nothing", 2, 1, (), (), ())
    times = nanoseconds(plan, UNIT)
    assert on_shared_cores(plan, times, SharedCores(0.5, 1), {}) is times


def test_what_gets_stuck_does_so_with_shared_cores_too() -> None:
    s = Sketch()
    first, second = s.actor("F"), s.actor("B", "backward")
    s.join(first, second)
    plan = s.plan({(0, "compute"): [second, first]})
    times = nanoseconds(plan, UNIT)
    assert on_shared_cores(plan, times, SharedCores(0.5, 1), {0: 1}) is times
    with pytest.raises(DeadlockError):
        forecast(plan, on(0.5))
