"""The actor machines on a virtual clock."""

from __future__ import annotations

import pytest

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Collective, CollectiveKind
from actorflow_scheduler.timeline import simulate
from orders import least, ordered, with_slots
from plans import Sketch, pipeline

UNIT = Hardware(flops_per_s=1.0, bytes_per_s=1e12, latency_s=0.0, fire_overhead_s=0.0)  # one operation a second


def test_two_queues_overlap_as_far_as_the_slots_between_them_allow() -> None:
    def seconds(slots: int) -> float:
        s = Sketch(4)
        a = s.actor("a", "source", queue="source", rate=4)
        b = s.actor("b", rate=4)
        s.join(a, b, slots=slots)
        return simulate(s.plan({}), 1, UNIT).seconds

    assert seconds(1) == pytest.approx(8.0)
    assert seconds(2) == pytest.approx(5.0)


def test_a_collective_starts_when_its_last_member_does_and_ends_for_all_at_once() -> None:
    s = Sketch()
    early, late = s.actor("early", rank=0), s.actor("late", rank=1, flops=3.0)
    left, right = s.collective((0, 1))
    s.join(early, left)
    s.join(late, right)
    timeline = simulate(s.plan({}), 1, UNIT)
    spans = {span.actor: span for span in timeline.spans}
    assert spans[left].start == spans[right].start == pytest.approx(3.0)
    assert spans[left].end == spans[right].end


def test_a_sent_token_arrives_after_the_cost_of_its_bytes() -> None:
    s = Sketch()
    f, g = s.actor("F0"), s.actor("F1", rank=1)
    s.send(f, g, to=1, nbytes=800)
    slow = Hardware(flops_per_s=1.0, bytes_per_s=100.0, latency_s=0.5, fire_overhead_s=0.0)
    timeline = simulate(s.plan({}), 1, slow)
    assert {span.actor: span.start for span in timeline.spans} == pytest.approx({0: 0.0, 2: 1.0, 1: 9.5})


def test_the_period_is_that_of_the_busiest_queue_when_iterations_overlap() -> None:
    s = Sketch()
    a, b = s.actor("a", "source", queue="source", flops=2.0), s.actor("b", flops=3.0)
    s.join(a, b, slots=2)
    timeline = simulate(s.plan({}), 10, UNIT)
    assert timeline.period == pytest.approx(3.0)
    assert timeline.busy[0, "compute"] == pytest.approx(30 / 32)
    assert timeline.busy[0, "source"] == pytest.approx(20 / 32)


def test_an_optimizer_register_of_one_slot_makes_iterations_follow_each_other() -> None:
    s = Sketch(3)
    f, b, o = s.actor("F", rate=3), s.actor("B", "backward", rate=3), s.actor("O", "optimizer", queue="sink")
    s.join(f, b, slots=3)
    s.join(b, o, fill=3)
    s.join(o, (f, 3), initial=1, nbytes=0)
    timeline = simulate(ordered(s.plan(), UNIT), 2, UNIT)
    updated = next(span.end for span in timeline.spans if span.actor == o)
    again = next(span.start for span in timeline.spans if span.actor == f and span.firing == 3)
    assert again == pytest.approx(updated) == pytest.approx(7.0)


def test_peaks_count_tokens_under_construction_at_the_readers_rank() -> None:
    s = Sketch(2)
    f, g = s.actor("F0", rate=2), s.actor("F1", rank=1, rate=2, flops=5.0)
    out, _, into = s.send(f, g, to=1, slots=2, nbytes=100)
    timeline = simulate(s.plan({}), 1, UNIT)
    assert timeline.peak_bytes == {0: 200, 1: 200}
    assert timeline.peak_slots == {out: 2, into: 2}  # one is sent while the next is made


def test_the_text_form_gives_stage_letter_and_piece_of_every_firing() -> None:
    s = Sketch(2)
    f, b = s.actor("F", rate=2, stage=3), s.actor("B", "backward", rate=2, stage=3)
    s.join(f, b, slots=2)
    assert str(simulate(s.plan({(0, "compute"): (f, f, b, b)}), 1, UNIT)) == "rank 0: 3F0 3F1 3B0 3B1"


def test_the_members_of_a_collective_start_together() -> None:
    plan = pipeline(2, 3, replicas=2, statistics=(0, 1))
    timeline = simulate(ordered(with_slots(plan, least(plan)), UNIT), 1, UNIT)
    starts: dict[tuple[int, int], set[float]] = {}
    for span in timeline.spans:
        comm = plan.actor(span.actor).comm
        if isinstance(comm, Collective) and comm.kind == CollectiveKind.ALL_REDUCE:
            starts.setdefault((comm.id, span.firing), set()).add(span.start)
    assert len(starts) == 2 * 3 + 2  # two stages' statistics of three pieces, two stages' gradients
    assert all(len(times) == 1 for times in starts.values())


def test_a_stuck_plan_raises_instead_of_ending_early() -> None:
    s = Sketch()
    a, b = s.actor("a"), s.actor("b", "sink", queue="sink")
    s.join(a, b)
    s.join(b, a)
    with pytest.raises(DeadlockError, match=r"a@rank0 waits for register 1 .empty. filled by b@rank0"):
        simulate(s.plan({}), 1, UNIT)
