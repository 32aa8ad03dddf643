"""Scenarios of the actor machine: which instructions follow which events."""

from __future__ import annotations

import pytest

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.machine import (
    ActorFinished,
    CallIssued,
    CreditReturned,
    Fire,
    GiveCredit,
    IllegalEvent,
    Machine,
    Release,
    TokenArrived,
)
from plans import Sketch


def two_queues(slots: int, rate: int) -> Plan:
    """A source on its own queue that fills a register, and forward that reads it."""
    s = Sketch(rate)
    source = s.actor("batch", "source", queue="source", rate=rate)
    forward = s.actor("F", rate=rate)
    s.join(source, forward, slots=slots)
    return s.plan({})


def across() -> Plan:
    """Rank 0 makes tokens and sends them to rank 1 into two slots."""
    s = Sketch(4)
    f = s.actor("F0", rate=4)
    g = s.actor("F1", rank=1, rate=4, stage=1)
    s.send(f, g, to=1, slots=2)
    return s.plan({})


def test_nothing_fires_before_an_iteration_is_called() -> None:
    machine = Machine(two_queues(2, 2), 0)
    assert machine.idle()
    assert machine.handle(CallIssued()) == [Fire(0, 0, (), ((0, 0, True),))]
    assert not machine.idle()


def test_an_actor_fires_rate_times_for_each_call() -> None:
    machine = Machine(two_queues(2, 2), 0)
    machine.handle(CallIssued())
    assert machine.handle(ActorFinished(0)) == [Fire(0, 1, (), ((0, 1, True),)), Fire(1, 0, ((0, 0, True),), ())]
    assert machine.handle(ActorFinished(0)) == []  # two pieces were called for
    assert machine.handle(ActorFinished(1)) == [Release(0, 0), Fire(1, 1, ((0, 1, True),), ())]
    assert machine.handle(ActorFinished(1)) == [Release(0, 1)]
    assert machine.idle()
    assert machine.handle(CallIssued()) == [Fire(0, 2, (), ((0, 2, True),))]


def test_a_full_register_holds_its_producer_back() -> None:
    machine = Machine(two_queues(1, 3), 0)
    machine.handle(CallIssued())
    assert machine.handle(ActorFinished(0)) == [Fire(1, 0, ((0, 0, True),), ())]
    assert machine.waiting() == [
        "queue source: batch@rank0 waits for a slot of register 0 (full, 1 of 1) read on rank 0 by F@rank0",
        "queue compute: F@rank0 is running",
    ]
    assert machine.handle(ActorFinished(1)) == [Release(0, 0), Fire(0, 1, (), ((0, 1, True),))]


def test_an_empty_register_holds_its_reader_back() -> None:
    machine = Machine(two_queues(1, 1), 0)
    machine.handle(CallIssued())
    assert machine.waiting()[1] == "queue compute: F@rank0 waits for register 0 (empty) filled by batch@rank0"


def test_a_token_of_several_firings_takes_its_slot_at_the_first_and_is_read_after_the_last() -> None:
    s = Sketch(2)
    source = s.actor("batch", "source", queue="source", rate=2)
    pack = s.actor("pack")
    s.join(source, pack, fill=2)
    machine = Machine(s.plan({}), 0)
    assert machine.handle(CallIssued()) == [Fire(source, 0, (), ((0, 0, False),))]
    assert machine.handle(CallIssued()) == []
    assert machine.tokens() == {0: (0, 1)}
    assert machine.handle(ActorFinished(source)) == [Fire(source, 1, (), ((0, 0, True),))]
    assert machine.handle(ActorFinished(source)) == [Fire(pack, 0, ((0, 0, True),), ())]  # the slot is taken: no more
    assert machine.handle(ActorFinished(pack)) == [Release(0, 0), Fire(source, 2, (), ((0, 1, False),))]


def test_a_reader_may_hold_a_token_for_several_firings() -> None:
    s = Sketch(2)
    source = s.actor("batch", "source", queue="source")
    unpack = s.actor("unpack", rate=2)
    s.join(source, (unpack, 2))
    machine = Machine(s.plan({}), 0)
    machine.handle(CallIssued())
    machine.handle(CallIssued())
    assert machine.handle(ActorFinished(source)) == [Fire(unpack, 0, ((0, 0, False),), ())]
    assert machine.handle(ActorFinished(unpack)) == [Fire(unpack, 1, ((0, 0, True),), ())]
    assert machine.handle(ActorFinished(unpack)) == [Release(0, 0), Fire(source, 1, (), ((0, 1, True),))]


def test_a_slot_is_free_when_the_last_of_its_readers_is_done() -> None:
    s = Sketch()
    source = s.actor("batch", "source", queue="source")
    left = s.actor("left")
    right = s.actor("right", queue="sink", kind="sink")
    s.join(source, left, right)
    machine = Machine(s.plan({}), 0)
    machine.handle(CallIssued())
    machine.handle(CallIssued())
    assert machine.handle(ActorFinished(source)) == [
        Fire(left, 0, ((0, 0, True),), ()),
        Fire(right, 0, ((0, 0, True),), ()),
    ]
    assert machine.handle(ActorFinished(right)) == []
    assert machine.laggards(0) == (left,)
    assert machine.handle(ActorFinished(left)) == [Release(0, 0), Fire(source, 1, (), ((0, 1, True),))]


def test_what_nobody_reads_is_dropped_at_once() -> None:
    s = Sketch()
    lonely = s.actor("lonely")
    s.join(lonely)
    machine = Machine(s.plan({}), 0)
    machine.handle(CallIssued())
    machine.handle(CallIssued())
    assert machine.handle(ActorFinished(lonely)) == [Release(0, 0), Fire(lonely, 1, (), ((0, 1, True),))]


def test_a_queue_runs_one_actor_at_a_time_in_its_frozen_order() -> None:
    s = Sketch(2)
    a, b = s.actor("a", rate=2), s.actor("b", rate=2)
    machine = Machine(s.plan({(0, "compute"): (b, a, a, b)}), 0)
    fired = [i.actor for i in machine.handle(CallIssued()) if isinstance(i, Fire)]
    machine.handle(CallIssued())
    while not machine.idle():
        fired += [i.actor for i in machine.handle(ActorFinished(fired[-1])) if isinstance(i, Fire)]
    assert fired == [b, a, a, b, b, a, a, b]


def test_an_initial_token_lets_forward_start_and_the_next_iteration_waits_for_the_optimizer() -> None:
    s = Sketch(2)
    f = s.actor("F", rate=2)
    o = s.actor("O", "optimizer", queue="sink")
    gradient = s.join(f, o, fill=2)
    parameter = s.join(o, (f, 2), initial=1, nbytes=0)
    machine = Machine(s.plan({}), 0)
    assert machine.handle(CallIssued()) == [Fire(f, 0, ((parameter, 0, False),), ((gradient, 0, False),))]
    assert machine.handle(CallIssued()) == []
    assert machine.handle(ActorFinished(f)) == [Fire(f, 1, ((parameter, 0, True),), ((gradient, 0, True),))]
    # The token is let go of and the gradient is complete: the optimizer updates in place, F waits.
    assert machine.handle(ActorFinished(f)) == [
        Release(parameter, 0),
        Fire(o, 0, ((gradient, 0, True),), ((parameter, 1, True),)),
    ]
    assert machine.handle(ActorFinished(o)) == [
        Release(gradient, 0),
        Fire(f, 2, ((parameter, 1, False),), ((gradient, 1, False),)),
    ]


def test_the_optimizer_does_not_overwrite_what_forward_still_reads() -> None:
    s = Sketch(2)
    f = s.actor("F", rate=2)
    o = s.actor("O", "optimizer", queue="sink")
    s.join(o, (f, 2), initial=1, nbytes=0)
    machine = Machine(s.plan({}), 0)
    assert [i.actor for i in machine.handle(CallIssued()) if isinstance(i, Fire)] == [f]
    assert [i.actor for i in machine.handle(ActorFinished(f)) if isinstance(i, Fire)] == [f]
    assert [i.actor for i in machine.handle(ActorFinished(f)) if isinstance(i, Fire)] == [o]


@pytest.mark.parametrize("part", [False, True])
def test_a_sender_stops_without_credits_and_goes_on_with_one(part: bool) -> None:
    plan = across()
    machine = Machine(plan.for_rank(0) if part else plan, 0)
    f, send = 0, 2
    assert machine.handle(CallIssued()) == [Fire(f, 0, (), ((0, 0, True),))]
    machine.handle(ActorFinished(f))
    assert machine.handle(ActorFinished(send)) == [Release(0, 0)]
    machine.handle(ActorFinished(f))
    assert machine.handle(ActorFinished(send)) == [Release(0, 1)]  # both slots on rank 1 are taken
    machine.handle(ActorFinished(f))
    assert machine.tokens() == {0: (1, 1), 1: (2, 0)}
    reader = "actor 1" if part else "F1@rank1"
    assert (
        f"queue send:1: send F0@rank0 waits for a slot of register 1 (full, 2 of 2) read on rank 1 by {reader}"
        in machine.waiting()
    )
    assert machine.handle(CreditReturned(1)) == [Fire(send, 2, ((0, 2, True),), ((1, 2, True),))]


@pytest.mark.parametrize("part", [False, True])
def test_a_receiver_reads_what_arrived_in_order_and_gives_credits(part: bool) -> None:
    plan = across()
    machine = Machine(plan.for_rank(1) if part else plan, 1)
    assert machine.handle(CallIssued()) == []
    assert machine.waiting() == ["queue compute: F1@rank1 waits for register 1 (empty) filled by send F0@rank0"]
    assert machine.handle(TokenArrived(1)) == [Fire(1, 0, ((1, 0, True),), ())]
    assert machine.handle(TokenArrived(1)) == []
    assert machine.handle(ActorFinished(1)) == [Release(1, 0), GiveCredit(1), Fire(1, 1, ((1, 1, True),), ())]


def test_initial_tokens_of_a_sent_register_lie_with_the_reader_and_cost_the_sender_credits() -> None:
    s = Sketch(2)
    f, g = s.actor("F0", rate=2), s.actor("F1", rank=1, rate=2)
    s.send(f, g, to=1, slots=2)
    first, second = s.registers
    s.registers[1] = type(second)(**{k: getattr(second, k) for k in second.__slots__} | {"initial": 1})
    sender, receiver = Machine(s.plan({}), 0), Machine(s.plan({}), 1)
    assert receiver.handle(CallIssued()) == [Fire(g, 0, ((second.id, 0, True),), ())]
    sender.handle(CallIssued())
    assert sender.handle(ActorFinished(f))[-1] == Fire(2, 0, ((first.id, 0, True),), ((second.id, 1, True),))
    sender.handle(ActorFinished(f))
    assert sender.handle(ActorFinished(2)) == [Release(first.id, 0)]  # two slots, two tokens


def test_a_plan_without_orders_is_refused() -> None:
    s = Sketch()
    s.actor("a")
    with pytest.raises(PlanError, match=r"rank 0, queue compute has no frozen order.*schedule\(\)"):
        Machine(s.plan(), 0)


def test_illegal_events_raise_with_the_story_of_the_object() -> None:
    machine = Machine(two_queues(2, 1), 0)
    with pytest.raises(IllegalEvent, match="not running on this rank; its last events: nothing happened"):
        machine.handle(ActorFinished(0))
    machine.handle(CallIssued())
    machine.handle(ActorFinished(0))
    with pytest.raises(IllegalEvent, match=r"last events: Fire\(actor=0.*ActorFinished\(actor=0\)"):
        machine.handle(ActorFinished(0))
    with pytest.raises(IllegalEvent, match="unknown here"):
        machine.handle(ActorFinished(7))


def test_more_arrivals_than_slots_and_more_credits_than_tokens_are_illegal() -> None:
    receiver, sender = Machine(across(), 1), Machine(across(), 0)
    receiver.handle(TokenArrived(1))
    receiver.handle(TokenArrived(1))
    with pytest.raises(IllegalEvent, match=r"no slot .* free .* TokenArrived\(register=1\), TokenArrived"):
        receiver.handle(TokenArrived(1))
    with pytest.raises(IllegalEvent, match=r"no slot .* taken"):
        sender.handle(CreditReturned(1))
