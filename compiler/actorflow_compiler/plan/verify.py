"""Verify that a plan is legal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import (
    ORDERED,
    Actor,
    ActorKind,
    Body,
    FromRegister,
    Operand,
    Plan,
    Read,
    Register,
    Send,
    Target,
    moves_by,
)

__all__ = ["verify"]

Fail = Callable[[str, str], NoReturn]  # (where, what): raise PlanError
MOST_SLOTS, MOST_BYTES, MOST_DIMS = 1 << 24, 1 << 60, 64
KINDS, MODES = tuple(ActorKind), tuple(Mode)


def verify(plan: Plan) -> Plan:
    """Return the plan if it is legal, else raise PlanError that names the actor or register.

    Checked: ids are unique and known; kinds and communications are known ones; readers of a
    register are on its home rank; rates balance (producer.rate / fill == reader.rate / firings,
    both whole); slots ≥ max(1, initial); a body fits its operands and targets and reads only values
    that exist; every operand or target register is read or written by that actor, at a tensor that it has;
    ranks are of the world; a communication is its actor's, with an exchange for each tensor and boxes for each
    member; sizes are ones that memory can have; every queue's order
    contains each of its actors ``rate`` times, and so do the calls of ordered planes, which also contain the
    actors that send to the rank.
    """

    def fail(where: str, what: str) -> NoReturn:
        raise PlanError(f"plan {plan.name!r}: {where}: {what}")

    if len(plan._actors) != len(plan.actors) or len(plan._registers) != len(plan.registers):
        fail("numbers", "two actors or two registers share a number")
    if plan.mode not in MODES:
        fail("mode", f"{plan.mode!r} was found; one of {', '.join(MODES)} was expected")
    _verify_ranks(plan, fail)
    sizes: dict[int, int] = {}
    for register in plan.registers:
        _verify_sizes(register, sizes, fail)
        _verify_register(plan, register, fail)
    for actor in plan.actors:
        _verify_actor(plan, actor, fail)
    _verify_bodies(plan, fail)
    _verify_orders(plan, fail)
    _verify_calls(plan, fail)
    return plan


def _verify_ranks(plan: Plan, fail: Fail) -> None:
    named: list[tuple[str, Sequence[int]]] = [
        ("ranks", plan.ranks),
        ("orders", [order.rank for order in (*plan.orders, *plan.calls)]),
        *((f"variable {variable.name}", variable.placement.ranks) for variable in plan.variables),
        *((f"result {result.index}", result.placement.ranks) for result in plan.results),
        *((f"actor {actor.name}", () if actor.comm is None else actor.comm.ranks) for actor in plan.actors),
    ]
    seen: set[int] = set()  # ids: many variables have the same ranks, and those may be thousands
    for where, ranks in named:
        if id(ranks) not in seen and ranks and not 0 <= min(ranks) <= max(ranks) < plan.world:
            fail(where, f"ranks {min(ranks)} to {max(ranks)} were found, the world has {plan.world}")
        seen.add(id(ranks))


def _verify_comm(actor: Actor, fail: Fail) -> None:
    comm, where = actor.comm, f"actor {actor.name}"
    if isinstance(comm, Send):
        if comm.from_rank != actor.rank or comm.to_rank == actor.rank:
            fail(where, f"sends from rank {comm.from_rank} to rank {comm.to_rank}, and is on rank {actor.rank}")
    elif comm is not None:
        if actor.rank not in comm.ranks or len(set(comm.ranks)) != len(comm.ranks):
            fail(where, f"takes part in a collective of ranks {list(comm.ranks)}, and is on rank {actor.rank}")
        if comm.exchanges and len(comm.exchanges) != len(actor.operands):
            fail(where, f"{len(comm.exchanges)} exchanges for {len(actor.operands)} tensors")
        for exchange in comm.exchanges:
            if not len(exchange.send) == len(exchange.receive) == len(comm.ranks):
                fail(where, f"an exchange with {len(exchange.send)} members, the group has {len(comm.ranks)}")


def _verify_sizes(register: Register, sizes: dict[int, int], fail: Fail) -> None:
    """``sizes`` has the bytes of the tensors seen so far, by their id: registers of many ranks share theirs."""
    nbytes = sizes.get(id(register.tensors))
    known = nbytes is not None
    if nbytes is None:
        nbytes = sizes[id(register.tensors)] = register.nbytes
    if register.slots > MOST_SLOTS or max(register.slots, 1) * nbytes > MOST_BYTES:
        found = f"{register.slots} of {nbytes} bytes"
        fail(f"register {register.id}", f"its slots, {found}, are more than any memory has")
    for tensor in () if known else register.tensors:
        if len(tensor.shape) > MOST_DIMS or max(tensor.shape, default=0) > MOST_BYTES:
            fail(f"register {register.id}", f"a tensor of shape {list(tensor.shape)} is none that torch has")


def _verify_register(plan: Plan, register: Register, fail: Fail) -> None:
    producer = plan._actors.get(register.producer)
    if producer is None:
        fail(f"register {register.id}", f"its producer, actor {register.producer}, does not exist")
    wrong = partial(fail, f"register {register.id} of {producer.name}")
    if register.slots < max(1, register.initial):
        wrong(f"{register.slots} slots cannot hold {register.initial} initial tokens")
    if register.fill < 1 or producer.rate % register.fill:
        wrong(f"{producer.rate} firings do not make whole tokens of {register.fill}")
    home = producer.comm.to_rank if isinstance(producer.comm, Send) else producer.rank
    for read in register.readers:
        reader = plan._actors.get(read.actor)
        if reader is not None:
            _verify_read(read, reader, home, producer.rate // register.fill, wrong)
        elif not plan.ranks or home in plan.ranks:
            wrong(f"its reader, actor {read.actor}, does not exist")


def _verify_read(read: Read, reader: Actor, home: int, tokens: int, fail: Callable[[str], NoReturn]) -> None:
    if reader.rank != home:
        fail(f"reader {reader.name} is on rank {reader.rank}, the slots are on rank {home}")
    if read.firings < 1 or reader.rate != read.firings * tokens:
        fail(f"rates do not balance: {tokens} tokens, {reader.name} reads {reader.rate}/{read.firings}")


def _verify_actor(plan: Plan, actor: Actor, fail: Fail) -> None:
    where = f"actor {actor.name}"
    if actor.kind not in KINDS:
        fail(where, f"unknown kind {actor.kind!r}; known: {', '.join(KINDS)}")
    if actor.rank >= plan.world:
        fail(where, f"rank {actor.rank} was found, the world has {plan.world}")
    if plan.ranks and actor.rank not in plan.ranks:
        return
    if actor.rate < 1:
        fail(where, f"{actor.rate} firings in an iteration were found, at least one was expected")
    _verify_comm(actor, fail)
    wrong = partial(fail, where)
    _verify_places(plan, actor.operands, plan.inputs_of[actor.id], "takes from {} without being its reader", wrong)
    _verify_places(plan, actor.targets, plan.outputs_of[actor.id], "writes {} without being its producer", wrong)
    if actor.body is not None and actor.body >= len(plan.bodies):
        fail(where, f"body {actor.body} was found, the plan has {len(plan.bodies)}")
    elif actor.body is not None:
        _verify_fit(plan.bodies[actor.body], actor, fail)
    elif len(actor.operands) != len(actor.targets):
        fail(where, f"{len(actor.operands)} operands and {len(actor.targets)} targets, and no body between them")


def _verify_places(
    plan: Plan, places: Sequence[Operand | Target], own: Sequence[Register], why: str, fail: Callable[[str], NoReturn]
) -> None:
    """Check the operands or the targets of an actor against its ``own`` registers, which it reads or writes."""
    known = {register.id for register in own}
    for place in places:
        if type(place) is FromRegister:
            register = plan._registers.get(place.register)
            if register is not None and place.index >= len(register.tensors):
                fail(f"names tensor {place.index} of register {register.id}, which has {len(register.tensors)}")
            if place.register not in known:
                fail(why.format(f"register {place.register}"))


def _verify_fit(body: Body, actor: Actor, fail: Fail) -> None:
    if body.inputs != len(actor.operands) or len(body.outputs) != len(actor.targets):
        fail(
            f"actor {actor.name}",
            f"its body takes {body.inputs} and gives {len(body.outputs)}, "
            f"the actor {len(actor.operands)} and {len(actor.targets)}",
        )


def _verify_bodies(plan: Plan, fail: Fail) -> None:
    """Each once, as that of the first actor that has it."""
    actors: dict[int, Actor] = {}
    for actor in plan.actors:
        if actor.body is not None and (not plan.ranks or actor.rank in plan.ranks):
            actors.setdefault(actor.body, actor)
    for number, actor in actors.items():
        _verify_steps(plan.bodies[number], actor, fail)


def _verify_steps(body: Body, actor: Actor, fail: Fail) -> None:
    known = set(range(body.inputs))
    for step in body.steps:
        missing = [v for v in step.reads() if v not in known]
        if missing:
            fail(f"actor {actor.name}", f"{step.op} reads value {missing[0]} before it exists")
        known.update(v for v in step.outs if v >= 0)
    for value in body.outputs:
        if value not in known:
            fail(f"actor {actor.name}", f"its output {value} does not exist")


def _verify_orders(plan: Plan, fail: Fail) -> None:
    if not plan.orders:
        return
    expected: dict[tuple[int, str], dict[int, int]] = {}
    for actor in plan.actors:
        if not plan.ranks or actor.rank in plan.ranks:
            expected.setdefault((actor.rank, actor.queue), {})[actor.id] = actor.rate
    found: dict[tuple[int, str], dict[int, int]] = {}
    for order in plan.orders:
        counts = found.setdefault((order.rank, order.queue), {})
        for id in order.actors:
            counts[id] = counts.get(id, 0) + 1
    if expected != found:
        where = next(k for k in {**expected, **found} if expected.get(k) != found.get(k))
        fail(
            f"rank {where[0]}, queue {where[1]}",
            f"the order fires {found.get(where)}, the rates ask for {expected.get(where)}",
        )


def _verify_calls(plan: Plan, fail: Fail) -> None:
    expected: dict[tuple[int, str], dict[int, int]] = {}
    for actor in plan.actors:
        for plane in ORDERED:
            if moves_by(actor, plane):
                assert actor.comm is not None
                for rank in actor.comm.ranks if isinstance(actor.comm, Send) else (actor.rank,):
                    if not plan.ranks or rank in plan.ranks:
                        expected.setdefault((rank, plane), {})[actor.id] = actor.rate
    found = {(order.rank, order.queue): Counter(order.actors) for order in plan.calls}
    if expected != found:
        where = next(k for k in {**expected, **found} if expected.get(k) != found.get(k))
        fail(
            f"rank {where[0]}, calls of plane {where[1]}",
            f"their order makes {dict(found.get(where, {}))}, the rates ask for {expected.get(where)}",
        )
