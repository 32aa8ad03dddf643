"""Random plans: after schedule() they are live, keep within their slots and fire every actor as often as asked."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler import Hardware, schedule
from actorflow_scheduler.events import Fire, Instruction, Release
from actorflow_scheduler.proof import prove
from actorflow_scheduler.simulated_cluster import SimulatedCluster
from actorflow_scheduler.timeline import simulate
from drawn_plans import meshes, pipelines
from fewer import fewer

ITERATIONS = 3


def run_in_any_order(plan: Plan, seed: int, parts: dict[int, Plan] | None = None) -> Counter[int]:
    """Fire a plan's actors for some iterations, finishing them in a random order; counts the firings.

    With ``parts`` every machine knows only its rank's.
    """
    cluster = SimulatedCluster(plan, parts=parts)
    chance = random.Random(seed)
    taken = {r.id: r.initial for r in plan.registers}
    fired: Counter[int] = Counter()
    running: list[Fire] = []

    def carry_out(instructions: list[Instruction]) -> None:
        for i in instructions:
            if isinstance(i, Fire):
                for register, _, _ in i.writes:
                    taken[register] += i.firing % plan.register(register).fill == 0
                    assert taken[register] <= plan.register(register).slots
                running.extend(cluster.meet(i))
            elif isinstance(i, Release):
                taken[i.register] -= 1

    for _ in range(ITERATIONS):
        carry_out(cluster.issue())
    while running:
        fire = running.pop(chance.randrange(len(running)))
        fired[fire.actor] += 1
        carry_out(cluster.finish(fire))
    if not cluster.idle():
        raise cluster.deadlock()
    assert taken == {r.id: r.initial for r in plan.registers}
    return fired


@st.composite
def spoilt(draw: st.DrawFn) -> Plan:
    """A scheduled plan with some slots less or more, and some firings of a queue exchanged: live or not."""
    plan = schedule(draw(st.one_of(pipelines(), meshes())))
    slots = {r.id: max(1, r.initial, r.slots + draw(st.sampled_from((0, 0, 0, 1, -1, -2)))) for r in plan.registers}
    orders = list(plan.orders)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(orders) - 1))
        actors = list(orders[at].actors)
        i, j = (draw(st.integers(0, len(actors) - 1)) for _ in range(2))
        actors[i], actors[j] = actors[j], actors[i]
        orders[at] = replace(orders[at], actors=tuple(actors))
    return replace(plan, orders=tuple(orders), registers=tuple(replace(r, slots=slots[r.id]) for r in plan.registers))


def is_proven(plan: Plan) -> bool:
    try:
        prove(plan)
    except DeadlockError:
        return False
    return True


def without_tensors(plan: Plan) -> Plan:
    """A plan whose actors only wait for each other, which the real runtime can run."""
    return replace(
        plan,
        actors=tuple(replace(a, operands=(), targets=()) for a in plan.actors),
        registers=tuple(replace(r, tensors=()) for r in plan.registers),
    )


def expected(plan: Plan) -> Counter[int]:
    return Counter({a.id: a.rate * ITERATIONS for a in plan.actors})


@settings(max_examples=fewer(25), deadline=None)
@given(pipelines(), st.integers(0, 1000))
def test_random_pipelines_run_to_the_end_whatever_finishes_first(plan: Plan, seed: int) -> None:
    plan = schedule(plan)
    assert run_in_any_order(plan, seed) == expected(plan)


@settings(max_examples=fewer(60), deadline=None)
@given(meshes(), st.integers(0, 1000))
def test_random_graphs_with_random_collectives_run_to_the_end_whatever_finishes_first(plan: Plan, seed: int) -> None:
    plan = schedule(verify(plan))
    assert run_in_any_order(plan, seed) == expected(plan)


@settings(max_examples=fewer(25), deadline=None)
@given(meshes())
def test_the_timeline_keeps_within_slots_and_fires_everything(plan: Plan) -> None:
    plan = schedule(plan)
    timeline = simulate(plan, ITERATIONS, Hardware())
    assert Counter(span.actor for span in timeline.spans) == expected(plan)
    assert all(timeline.peak_slots[r.id] <= r.slots for r in plan.registers)
    assert all(0 <= share <= 1 for share in timeline.busy.values())


@settings(max_examples=fewer(15), deadline=None)
@given(pipelines(), st.integers(0, 1000))
def test_the_parts_of_a_plan_drive_their_ranks_as_the_whole_does(plan: Plan, seed: int) -> None:
    plan = schedule(plan)
    parts = {rank: plan.for_rank(rank) for rank in range(plan.world)}
    assert run_in_any_order(plan, seed, parts) == expected(plan)


@settings(max_examples=fewer(60), deadline=None)
@given(spoilt(), st.integers(0, 1000))
def test_plans_run_to_the_end_exactly_when_they_are_proven(plan: Plan, seed: int) -> None:
    if is_proven(plan):
        assert run_in_any_order(plan, seed) == expected(plan)
    else:
        with pytest.raises(DeadlockError):
            run_in_any_order(plan, seed)


@settings(max_examples=fewer(12), deadline=None)
@given(spoilt())
def test_plans_run_to_the_end_in_the_real_runtime_exactly_when_they_are_proven(plan: Plan) -> None:
    proven = is_proven(plan)
    with LocalCluster(without_tensors(plan), timeout=60.0 if proven else 0.2) as cluster:
        calls = [call for _ in range(ITERATIONS) for call in cluster.issue()]
        if proven:
            for call in calls:
                call.wait(60.0)
        else:
            with pytest.raises(TimeoutError, match="waits for"):
                cluster.run()
