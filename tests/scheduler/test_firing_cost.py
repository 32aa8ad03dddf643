"""The seconds that one firing takes."""

from __future__ import annotations

import pytest

from actorflow_compiler.plan import Actor, Box, Comm, Exchange, FromRegister, OfVariable, Plan
from actorflow_scheduler.cost import Hardware, moved_bytes, register_bytes, seconds
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
    plan, actor = communication(Comm("all_reduce", 0, (0, 1, 2, 3)))
    assert moved_bytes(plan, actor) == pytest.approx(600)
    assert seconds(plan, actor, HARDWARE) == pytest.approx(0.5 + 0.01 + 2.0 + 60)


def test_a_send_moves_its_token() -> None:
    plan, actor = communication(Comm("send", 0, (0, 1)), target=80)
    assert moved_bytes(plan, actor) == 80


def test_an_exchange_moves_what_it_lists_but_not_to_itself() -> None:
    half, whole = Box((0,), (50,)), Box((0,), (100,))
    gather = Exchange(send=((half,), (half,)), receive=((half,), (half,)))
    plan, actor = communication(Comm("all_gather", 0, (0, 1), (gather,)), operand=200, target=400)
    assert moved_bytes(plan, actor) == 50 * 4
    lopsided = Exchange(send=((whole,), ()), receive=((), (whole, half)))
    plan, actor = communication(Comm("all_to_all", 0, (0, 1), (lopsided,)))
    assert moved_bytes(plan, actor) == 150 * 4


def test_a_gathered_variable_is_measured_by_its_target() -> None:
    s = Sketch()
    half = Box((0,), (50,))
    comm = Comm("all_gather", 0, (0, 1), (Exchange(send=((half,), (half,)), receive=((half,), (half,))),))
    actor = s.actor("gather", "boxing", comm=comm, operands=(OfVariable("weight"),), targets=(FromRegister(0, 0),))
    s.join(actor, nbytes=400)
    assert moved_bytes(s.plan(), s.actors[actor]) == 200


def test_the_bytes_of_a_rank_are_those_of_the_slots_that_lie_there() -> None:
    s = Sketch()
    f, g = s.actor("F0"), s.actor("F1", rank=1)
    s.send(f, g, to=1, slots=3, nbytes=100)
    assert register_bytes(s.plan()) == {0: 300, 1: 300}
