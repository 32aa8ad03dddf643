"""Slot counts from the linear program: few, and yet the period is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.schedule_names import schedule_name
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.cost import register_bytes
from actorflow_scheduler.portfolio import SAME, Candidate, Portfolio, period
from actorflow_scheduler.proof import prove
from actorflow_scheduler.slots import SlotPlanner, roomy
from actorflow_scheduler.timeline import nanoseconds, simulate
from drawn_plans import meshes, pipelines
from fewer import fewer
from plans import Sketch, pipeline

UNIT = Hardware(flops_per_s=1e3, bytes_per_s=1e15, latency_s=0.0, fire_overhead_s=0.0)  # F takes 1 ms
SLOW = Hardware(flops_per_s=1e3, bytes_per_s=1e15, latency_s=3e-4, fire_overhead_s=1e-6)
# levels: without a second slot between queues; as few as the order allows
SINGLE, LEAST = 1, len(SlotPlanner.LEVELS) - 1


def found(plan: Plan, hardware: Hardware, name: str) -> tuple[Portfolio, Candidate]:
    """A published schedule's candidate."""
    portfolio = Portfolio(plan, nanoseconds(plan, hardware))
    portfolio.follow(schedule_name(name))
    return portfolio, portfolio.found[0]


def sized(portfolio: Portfolio, candidate: Candidate, level: int, solved: int = 10_000) -> Plan:
    """The candidate's plan with slot counts."""
    slots = SlotPlanner(portfolio.graph, solved).slots(candidate.run, candidate.period, level)
    return replace(candidate.plan, registers=tuple(replace(r, slots=slots[r.id]) for r in candidate.plan.registers))


def saved(plan: Plan, reader: str) -> list[int]:
    """Slots of what forward saves, by stage."""
    names = {a.id: a.name for a in plan.actors}
    return [
        r.slots
        for r in plan.registers
        if names[r.producer].startswith("F") and any(names[x.actor].startswith(reader) for x in r.readers)
    ][::-1]


@settings(max_examples=fewer(30), deadline=None)
@given(st.one_of(pipelines(), meshes()), st.sampled_from((SLOW, Hardware(flops_per_s=1e9))))
def test_counts_keep_the_period_that_slots_for_everything_give(plan: Plan, hardware: Hardware) -> None:
    portfolio = Portfolio(plan, nanoseconds(plan, hardware))
    portfolio.search()
    for candidate in portfolio.found[:3]:
        plentiful, single = (sized(portfolio, candidate, level) for level in (0, SINGLE))
        prove(plentiful)
        assert all(a.slots >= b.slots for a, b in zip(plentiful.registers, single.registers, strict=True))
        assert period(portfolio.evaluate(single)) <= candidate.period * (1 + SAME)


@settings(max_examples=fewer(30), deadline=None)
@given(st.one_of(pipelines(), meshes()))
def test_the_fewest_counts_are_live(plan: Plan) -> None:
    portfolio = Portfolio(plan, nanoseconds(plan, SLOW))
    portfolio.search()
    few = sized(portfolio, portfolio.found[0], LEAST)
    assert prove(few)
    assert prove(sized(portfolio, portfolio.found[0], LEAST, solved=0))
    assert all(total <= register_bytes(roomy(plan))[rank] for rank, total in register_bytes(few).items())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_one_slot_less_of_what_forward_saves_stops_the_plan_or_makes_it_slower(name: str) -> None:
    portfolio, candidate = found(pipeline(3, 8, weights=name.startswith("zb")), UNIT, name)
    plan = sized(portfolio, candidate, 0)
    names = {a.id: a.name for a in plan.actors}
    several = [r for r in plan.registers if names[r.producer].startswith("F") and r.slots > 2]
    assert several
    for register in several:
        fewer = (replace(r, slots=r.slots - (r.id == register.id)) for r in plan.registers)
        try:
            slower = simulate(replace(plan, registers=tuple(fewer)), 4, UNIT).period
        except DeadlockError:
            continue
        assert slower > simulate(plan, 4, UNIT).period


def test_1f1b_saves_as_many_pieces_as_there_are_stages_left() -> None:
    portfolio, candidate = found(pipeline(4, 16), UNIT, "1f1b")
    assert saved(sized(portfolio, candidate, 0), "B") == [4, 3, 2, 1]


def test_what_is_made_early_is_made_no_earlier_than_needed() -> None:
    s = Sketch(8)
    batch, f = s.actor("batch", "source", queue="source", rate=8), s.actor("F", rate=8, flops=5.0)
    b = s.actor("B", "backward", rate=8, flops=5.0)
    into, saves = s.join(batch, f, nbytes=1000), s.join(f, b, nbytes=1000)
    portfolio, candidate = found(s.plan(), UNIT, "1f1b")
    early = simulate(candidate.plan, 2, UNIT)
    assert early.peak_slots[into] == 9  # a batch a millisecond, as far as there are slots
    plan = sized(portfolio, candidate, 0)
    assert (plan.register(into).slots, plan.register(saves).slots) == (2, 1)
    assert simulate(plan, 4, UNIT).period == pytest.approx(simulate(candidate.plan, 4, UNIT).period)


def test_what_several_queues_read_is_held_until_the_last_is_done() -> None:
    s = Sketch(6)
    f = s.actor("F", rate=6)
    slow = s.actor("loss", "sink", queue="sink", rate=6, flops=0.9)
    b = s.actor("B", "backward", rate=6)
    register = s.join(f, slow, b, nbytes=1000)
    portfolio, candidate = found(s.plan(), UNIT, "1f1b")
    assert sized(portfolio, candidate, SINGLE).register(register).slots == 1  # the sink is done when B is
    slower = Sketch(6)
    f, slow = slower.actor("F", rate=6), slower.actor("loss", "sink", queue="sink", rate=6, flops=1.5)
    b = slower.actor("B", "backward", rate=6)
    register = slower.join(f, slow, b, nbytes=1000)
    portfolio, candidate = found(slower.plan(), UNIT, "1f1b")
    assert sized(portfolio, candidate, SINGLE).register(register).slots == 2


def test_registers_between_queues_get_a_second_slot_where_there_is_more_than_one_piece() -> None:
    plan = pipeline(2, 4, replicas=2)
    portfolio, candidate = found(plan, UNIT, "1f1b")
    plentiful, single = (sized(portfolio, candidate, level) for level in (0, SINGLE))
    for r, less in zip(plentiful.registers, single.registers, strict=True):
        ends = [plan.actor(r.producer), *(plan.actor(read.actor) for read in r.readers)]
        apart = len({(a.rank, a.queue) for a in ends}) > 1 and ends[0].rate > r.fill
        assert r.slots == max(less.slots, 2) if apart else less.slots


def test_a_large_plan_is_sized_without_the_program_and_keeps_its_period() -> None:
    for name in ("1f1b", "zb-h2"):
        portfolio, candidate = found(pipeline(4, 8, weights=name == "zb-h2"), SLOW, name)
        plan = sized(portfolio, candidate, 0, solved=0)
        assert simulate(plan, 6, SLOW).period * 1e9 <= candidate.period * (1 + SAME)
