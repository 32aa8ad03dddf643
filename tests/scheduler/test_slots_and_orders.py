"""The slot counts and orders that schedule() chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow_compiler.core.errors import DeadlockError, PlanError
from actorflow_compiler.plan.plan import Read
from actorflow_scheduler import Hardware, schedule
from actorflow_scheduler.notation import text
from actorflow_scheduler.timeline import simulate
from orders import least, ordered, with_slots
from plans import Sketch, pipeline

FAST_NETWORK = Hardware(flops_per_s=1e3, bytes_per_s=1e12, latency_s=1e-6, fire_overhead_s=0.0)  # F takes 1 ms
SLOW_NETWORK = Hardware(flops_per_s=1e3, bytes_per_s=1e12, latency_s=5e-4, fire_overhead_s=0.0)  # a send 0.5 ms


def test_two_stages_give_1f1b() -> None:
    assert text(schedule(pipeline(2, 4), FAST_NETWORK)) == (
        "rank 0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 0O0\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1O0"
    )


def test_four_stages_give_1f1b() -> None:
    assert text(schedule(pipeline(4, 6), FAST_NETWORK)) == (
        "rank 0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5 0O0\n"
        "rank 1: 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5 1O0\n"
        "rank 2: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5 2O0\n"
        "rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3O0"
    )


def test_the_forecast_runs_the_frozen_orders() -> None:
    plan = schedule(pipeline(4, 6, replicas=2, statistics=(1,)), FAST_NETWORK)
    assert str(simulate(plan, 1, FAST_NETWORK)) == text(plan)


def saved_slots(hardware: Hardware) -> list[int]:
    """Slots of what forward saves for backward, by stage."""
    plan = schedule(pipeline(4, 16), hardware)
    ends = {a.id: a for a in plan.actors}
    return [
        r.slots
        for r in sorted(plan.registers, key=lambda r: ends[r.producer].stage)
        if ends[r.producer].kind == "forward" and any(ends[x.actor].kind == "backward" for x in r.readers)
    ]


def test_a_stage_runs_ahead_as_1f1b_does_and_further_where_communication_takes_time() -> None:
    assert saved_slots(FAST_NETWORK) == [4, 3, 2, 1]
    slow = saved_slots(SLOW_NETWORK)
    assert all(4 - k < n <= 2 * (4 - k) - 1 for k, n in enumerate(slow[:-1]))
    assert slow[-1] == 1


def test_no_counts_beyond_the_chosen_ones_are_much_faster() -> None:
    for hardware in (FAST_NETWORK, SLOW_NETWORK):
        plan = schedule(pipeline(4, 8), hardware)
        lavish = with_slots(plan, {r.id: max(r.slots, 7 if not r.initial else 0) for r in plan.registers})
        chosen = simulate(plan, 6, hardware).period
        assert chosen <= 1.02 * simulate(ordered(lavish, hardware), 6, hardware).period


def test_sends_and_sources_get_two_slots_and_what_is_made_once_gets_one() -> None:
    plan = schedule(pipeline(2, 4), FAST_NETWORK)
    for r in plan.registers:
        producer = plan.actor(r.producer)
        if producer.kind in ("send", "source"):
            assert r.slots == 2
        elif producer.rate == r.fill:
            assert r.slots == 1


def test_weight_gradients_lag_behind_where_that_fills_gaps() -> None:
    together = simulate(schedule(pipeline(4, 8, flops=2.0), FAST_NETWORK), 4, FAST_NETWORK).period
    plan = schedule(pipeline(4, 8, weights=True), FAST_NETWORK)
    apart = simulate(plan, 4, FAST_NETWORK).period
    assert apart < 0.8 * together  # F, B and W of one unit against F and B of two
    assert text(plan).splitlines()[-1].endswith("3W5 3W6 3W7 3O0")


def test_a_token_made_of_all_pieces_makes_forward_keep_all_pieces() -> None:
    s = Sketch(5)
    f = s.actor("F", rate=5)
    whole = s.actor("whole")
    b = s.actor("B", "backward", rate=5)
    saved = s.join(f, b)
    s.join(f, whole, fill=5)
    s.join(whole, (b, 5))
    assert least(s.plan())[saved] == 5
    assert text(schedule(s.plan())) == "rank 0: 0F0 0F1 0F2 0F3 0F4 0F0 0B0 0B1 0B2 0B3 0B4"


def test_registers_with_initial_tokens_keep_their_slots() -> None:
    s = Sketch(2)
    f, o = s.actor("F", rate=2), s.actor("O", "optimizer")
    s.join(f, o, fill=2)
    stale = s.join(o, (f, 2), initial=2, slots=3, nbytes=0)
    assert schedule(s.plan(), FAST_NETWORK).register(stale).slots == 3


def test_a_plan_that_no_slots_can_save_is_refused_with_its_cycle() -> None:
    s = Sketch(2)
    f, g = s.actor("F", rate=2), s.actor("G", rate=2)
    s.join(f, g)
    s.join(g, f)
    with pytest.raises(DeadlockError, match=r"F@rank0 waits for register 1 \(empty\) filled by G@rank0"):
        schedule(s.plan())


def test_a_memory_cap_takes_slots_and_costs_time_but_not_liveness() -> None:
    plan = pipeline(4, 8, weights=True, nbytes=1000)
    free = simulate(schedule(plan, FAST_NETWORK), 3, FAST_NETWORK)
    cap = free.peak_bytes[0] * 2 // 3
    tight = simulate(schedule(plan, FAST_NETWORK, {0: cap}), 3, FAST_NETWORK)
    assert tight.peak_bytes[0] <= cap < free.peak_bytes[0]
    assert tight.period > free.period
    with pytest.raises(PlanError, match=r"rank 0 needs .* bytes for its registers"):
        schedule(plan, FAST_NETWORK, {0: 1000})


def test_what_a_stage_receives_and_keeps_for_backward_is_not_throttled_by_the_double_buffer() -> None:
    plan = pipeline(2, 8)
    readers = {a.name: a.id for a in plan.actors}
    into = next(r for r in plan.registers if plan.home(r) == 1 and plan.actor(r.producer).name == "send F0")
    keeps = replace(into, readers=(*into.readers, Read(readers["B1"])))
    kept = replace(plan, registers=tuple(keeps if r.id == into.id else r for r in plan.registers))
    alone, held = (simulate(schedule(p, FAST_NETWORK), 4, FAST_NETWORK).period for p in (plan, kept))
    assert held <= 1.01 * alone


def test_the_same_plan_is_scheduled_the_same_way() -> None:
    plan = pipeline(3, 5, replicas=2, weights=True, statistics=(0, 2))
    assert schedule(plan) == schedule(plan)


def test_one_piece_computes_while_another_is_in_a_collective() -> None:
    plan = pipeline(1, 8, replicas=2, statistics=(0,), nbytes=1000)
    free = schedule(plan, SLOW_NETWORK)
    assert text(free).startswith("rank 0: 0F0 0F1 0F0 0B0 0F1 0B1")  # F0 F1, then the second half of F0
    assert simulate(free, 4, SLOW_NETWORK).busy[0, "compute"] > 0.95
    most = simulate(free, 4, SLOW_NETWORK).peak_bytes[0]
    tight = schedule(plan, SLOW_NETWORK, dict.fromkeys((0, 1), most - 1500))  # one piece less
    assert simulate(tight, 4, SLOW_NETWORK).busy[0, "compute"] < 0.9


def test_a_half_that_saves_for_backward_may_also_be_ahead_of_a_collective() -> None:
    plan = pipeline(1, 8, replicas=2, statistics=(0,), nbytes=1000)
    ends = {a.id: a for a in plan.actors}
    back = {a.rank: a.id for a in plan.actors if a.kind == "backward"}
    joined = tuple(
        replace(r, readers=(*r.readers, Read(back[plan.home(r)])))
        if ends[r.producer].name == "F0" and ends[r.readers[0].actor].name == "F0'"
        else r
        for r in plan.registers
    )
    scheduled = schedule(replace(plan, registers=joined), SLOW_NETWORK)
    assert simulate(scheduled, 4, SLOW_NETWORK).busy[0, "compute"] > 0.95
