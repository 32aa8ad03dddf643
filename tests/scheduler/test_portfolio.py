"""What ``schedule`` finds: the fastest order, within memory, whatever the stages cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actorflow as flow
import actorflow_scheduler.portfolio
from actorflow.session.compiling import left_for_registers
from actorflow_compiler.core.errors import CallError, PlanError
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.plan.plan import Plan, Variable
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler import Hardware, schedule
from actorflow_scheduler.notation import text
from actorflow_scheduler.pipeline import SCHEDULES, find_pipeline
from actorflow_scheduler.portfolio import SAME, Portfolio
from actorflow_scheduler.timeline import nanoseconds, simulate
from fewer import fewer
from plans import Sketch, pipeline

FAST_NETWORK = Hardware(flops_per_s=1e3, bytes_per_s=1e12, latency_s=1e-6, fire_overhead_s=0.0)  # F takes 1 ms
SLOW_NETWORK = Hardware(flops_per_s=1e3, bytes_per_s=1e12, latency_s=5e-4, fire_overhead_s=0.0)  # a send 0.5 ms
SHAPES = {"straight": [0, 1, 2], "rounds": [0, 1, 0, 1], "v": [0, 1, 1, 0], "none": [0, 1, 1]}


def cut(variant: Variant, stages: int = 4, pieces: int = 8, nbytes: int = 4) -> Plan:
    """A pipeline whose backward takes twice as long as its forward, in one or in two parts."""
    return pipeline(stages, pieces, weights=variant.weights, nbytes=nbytes, backward=1.0 if variant.weights else 2.0)


def period(plan: Plan, hardware: Hardware) -> float:
    return simulate(plan, 6, hardware).period


@st.composite
def costs(draw: st.DrawFn) -> tuple[Plan, Hardware]:
    """A pipeline of any shape whose actors take any times."""
    on = draw(st.sampled_from(list(SHAPES.values())))
    plan = pipeline(len(on), draw(st.integers(2, 7)), weights=draw(st.booleans()), on=on)
    times = {a.id: draw(st.sampled_from((0.5, 1.0, 2.0))) for a in plan.actors if a.comm is None}
    plan = replace(plan, actors=tuple(replace(a, flops=times.get(a.id, 0.0)) for a in plan.actors))
    return plan, draw(st.sampled_from((FAST_NETWORK, SLOW_NETWORK)))


@settings(max_examples=fewer(25), deadline=None)
@given(costs())
def test_auto_is_never_slower_than_a_named_schedule(drawn: tuple[Plan, Hardware]) -> None:
    plan, hardware = drawn
    best = period(schedule(plan, hardware), hardware)
    fitting = [name for name in SCHEDULES[1:] if find_pipeline(plan).misfit(name) is None]
    for name in fitting:
        assert best <= period(schedule(plan, hardware, name=name), hardware) * (1 + 2 * SAME), name


@pytest.mark.parametrize("hardware", [FAST_NETWORK, SLOW_NETWORK])
def test_auto_splits_the_backward_pass_and_leaves_no_bubble_where_there_are_pieces_enough(hardware: Hardware) -> None:
    plan = schedule(lambda v: cut(v, pieces=16), hardware)
    assert any(a.kind == "weight" for a in plan.actors)
    assert period(plan, hardware) == pytest.approx(16 * 3e-3 + 1e-3, rel=2 * SAME)


def test_iterations_stream_without_a_flush() -> None:
    plan = schedule(cut, FAST_NETWORK, name="zb-h2")
    one, many = (simulate(plan, n, FAST_NETWORK).seconds for n in (1, 11))
    assert (many - one) / 10 == pytest.approx(8 * 3e-3 + 1e-3, rel=SAME)  # as if there were one rank
    assert one == pytest.approx(8 * 3e-3 + 1e-3 + 3 * 1e-3, rel=SAME)  # the first iteration fills the pipeline


def test_of_equally_fast_orders_that_which_holds_fewest_pieces_is_taken() -> None:
    plan = schedule(pipeline(4, 8), FAST_NETWORK)
    gpipe, saves = (
        sum(r.slots for r in p.registers if p.actor(r.producer).kind == "forward")
        for p in (schedule(pipeline(4, 8), FAST_NETWORK, name="gpipe"), plan)
    )
    assert text(plan) == text(schedule(pipeline(4, 8), FAST_NETWORK, name="1f1b"))
    assert saves < gpipe


def test_the_notes_say_what_won_and_what_it_takes() -> None:
    (note,) = schedule(cut, FAST_NETWORK, name="auto").notes
    assert note.startswith("schedule zb-h2 of ")
    assert note.endswith(" tried: period 25 ms, bubble 0%")
    (note,) = schedule(cut, FAST_NETWORK, name="1f1b").notes
    assert note == "schedule 1f1b: period 34 ms, bubble 27%"


def test_a_plan_without_a_pipeline_is_not_searched() -> None:
    made: list[Variant] = []

    def make(variant: Variant) -> Plan:
        made.append(variant)
        return pipeline(1, 4)

    assert schedule(make).notes == ()
    assert made == [Variant()]
    made.clear()
    assert schedule(lambda v: made.append(v) or cut(v, pieces=1)).notes == ()  # type: ignore[func-returns-value]
    assert made == [Variant()]


def test_named_schedules_make_the_variant_that_they_need() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        made: list[Variant] = []
        schedule(lambda v, made=made: made.append(v) or cut(v), name=name)  # type: ignore[misc]
        assert made == [Variant(weights=name.startswith("zb"))]


def test_a_search_that_can_try_one_order_alone_tries_one_with_few_pieces_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actorflow_scheduler.portfolio, "MOST", 1)
    (note,) = schedule(pipeline(4, 8), FAST_NETWORK).notes
    assert note.startswith("schedule 1f1b")


def test_the_climb_finds_what_no_rule_does() -> None:
    times = iter((0.5, 3.0, 2.0, 0.5, 0.5, 1.0, 3.0, 2.0, 2.0, 0.5, 2.0, 3.0))
    plan = pipeline(4, 4, weights=True)
    computing = ("forward", "backward", "weight")
    actors = tuple(replace(a, flops=next(times)) if a.kind in computing else a for a in plan.actors)
    plan = replace(plan, actors=actors)
    portfolio = Portfolio(plan, nanoseconds(plan, SLOW_NETWORK))
    portfolio.search()
    rules = min(c.period for c in portfolio.found if "improved" not in c.name)
    assert min(c.period for c in portfolio.found) < rules


def test_memory_that_a_schedule_lacks_is_named_with_the_next_that_fits() -> None:
    def make(variant: Variant) -> Plan:
        return cut(variant, nbytes=1000)

    needs = {
        name: simulate(schedule(make, FAST_NETWORK, name=name), 6, FAST_NETWORK).peak_bytes[0]
        for name in ("1f1b", "zb-h1", "zb-h2")
    }
    assert needs["1f1b"] < needs["zb-h1"] < needs["zb-h2"]
    cap = needs["zb-h1"]
    told = rf"'zb-h2': rank 0 needs \d+ bytes .* {cap} are allowed; the largest is .*; schedule='zb-h1' needs {cap} "
    with pytest.raises(PlanError, match=told + "there and fits"):
        schedule(make, FAST_NETWORK, {0: cap}, name="zb-h2")
    fits = schedule(make, FAST_NETWORK, {0: cap})
    assert simulate(fits, 6, FAST_NETWORK).peak_bytes[0] <= cap
    assert period(fits, FAST_NETWORK) <= period(schedule(make, FAST_NETWORK, name="zb-h1"), FAST_NETWORK) * (1 + SAME)


@pytest.mark.slow
def test_the_less_memory_the_more_time_down_to_what_nothing_fits() -> None:
    def make(variant: Variant) -> Plan:
        return cut(variant, nbytes=1000)

    free = schedule(make, FAST_NETWORK)
    cap = simulate(free, 6, FAST_NETWORK).peak_bytes[0]
    periods = [period(free, FAST_NETWORK)]
    for share in (0.8, 0.4):
        caps = dict.fromkeys(range(4), int(cap * share))
        plan = schedule(make, FAST_NETWORK, caps)
        assert max(simulate(plan, 6, FAST_NETWORK).peak_bytes.values()) <= caps[0]
        periods.append(period(plan, FAST_NETWORK))
    assert all(b >= a * (1 - SAME) for a, b in pairwise(periods))
    assert periods[-1] > periods[0]
    with pytest.raises(PlanError, match=r"use more ranks, or micro-batches of fewer samples"):
        schedule(make, FAST_NETWORK, dict.fromkeys(range(4), cap // 10))


def test_forward_is_computed_again_where_memory_is_short() -> None:
    def make(variant: Variant) -> Plan:
        plan = cut(Variant(weights=variant.weights), nbytes=100 if variant.recompute else 1000)
        made.append(variant)
        return plan

    made: list[Variant] = []
    schedule(make, FAST_NETWORK, dict.fromkeys(range(4), 10**6))
    assert not any(v.recompute for v in made)
    plan = schedule(make, FAST_NETWORK, dict.fromkeys(range(4), 2500))
    assert any(v.recompute for v in made)
    assert max(simulate(plan, 6, FAST_NETWORK).peak_bytes.values()) <= 2500
    assert "recomputing" in plan.notes[-1]


def test_two_searches_find_the_same() -> None:
    assert schedule(cut, SLOW_NETWORK) == schedule(cut, SLOW_NETWORK)


def test_what_waits_for_all_pieces_runs_under_gpipe_and_auto_and_no_schedule_that_begins_fewer() -> None:
    s = Sketch(6)
    f, g = s.actor("F0", rate=6), s.actor("F1", rank=1, rate=6, stage=1)
    whole = s.actor("norm", rank=1, stage=1)
    b = s.actor("B1", "backward", rank=1, rate=6, stage=1)
    a = s.actor("B0", "backward", rate=6)
    s.send(f, g, to=1)
    s.join(g, b)
    s.join(g, whole, fill=6)
    s.join(whole, (b, 6))
    s.send(b, a, to=0)
    s.join(f, a)
    for name in ("auto", "gpipe"):
        assert text(schedule(s.plan(), FAST_NETWORK, name=name)).startswith("rank 0: 0F0 0F1 0F2 0F3 0F4 0F5 0B0")
    with pytest.raises(PlanError, match=r"schedule '1f1b' cannot run it: something in the step .* schedule='auto'"):
        schedule(s.plan(), FAST_NETWORK, name="1f1b")


def test_a_job_names_its_schedule_when_it_is_decorated() -> None:
    def step() -> None: ...

    assert flow.global_function(step).schedule == "auto"
    assert flow.global_function(schedule="zb-h1")(step).schedule == "zb-h1"
    with pytest.raises(CallError, match=r"schedule='zb-h3' was found; one of 'auto', .* 'zb-v' was expected"):
        flow.global_function(schedule="zb-h3")(step)


def test_what_variables_leave_of_a_memory_budget_is_the_registers_cap() -> None:
    place = placement("cpu", [0, 1])
    whole = Variable("w", (100,), "float32", place, (B,), "parameter")
    parts = Variable("m", (100,), "float32", place, (Split(0),), "optimizer")
    plan = replace(pipeline(2, 4), variables=(whole, parts))
    assert left_for_registers(plan, 1000.0) == {0: 400, 1: 400}
    assert left_for_registers(plan, None) is None
    assert left_for_registers(replace(plan, pieces=1), 1000.0) is None
