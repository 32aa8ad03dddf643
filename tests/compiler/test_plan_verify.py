"""An illegal plan is refused, and the error says which actor or register is at fault."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import (
    SUM,
    Actor,
    Body,
    Collective,
    CollectiveKind,
    Exchange,
    FromRegister,
    OfScalar,
    Order,
    Plan,
    Read,
    Register,
    Send,
    TensorSpec,
)
from actorflow_compiler.plan.verify import verify

BODY = Body(0, (), ())


def legal() -> Plan:
    """F fires twice in an iteration, B once for both of its tokens joined."""
    spec = TensorSpec((2,), "float32", "B", SUM)
    actors = (
        Actor(0, "F", 0, "compute", "forward", 2, 0),
        Actor(1, "B", 0, "compute", "backward", 1, 0),
    )
    registers = (Register(0, 0, (Read(1),), (spec,), fill=2),)
    orders = (Order(0, "compute", (0, 0, 1)),)
    return Plan("p", 1, 2, (BODY,), actors, registers, orders=orders)


def actor(plan: Plan, number: int, **changes: object) -> Plan:
    actors = list(plan.actors)
    actors[number] = replace(actors[number], **changes)  # type: ignore[arg-type]
    return replace(plan, actors=tuple(actors))


def collective(**changes: object) -> Collective:
    return replace(Collective(CollectiveKind.ALL_GATHER, 0, (0,)), **changes)  # type: ignore[arg-type]


def register(plan: Plan, **changes: object) -> Plan:
    return replace(plan, registers=(replace(plan.registers[0], **changes),))  # type: ignore[arg-type]


def test_a_legal_plan_is_returned() -> None:
    assert verify(legal()) == legal()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda p: register(p, fill=1), r"register 0 of F: rates do not balance"),
        (lambda p: register(p, slots=0), r"register 0 of F: 0 slots"),
        (lambda p: register(p, producer=7), r"its producer, actor 7, does not exist"),
        (lambda p: register(p, readers=(Read(9),)), r"its reader, actor 9, does not exist"),
        (lambda p: actor(p, 1, kind="dance"), r"actor B: unknown kind 'dance'"),
        (lambda p: actor(p, 1, rank=3), r"rank 3"),
        (lambda p: actor(p, 1, body=4), r"actor B: body 4 was found, the plan has 1"),
        (lambda p: actor(p, 0, operands=(FromRegister(0, 0),)), r"actor F: takes from register 0"),
        (lambda p: actor(p, 1, targets=(FromRegister(0, 0),)), r"actor B: writes register 0"),
        (lambda p: replace(p, orders=(Order(0, "compute", (0, 1)),)), r"rank 0, queue compute"),
        (lambda p: replace(p, orders=(*p.orders, Order(3, "compute", ()))), r"orders: ranks 0 to 3 .* world has 1"),
        (lambda p: replace(p, ranks=(5,)), r"ranks: ranks 5 to 5"),
        (lambda p: actor(p, 0, comm=Send(0, 0, 9)), r"actor F: ranks 0 to 9"),
        (lambda p: actor(p, 0, comm=Send(0, 0, 0)), r"actor F: sends from rank 0 to rank 0, and is on rank 0"),
        (lambda p: actor(p, 0, comm=collective(ranks=(0, 0))), r"a collective of ranks \[0, 0\]"),
        (lambda p: actor(p, 0, comm=collective(exchanges=(Exchange(((),), ((),)),))), r"1 exchanges for 0 tensors"),
        (
            lambda p: actor(p, 0, comm=collective(exchanges=(Exchange((), ((),)),)), operands=(OfScalar("x"),)),
            r"an exchange with 0 members, the group has 1",
        ),
        (lambda p: actor(p, 0, rate=0), r"0 firings|rates do not balance"),
        (lambda p: actor(p, 0, targets=(FromRegister(0, 1),)), r"actor F: names tensor 1 of register 0, which has 1"),
        (lambda p: register(p, slots=1 << 30), r"its slots, 1073741824 of 8 bytes, are more"),
        (lambda p: register(p, tensors=(TensorSpec((1 << 61,), "int8", "B"),)), r"more than any memory has"),
        (lambda p: register(p, tensors=(TensorSpec((1 << 61, 0), "int8", "B"),)), r", 0\] is none that torch has"),
        (lambda p: register(p, tensors=(TensorSpec((1,) * 65, "int8", "B"),)), r"is none that torch has"),
    ],
)
def test_an_illegal_plan_is_refused_by_name(spoil: Callable[[Plan], Plan], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        verify(spoil(legal()))
