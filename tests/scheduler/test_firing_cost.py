"""The seconds that one firing takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow.transport.parcels import SMALL
from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.plan.communication_time import AT_ONCE
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import (
    Actor,
    Body,
    Box,
    Collective,
    CollectiveKind,
    Comm,
    Exchange,
    FromRegister,
    OfVariable,
    Plan,
    Plane,
    Register,
    Send,
    Step,
    TensorSpec,
    Variable,
)
from actorflow_compiler.plan.shared_slots import LONGEST
from actorflow_scheduler.cost import (
    latency,
    moved_bytes,
    register_bytes,
    seconds,
    seconds_beside,
    shared_bytes,
    touched_bytes,
    variable_bytes,
)
from actorflow_scheduler.work_digest import work_digest
from plans import Sketch

HARDWARE = Hardware(flops_per_s=100.0, bytes_per_s=10.0, latency_s=2.0, fire_overhead_s=0.5)


def communication(comm: Comm, operand: int = 400, target: int = 400, fill: int = 1) -> tuple[Plan, Actor]:
    """An actor on rank 0 that moves a register of ``operand`` bytes into one of ``target`` bytes."""
    s = Sketch()
    before = s.actor("before")
    actor = s.actor("moves", "boxing", comm=comm, operands=(FromRegister(0, 0),), targets=(FromRegister(1, 0),))
    s.join(before, actor, nbytes=operand)
    s.join(actor, nbytes=target, fill=fill)
    plan = s.plan()
    return plan, plan.actor(actor)


def test_computing_takes_its_operations_and_the_overhead() -> None:
    s = Sketch()
    s.actor("F", flops=200.0)
    assert seconds(s.plan(), s.actors[0], HARDWARE) == pytest.approx(2.5)


def test_an_all_reduce_moves_twice_the_share_of_the_others() -> None:
    plan, actor = communication(Collective(CollectiveKind.ALL_REDUCE, 0, (0, 1, 2, 3)))
    assert moved_bytes(plan, actor) == pytest.approx(600)
    assert seconds(plan, actor, HARDWARE) == pytest.approx(0.5 + 0.01 + 2 * 2.0 + 60)  # it is asked for, and comes


@pytest.mark.parametrize(
    ("plane", "ranks", "nbytes", "messages"),
    [("gloo", 2, AT_ONCE, 2), ("gloo", 2, AT_ONCE + 4, 4), ("gloo", 4, AT_ONCE, 12), ("nccl", 4, AT_ONCE, 2)],
)
def test_an_all_reduce_waits_for_the_messages_of_its_ring_or_tree(
    plane: str, ranks: int, nbytes: int, messages: int
) -> None:
    plan, actor = communication(
        Collective(CollectiveKind.ALL_REDUCE, 0, tuple(range(ranks)), plane=plane), nbytes, nbytes
    )
    longer = replace(HARDWARE, latency_s=HARDWARE.latency_s + 1.0)
    assert seconds(plan, actor, longer) - seconds(plan, actor, HARDWARE) == pytest.approx(messages)
    assert latency(actor, longer) == 0.0


def test_an_all_reduce_is_taken_to_be_a_ring_from_where_it_is_one() -> None:
    assert AT_ONCE == SMALL


def test_an_exchange_by_gloo_is_asked_for_and_comes_whatever_the_number_of_ranks() -> None:
    part = Exchange(send=((),) * 8, receive=((),) * 8)
    plan, actor = communication(Collective(CollectiveKind.ALL_TO_ALL, 0, tuple(range(8)), (part,)))
    assert seconds(plan, actor, HARDWARE) == pytest.approx(0.5 + 0.01 + 2 * 2.0)


def test_a_send_moves_its_token() -> None:
    plan, actor = communication(Send(0, 0, 1), target=80)
    assert moved_bytes(plan, actor) == 80


def test_a_send_holds_its_queue_until_its_bytes_have_left_and_not_until_they_are_there() -> None:
    plan, actor = communication(Send(0, 0, 1, plane="inline"), target=80)
    assert seconds(plan, actor, HARDWARE) == pytest.approx(0.5 + 0.01 + 8.0)
    assert latency(actor, HARDWARE) == 2.0


def test_parts_of_what_one_firing_has_made_share_the_links_over_which_they_leave() -> None:
    s = Sketch()
    made, other = s.actor("made"), s.actor("other")
    sends = []
    for number, (source, to, nbytes) in enumerate([(made, 1, 40), (made, 2, 80), (made, 8, 20), (other, 1, 60)]):
        send = s.actor(
            f"to {number}",
            "boxing",
            comm=Send(number, 0, to),
            operands=(FromRegister(2 * number, 0),),
            targets=(FromRegister(2 * number + 1, 0),),
        )
        s.join(source, send, nbytes=nbytes)
        s.join(send, nbytes=nbytes)
        sends.append(send)
    nodes = replace(HARDWARE, node_size=4, inside=Link(20.0, 0.0))
    assert seconds_beside(s.plan(), nodes) == {sends[0]: 80 / 20.0, sends[1]: 40 / 20.0}  # one leaves the node
    assert seconds_beside(s.plan(), HARDWARE) == {sends[0]: 10.0, sends[1]: 6.0, sends[2]: 12.0}


def test_a_send_by_gloo_also_waits_for_the_answer_to_what_it_announces() -> None:
    plan, actor = communication(Send(0, 0, 1, plane="gloo"), target=80)
    assert seconds(plan, actor, HARDWARE) == pytest.approx(0.5 + 0.01 + 2 * 2.0 + 8.0)
    assert latency(actor, HARDWARE) == 2.0


def test_an_exchange_moves_what_it_lists_but_not_to_itself() -> None:
    half, whole = Box((0,), (50,)), Box((0,), (100,))
    gather = Exchange(send=((half,), (half,)), receive=((half,), (half,)))
    plan, actor = communication(Collective(CollectiveKind.ALL_GATHER, 0, (0, 1), (gather,)), operand=200, target=400)
    assert moved_bytes(plan, actor) == 50 * 4
    lopsided = Exchange(send=((whole,), ()), receive=((), (whole, half)))
    plan, actor = communication(Collective(CollectiveKind.ALL_TO_ALL, 0, (0, 1), (lopsided,)))
    assert moved_bytes(plan, actor) == 150 * 4


def test_a_gathered_variable_is_measured_by_its_target() -> None:
    s = Sketch()
    half = Box((0,), (50,))
    comm = Collective(
        CollectiveKind.ALL_GATHER, 0, (0, 1), (Exchange(send=((half,), (half,)), receive=((half,), (half,))),)
    )
    actor = s.actor("gather", "boxing", comm=comm, operands=(OfVariable("weight"),), targets=(FromRegister(0, 0),))
    s.join(actor, nbytes=400)
    assert moved_bytes(s.plan(), s.actors[actor]) == 200


def test_the_bytes_of_a_rank_are_those_of_the_slots_that_lie_there() -> None:
    s = Sketch()
    f, g = s.actor("F0"), s.actor("F1", rank=1)
    s.send(f, g, to=1, slots=3, nbytes=100)
    assert register_bytes(s.plan()) == {0: 300, 1: 300}


def computing(dtype: str = "float32", elements: int = 1000, **changes: object) -> tuple[Plan, Actor]:
    """An actor that reads a register and a variable, which is split over two ranks, and writes a register."""
    product = Body(2, (Step("aten.mul.Tensor", (Ref(0), Ref(1)), (), (2,)),), (2,))
    weight = Variable("w", (100, 10), "float32", Placement("cpu", (0, 1), (2,)), (Split(0),), "parameter")
    registers = tuple(Register(i, i, (), (TensorSpec((elements,), dtype, "B"),)) for i in range(2))
    before = Actor(0, "before", 0, "compute", "forward")
    actor = Actor(
        1, "F", 0, "compute", "forward", body=0, operands=(FromRegister(0, 0), OfVariable("w")),
        targets=(FromRegister(1, 0),), **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return Plan("sketch", 2, 1, (product,), (before, actor), registers, (weight,)), actor


def test_computing_takes_the_time_of_memory_where_that_is_longer_than_the_arithmetic() -> None:
    hardware = replace(HARDWARE, memory_bytes_per_s=1000.0)
    plan, actor = computing(flops=100.0)
    assert touched_bytes(plan, actor) == 4000 + 2000 + 4000
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 10.0)
    assert seconds(plan, replace(actor, flops=2000.0), hardware) == pytest.approx(0.5 + 20.0)


def test_ops_beside_products_take_the_time_of_memory_and_less_where_they_are_fused() -> None:
    hardware = replace(HARDWARE, memory_bytes_per_s=1000.0)
    plan, actor = computing(flops=2000.0, traffic=9000, fused_traffic=3000)
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 20.0 + 9.0)
    assert seconds(replace(plan, mode=Mode.CUDAGRAPHS), actor, hardware) == pytest.approx(0.5 + 20.0 + 9.0)
    assert seconds(replace(plan, mode=Mode.INDUCTOR), actor, hardware) == pytest.approx(0.5 + 20.0 + 3.0)
    small = replace(actor, flops=0.0)
    assert seconds(plan, small, hardware) == pytest.approx(0.5 + 10.0)  # operands and targets


def test_an_optimizer_reads_and_writes_its_variables() -> None:
    plan, actor = computing()
    assert touched_bytes(plan, replace(actor, kind="optimizer")) == 4000 + 2 * 2000 + 4000


def test_arithmetic_is_as_fast_as_the_dtype_of_the_actor_s_registers() -> None:
    hardware = replace(HARDWARE, flops_by_dtype=(("bfloat16", 1000.0),))
    plan, actor = computing("bfloat16", flops=5000.0)
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 5.0)
    plan, actor = computing("float32", flops=5000.0)
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 50.0)


def test_arithmetic_between_registers_of_another_dtype_is_as_fast_as_its_own() -> None:
    hardware = replace(HARDWARE, flops_by_dtype=(("bfloat16", 1000.0),))
    plan, actor = computing("float32", flops=5000.0, flops_dtype="bfloat16")
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 5.0)


def test_what_was_measured_of_the_same_work_counts_instead_of_the_estimate() -> None:
    plan, actor = computing(flops=5000.0)
    hardware = replace(HARDWARE, measured={work_digest(plan, actor): 0.25})
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 0.25)
    other, larger = computing(elements=2000, flops=5000.0)
    assert seconds(other, larger, hardware) == pytest.approx(0.5 + 50.0)


def test_a_collective_can_be_slower_than_a_send() -> None:
    hardware = replace(HARDWARE, collectives=Link(1.0, 7.0))
    send, sending = communication(Send(0, 0, 1, plane="inline"))
    assert seconds(send, sending, hardware) == seconds(send, sending, HARDWARE)
    both = Collective(CollectiveKind.ALL_REDUCE, 0, (0, 1), plane=Plane.SHARED)
    plan, actor = communication(both)
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 0.01 + 7.0 + 400.0)


def test_ranks_of_one_node_use_its_link_and_a_group_over_several_nodes_the_network() -> None:
    hardware = replace(HARDWARE, node_size=2, inside=Link(100.0, 1.0))
    plan, actor = communication(Send(0, 0, 1, plane="inline"))
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 0.01 + 4.0)
    assert latency(actor, hardware) == 1.0
    plan, actor = communication(Send(0, 1, 2, plane="inline"))
    assert seconds(plan, actor, hardware) == pytest.approx(0.5 + 0.01 + 40.0)
    assert latency(actor, hardware) == 2.0
    assert hardware.link((2, 3)) == Link(100.0, 1.0)
    assert hardware.link((0, 1, 2)) == Link(10.0, 2.0)


def test_the_variables_of_a_rank_are_its_parts_of_them() -> None:
    plan, _ = computing()
    whole = replace(plan.variables[0], name="v", sbp=(B,))
    assert variable_bytes(replace(plan, variables=(*plan.variables, whole))) == {0: 2000 + 4000}


def test_a_rank_leaves_what_others_read_in_two_slots_or_in_four_where_it_goes_in_ranges() -> None:
    def shared(kind: CollectiveKind, operand: int, target: int, plane: Plane = Plane.SHARED) -> int:
        plan, _ = communication(Collective(kind, 0, (0, 1, 2, 3), plane=plane), operand, target)
        return shared_bytes(plan)[0]

    assert shared(CollectiveKind.ALL_REDUCE, 400, 400) == 2 * 400
    assert shared(CollectiveKind.ALL_REDUCE, 400, 400, Plane.GLOO) == 0
    assert shared(CollectiveKind.ALL_GATHER, 100, 400) == 2 * 100
    assert shared(CollectiveKind.REDUCE_SCATTER, 400, 100) == 2 * 300
    assert shared(CollectiveKind.ALL_REDUCE, LONGEST, LONGEST) == 2 * LONGEST
    assert shared(CollectiveKind.ALL_REDUCE, 3 * LONGEST, 3 * LONGEST) == 4 * LONGEST
