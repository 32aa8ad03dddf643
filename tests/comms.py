"""Compute from a plan alone what it moves between ranks in one iteration, tensor by tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

from actorflow_compiler.core.ops import ITEM_BYTES
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.plan.plan import Actor, CollectiveKind, FromRegister, OfVariable, Operand, Plan, Send, Target
from actorflow_compiler.plan.summary import variable_shape

PHASES = {"F": "forward", "B": "backward", "O": "optimizer", "s": "source"}


@dataclass(frozen=True)
class Communication:
    """One tensor moved within one group of ranks; a coalesced communication has one for each of its tensors."""

    kind: str  # "all_reduce" | "all_gather" | "reduce_scatter" | "all_to_all" | "send"
    phase: str  # "source" | "forward" | "backward" | "optimizer": where the value was made
    nbytes: int  # that all ranks together send in an iteration; an all_reduce of n bytes over p ranks counts 2(p-1)·n
    ranks: tuple[int, ...]  # the group; (from, to) of a send
    name: str  # the logical value
    number: int  # of the actors that move it: tensors of one bucket have the same
    times: int  # it is moved in an iteration: once, or once for each micro-batch


def communications(plan: Plan) -> list[Communication]:
    """All that a plan moves, in the order of its actors."""
    members: dict[int, list[Actor]] = {}
    for actor in plan.actors:
        if actor.comm is not None:
            members.setdefault(actor.comm.id, []).append(actor)
    found = []
    for number, actors in members.items():
        first = actors[0]
        assert first.comm is not None
        kind, ranks = first.comm.label, first.comm.ranks
        letter = re.match(rf"{kind}\d+([{''.join(PHASES)}])\d", first.name)
        assert letter is not None, first.name
        for i, target in enumerate(first.targets):
            nbytes = sum(_sent(plan, actor, i) for actor in actors)
            if kind == "all_reduce":
                nbytes = 2 * (len(ranks) - 1) * _nbytes(plan, first, first.operands[i])
            found.append(
                Communication(
                    kind, PHASES[letter[1]], first.rate * nbytes, ranks, _name(plan, target), number, first.rate
                )
            )
    return found


def buckets(found: list[Communication]) -> list[list[Communication]]:
    """The same, those that leave together together."""
    groups: dict[int, list[Communication]] = {}
    for one in found:
        groups.setdefault(one.number, []).append(one)
    return list(groups.values())


def _sent(plan: Plan, actor: Actor, i: int) -> int:
    """Bytes of tensor i that this rank sends in a firing, but for an all_reduce."""
    comm = actor.comm
    assert comm is not None
    if isinstance(comm, Send):
        return _nbytes(plan, actor, actor.operands[i])
    if comm.kind == CollectiveKind.ALL_REDUCE:
        return 0
    boxes = [b for to, bs in zip(comm.ranks, comm.exchanges[i].send, strict=True) if to != actor.rank for b in bs]
    return sum(numel(b.size) for b in boxes) * ITEM_BYTES[_tensor(plan, actor, actor.operands[i])[1]]


def _nbytes(plan: Plan, actor: Actor, operand: Operand) -> int:
    shape, dtype = _tensor(plan, actor, operand)
    return numel(shape) * ITEM_BYTES[dtype]


def _tensor(plan: Plan, actor: Actor, operand: Operand) -> tuple[tuple[int, ...], str]:
    """Local shape and dtype of an operand."""
    if isinstance(operand, FromRegister):
        spec = plan.register(operand.register).tensors[operand.index]
        return spec.shape, spec.dtype
    assert isinstance(operand, OfVariable)
    variable = next(v for v in plan.variables if v.name == operand.name)
    return variable_shape(variable, actor.rank), variable.dtype


def _name(plan: Plan, target: Target) -> str:
    if isinstance(target, FromRegister):
        return plan.register(target.register).tensors[target.index].name
    assert isinstance(target, OfVariable)
    return target.name
