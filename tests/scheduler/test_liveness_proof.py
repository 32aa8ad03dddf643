"""What the proof refuses, and how it says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow_compiler.core.errors import DeadlockError, PlanError
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import Collective, CollectiveKind, OfVariable, Order, Variable
from actorflow_scheduler.proof import prove
from actorflow_scheduler.schedule import schedule
from actorflow_scheduler.timeline import simulate
from plans import Sketch, pipeline


def crossed() -> Sketch:
    """Two all-reduces over ranks 0 and 1."""
    s = Sketch()
    s.collective((0, 1), "left")
    s.collective((0, 1), "right")
    return s


def test_collectives_in_opposite_orders_on_two_ranks_are_refused_with_their_cycle() -> None:
    s = crossed()
    assert prove(s.plan({(0, "comm"): (0, 2), (1, "comm"): (1, 3)}))
    with pytest.raises(DeadlockError) as caught:
        prove(s.plan({(0, "comm"): (0, 2), (1, "comm"): (3, 1)}))
    assert str(caught.value).splitlines()[:6] == [
        "plan 'sketch' would wait for ever:",
        "  left@rank0 waits in all_reduce 0 for left@rank1;",
        "  left@rank1 waits for its turn on queue comm behind right@rank1;",
        "  right@rank1 waits in all_reduce 1 for right@rank0;",
        "  right@rank0 waits for its turn on queue comm behind left@rank0;",
        "  and so on from left@rank0",
    ]


def test_collectives_of_different_groups_may_not_wait_in_a_circle_either() -> None:
    s = Sketch()
    a0, a1 = s.collective((0, 1), "a")
    b1, b2 = s.collective((1, 2), "b")
    c2, c0 = s.collective((2, 0), "c")
    assert prove(s.plan({(0, "comm"): (a0, c0), (1, "comm"): (a1, b1), (2, "comm"): (b2, c2)}))
    with pytest.raises(DeadlockError, match=r"(?s)a@rank0.*a@rank1.*b@rank1.*b@rank2.*c@rank2.*c@rank0"):
        prove(s.plan({(0, "comm"): (a0, c0), (1, "comm"): (b1, a1), (2, "comm"): (c2, b2)}))


def test_a_cycle_of_registers_without_a_token_is_refused_with_its_cycle() -> None:
    s = Sketch()
    f = s.actor("F0")
    g = s.actor("F1", rank=1)
    s.send(f, g, to=1)
    s.send(g, f, to=0)
    with pytest.raises(DeadlockError) as caught:
        prove(s.plan({}))
    assert str(caught.value).splitlines()[1:6] == [
        "  F0@rank0 waits for register 3 (empty) filled by send F1@rank1;",
        "  send F1@rank1 waits for register 2 (empty) filled by F1@rank1;",
        "  F1@rank1 waits for register 1 (empty) filled by send F0@rank0;",
        "  send F0@rank0 waits for register 0 (empty) filled by F0@rank0;",
        "  and so on from F0@rank0",
    ]


def test_an_initial_token_breaks_the_cycle() -> None:
    s = Sketch()
    f, g = s.actor("F"), s.actor("G", "sink", queue="sink")
    s.join(f, g)
    s.join(g, f, initial=1)
    assert prove(s.plan({}))


def test_too_few_slots_are_refused_and_the_full_register_is_named() -> None:
    s = Sketch(3)
    f = s.actor("F", rate=3)
    pack = s.actor("pack", queue="sink", kind="sink")
    b = s.actor("B", "backward", rate=3)
    saved = s.join(f, b, slots=2)
    s.join(f, pack, fill=3)
    s.join(pack, (b, 3))
    orders = {(0, "compute"): (f, f, f, b, b, b)}
    with pytest.raises(DeadlockError, match=rf"F@rank0 waits for a slot of register {saved} \(full, 2 of 2\)"):
        prove(s.plan(orders))
    s.registers[saved] = replace(s.registers[saved], slots=3)
    assert prove(s.plan(orders))


def test_a_full_remote_register_is_followed_to_the_reader_that_still_holds_it() -> None:
    s = Sketch(2)
    f = s.actor("F0", rate=2)
    g = s.actor("F1", rank=1, rate=2)
    h = s.actor("H1", "sink", rank=1, queue="sink", rate=2)
    s.send(f, g, h, to=1)
    s.join(g, (h, 2), fill=2)  # H1 needs all of F1, which needs the slot that H1 holds
    with pytest.raises(DeadlockError, match=r"register 1 \(full, 1 of 1\) read on rank 1 by H1@rank1"):
        prove(s.plan({}))


def test_an_order_against_the_data_is_refused() -> None:
    s = Sketch()
    f, b = s.actor("F"), s.actor("B", "backward")
    s.join(f, b)
    with pytest.raises(DeadlockError, match=r"(?s)F@rank0 waits for its turn.*B@rank0.*B@rank0 waits for register 0"):
        prove(s.plan({(0, "compute"): (b, f)}))


def test_a_queue_without_an_order_is_refused() -> None:
    s = Sketch()
    s.actor("F")
    with pytest.raises(PlanError, match="no frozen order"):
        prove(s.plan())


def test_rates_that_do_not_balance_are_refused() -> None:
    s = Sketch(4)
    f, b = s.actor("F", rate=4), s.actor("B", "backward", rate=2)
    s.join(f, b)
    with pytest.raises(PlanError, match="rates do not balance"):
        prove(s.plan({(0, "compute"): (f, f, f, f, b, b)}))


def test_a_collective_with_a_member_missing_is_refused() -> None:
    s = Sketch()
    s.actor("lonely", "boxing", queue="comm", comm=Collective(CollectiveKind.ALL_REDUCE, 5, (0, 1)))
    s.actor("elsewhere", rank=1)
    with pytest.raises(PlanError, match=r"all_reduce 5 \(lonely\): actors on ranks \[0\] .* one on each of \(0, 1\)"):
        prove(s.plan({}))


def test_members_of_a_collective_that_disagree_are_refused() -> None:
    s = Sketch(2)
    s.actor("x", "boxing", queue="comm", comm=Collective(CollectiveKind.ALL_REDUCE, 0, (0, 1)))
    s.actor("x", "boxing", rank=1, queue="comm", rate=2, comm=Collective(CollectiveKind.ALL_REDUCE, 0, (0, 1)))
    with pytest.raises(PlanError, match=r"members disagree.* rate 1 on rank 0.* rate 2 on rank 1"):
        prove(s.plan({}))


def test_members_of_a_collective_that_bring_different_numbers_of_tensors_are_refused() -> None:
    s = crossed()
    w = (OfVariable("w"),)
    s.actors[2] = replace(s.actors[2], operands=w, targets=w)
    plan = s.plan({(0, "comm"): (0, 2), (1, "comm"): (1, 3)})
    plan = replace(plan, variables=(Variable("w", (1,), "float32", placement("cpu", [0]), (B,), "parameter"),))
    with pytest.raises(PlanError, match=r"members disagree.* of 1 tensors at rate 1 on rank 0.* of 0 tensors"):
        prove(plan)


def test_collectives_of_one_group_on_two_queues_are_refused() -> None:
    s = crossed()
    s.actors[2] = replace(s.actors[2], queue="compute")
    with pytest.raises(PlanError, match="on queues comm and compute"):
        prove(s.plan({(1, "comm"): (1, 3)}))


def test_a_plan_beyond_its_memory_is_refused_and_the_largest_register_is_named() -> None:
    plan = schedule(pipeline(2, 4, nbytes=1000))
    needed = simulate(plan, 2, CPU_CORE).peak_bytes[0]
    assert prove(plan, {0: needed})
    with pytest.raises(PlanError, match=rf"rank 0 needs {needed} bytes .*, {needed - 1} are allowed; the largest is"):
        prove(plan, {0: needed - 1})


def test_the_order_in_which_queues_are_listed_does_not_matter() -> None:
    plan = schedule(pipeline(2, 2))
    assert prove(replace(plan, orders=tuple(Order(o.rank, o.queue, o.actors) for o in reversed(plan.orders))))
