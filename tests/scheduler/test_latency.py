"""Links on which a message is long under way: it holds nobody up that does not wait for it."""

from __future__ import annotations

import pytest

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler import schedule
from actorflow_scheduler.critical_path import critical_path
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.timeline import nanoseconds, simulate
from orders import ordered
from plans import Sketch, pipeline

LATENCY = 10.0
FAR = Hardware(flops_per_s=1e3, bytes_per_s=100.0, latency_s=LATENCY, fire_overhead_s=0.0)  # F takes 1 ms
NEAR = Hardware(flops_per_s=1e3, bytes_per_s=100.0, latency_s=0.0, fire_overhead_s=0.0)


def streamed(pieces: int, slots: int, plane: str = "inline") -> Plan:
    """Two stages between which a token takes a second of the link."""
    s = Sketch(pieces)
    f, g = s.actor("F0", rate=pieces), s.actor("F1", rank=1, rate=pieces, stage=1)
    s.send(f, g, to=1, slots=slots, nbytes=100, plane=plane)
    return ordered(s.plan(), FAR)


@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_pieces_leave_back_to_back_and_arrive_one_latency_later(pieces: int) -> None:
    timeline = simulate(streamed(pieces, pieces), 1, FAR)
    assert timeline.seconds == pytest.approx(pieces * 1.0 + LATENCY, abs=3e-3)
    sends = [span for span in timeline.spans if span.queue == "send:1"]
    assert [span.start for span in sends] == pytest.approx([n * 1.0 + 1e-3 for n in range(pieces)], abs=1e-6)


def test_a_slot_can_be_filled_again_when_its_credit_is_back() -> None:
    each = 1.0 + 2 * LATENCY  # there, and the credit back
    assert simulate(streamed(4, 1), 1, FAR).seconds == pytest.approx(3 * each + 1.0 + LATENCY, abs=0.01)
    assert simulate(streamed(4, 2), 1, FAR).seconds == pytest.approx(each + 2.0 + LATENCY, abs=0.01)


def test_tokens_that_are_announced_first_take_turns_of_a_round_trip() -> None:
    timeline = simulate(streamed(4, 4, plane="gloo"), 1, FAR)
    assert timeline.seconds == pytest.approx(4 * (1.0 + 2 * LATENCY) + LATENCY, abs=0.01)


@pytest.mark.parametrize("name", ["gpipe", "auto"])
@pytest.mark.parametrize("pieces", [1, 4, 8])
def test_a_step_over_a_far_link_takes_a_round_trip_whatever_the_pieces(name: str, pieces: int) -> None:
    plan = schedule(pipeline(2, pieces, nbytes=4), FAR, name=name)
    work = pieces * 0.04 * 2 + pieces * 4e-3 + 0.01  # bytes, computing
    assert simulate(plan, 6, FAR).period == pytest.approx(2 * LATENCY, abs=work)
    assert forecast(plan, FAR).period == pytest.approx(2 * LATENCY, abs=work)


def test_slots_hide_the_way_of_credits_where_pieces_have_no_limit_but_theirs() -> None:
    near, far = (
        {r.id: r.slots for r in schedule(pipeline(2, 8), hardware, name="gpipe").registers} for hardware in (NEAR, FAR)
    )
    plan = pipeline(2, 8)
    between = [r.id for r in plan.registers if plan.home(r) != plan.actor(r.producer).rank]
    assert between
    assert all(far[r] > near[r] for r in between if near[r] < 8)
    assert any(far[r] > near[r] for r in between)


def test_what_waits_for_a_message_under_way_is_put_down_to_its_send() -> None:
    plan = streamed(2, 2)
    firings = FiringTimes(plan, nanoseconds(plan, FAR))
    assert firings.run()
    spent: dict[str, float] = {}
    for actor, time in critical_path(firings, round(simulate(plan, 1, FAR).seconds * 1e9)):
        spent[plan.actor(actor).name] = spent.get(plan.actor(actor).name, 0.0) + time / 1e9
    assert spent == pytest.approx({"F0": 1e-3, "send F0": 2.0 + LATENCY, "F1": 1e-3})
