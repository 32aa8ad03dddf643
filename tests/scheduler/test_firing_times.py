"""The equations of firings against the machines themselves, event by event."""

from __future__ import annotations

from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler import schedule
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.critical_path import critical_path
from actorflow_scheduler.events import (
    ActorFinished,
    CreditReturned,
    Fire,
    GiveCredit,
    Instruction,
    Release,
    TokenArrived,
)
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.machine import Machine
from actorflow_scheduler.simulated_cluster import SimulatedCluster
from actorflow_scheduler.timeline import Timeline, nanoseconds, simulate
from drawn_plans import meshes, pipelines
from fewer import fewer
from orders import least, ordered, with_slots
from plans import Sketch, pipeline

ITERATIONS = 3
HARDWARES = (
    Hardware(flops_per_s=1e9, latency_s=1e-3),
    Hardware(flops_per_s=1e6, bytes_per_s=1e12, latency_s=0.0, fire_overhead_s=0.0),
)


@st.composite
def frozen(draw: st.DrawFn) -> tuple[Plan, Hardware]:
    """A plan with any slot counts that let it run, and some order, and hardware."""
    plan = draw(st.one_of(pipelines(), meshes()))
    extra = draw(st.integers(0, 2))
    slots = {r: n if plan.register(r).initial else n + r * extra % 3 for r, n in least(plan).items()}
    hardware = draw(st.sampled_from(HARDWARES))
    return ordered(with_slots(plan, slots), hardware), hardware


def by_events(plan: Plan, hardware: Hardware) -> tuple[dict[int, list[int]], dict[int, list[int]], dict[int, int]]:
    """When the machines of all ranks fire and finish each firing, and the most slots of each register.

    What they tell each other arrives when its way is over.
    """
    times, cluster = nanoseconds(plan, hardware), SimulatedCluster(plan)
    machine = {a.id: cluster.machines[a.rank] for a in plan.actors}
    home = {r.id: cluster.machines[plan.home(r)] for r in plan.registers}
    producer = {r.id: r.producer for r in plan.registers}
    fired: dict[int, list[int]] = {a.id: [] for a in plan.actors}
    ends: dict[int, list[int]] = {a.id: [] for a in plan.actors}
    taken = {r.id: r.initial for r in plan.registers}
    most = dict(taken)
    events: list[tuple[int, int, Machine, Fire | TokenArrived | CreditReturned]] = []
    now = count = 0

    def later(after: int, to: Machine, what: Fire | TokenArrived | CreditReturned) -> None:
        nonlocal count
        count += 1
        heappush(events, (now + after, count, to, what))

    def carry_out(instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Fire):
                fired[instruction.actor].append(now)
                for register, _, _ in instruction.writes:
                    if not instruction.firing % plan.register(register).fill:
                        taken[register] += 1
                ready = cluster.meet(instruction)
                for fire in ready:
                    later(max(times.firing[f.actor] for f in ready), machine[fire.actor], fire)
            elif isinstance(instruction, GiveCredit):
                send = producer[instruction.register]
                later(times.latency[send], machine[send], CreditReturned(instruction.register))
            elif isinstance(instruction, Release):
                taken[instruction.register] -= 1

    for _ in range(ITERATIONS):
        carry_out(cluster.issue())
    most |= taken
    while events:
        now, _, at, what = heappop(events)
        if isinstance(what, Fire):
            ends[what.actor].append(now)
            for register, _, last in what.writes:
                if last and home[register] is not at:
                    later(times.latency[what.actor], home[register], TokenArrived(register))
            carry_out(at.handle(ActorFinished(what.actor)))
        else:
            carry_out(at.handle(what))
        if not events or events[0][0] != now:  # what is freed at an instant may be taken at once
            most |= {r: n for r, n in taken.items() if n > most[r]}
    assert cluster.idle()
    return fired, ends, most


@settings(max_examples=fewer(60), deadline=None)
@given(frozen())
def test_firings_happen_when_the_machines_fire_them(drawn: tuple[Plan, Hardware]) -> None:
    plan, hardware = drawn
    fired, ends, most = by_events(plan, hardware)
    timeline = simulate(plan, ITERATIONS, hardware)
    assert {actor: list(times) for actor, times in timeline.fired.items()} == fired
    assert {actor: list(times) for actor, times in timeline.ends.items()} == ends
    assert timeline.peak_slots == most


@settings(max_examples=fewer(25), deadline=None)
@given(frozen())
def test_iterations_that_are_added_are_those_of_one_run(drawn: tuple[Plan, Hardware]) -> None:
    plan, hardware = drawn
    firings = FiringTimes(plan, nanoseconds(plan, hardware))
    for _ in range(ITERATIONS):
        assert firings.run()
    assert firings.ends == simulate(plan, ITERATIONS, hardware).ends


@settings(max_examples=fewer(40), deadline=None)
@given(frozen())
def test_the_critical_path_leaves_no_gap_from_the_end_to_the_call(drawn: tuple[Plan, Hardware]) -> None:
    plan, hardware = drawn
    firings = FiringTimes(plan, nanoseconds(plan, hardware))
    firings.run(ITERATIONS)
    end = max(Timeline(plan, ITERATIONS, firings.fired, firings.ends, firings.durations).iteration_ends)
    assert sum(time for _, time in critical_path(firings, end)) == end


def test_a_queue_without_an_order_is_refused() -> None:
    s = Sketch()
    s.actor("F")
    with pytest.raises(PlanError, match="rank 0, queue compute has no frozen order"):
        FiringTimes(s.plan(), Durations({0: 1}, {}))


def test_bytes_peak_where_tokens_are_made_before_others_go() -> None:
    plan = schedule(pipeline(3, 6, nbytes=400), HARDWARES[1])
    timeline = simulate(plan, ITERATIONS, HARDWARES[1])
    slots = {r.id: r for r in plan.registers}
    for rank, most in timeline.peak_bytes.items():
        mine = [r for r in slots.values() if plan.home(r) == rank]
        assert max(r.nbytes for r in mine) < most <= sum(r.nbytes * timeline.peak_slots[r.id] for r in mine)
