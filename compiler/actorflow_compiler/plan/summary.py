"""Compute the summary of a plan: its stages, the memory of each rank, the bytes that communication moves."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import ITEM_BYTES
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp, device_count, local_shape, numel
from actorflow_compiler.plan.plan import (
    COMM_LABELS,
    Actor,
    ActorKind,
    Collective,
    CollectiveKind,
    Comm,
    FromRegister,
    OfVariable,
    Operand,
    Plan,
    RankBytes,
    Send,
    Variable,
    VariableKind,
    elements,
)
from actorflow_compiler.plan.proto import to_bytes

COMPUTING = (
    ActorKind.FORWARD,
    ActorKind.BACKWARD,
    ActorKind.WEIGHT,
    ActorKind.OPTIMIZER,
)  # the kinds whose ranks are a stage's

_Look = tuple[tuple[int, ...], Placement, NdSbp]  # shape, placement and SBP of a variable


def summarise(plan: Plan) -> Plan:
    """The plan with its summary computed anew, except for the FLOPs, which only the compiler knows.

    Raises PlanError for a part of a plan (``for_rank``), or a communication of an operand that is no tensor.
    """
    if plan.ranks:
        raise PlanError(
            f"plan {plan.name!r} lists the actors of ranks {list(plan.ranks)} only; a summary needs them all"
        )
    summary = replace(
        plan.summary, stages=stages(plan), actors=len(plan.actors), memory=memory(plan), moved=moved(plan)
    )
    return replace(plan, summary=summary)


def plan_digest(plan: Plan) -> str:
    """The SHA-256 of the plan's bytes, in hexadecimal: 64 digits, the same on every machine."""
    return hashlib.sha256(to_bytes(plan)).hexdigest()


def device_type(plan: Plan) -> str:
    """The type of the devices that a plan is for, by its first placement; "cpu" without any."""
    places = [*(v.placement for v in plan.variables), *(r.placement for r in plan.results)]
    return places[0].type if places else "cpu"


def stages(plan: Plan) -> tuple[str, ...]:
    """The text of each stage's placement (the ranks that compute for it), by stage; "" for a stage without ops."""
    found: dict[int, set[int]] = {}
    for actor in plan.actors:
        if actor.kind in COMPUTING:
            found.setdefault(actor.stage, set()).add(actor.rank)
    places = [*(r.placement for r in plan.results), *(v.placement for v in plan.variables)]
    known = {frozenset(p.ranks): p for p in places}
    type_of = {rank: p.type for p in places for rank in p.ranks}

    def place(ranks: set[int]) -> Placement:
        return known.get(frozenset(ranks)) or Placement(
            type_of.get(min(ranks), "cpu"), tuple(sorted(ranks)), (len(ranks),)
        )

    return tuple(str(place(found[k])) if k in found else "" for k in range(max(found, default=-1) + 1))


def memory(plan: Plan) -> tuple[RankBytes, ...]:
    """The bytes of each rank of the world.

    Parameters include buffers and all other state that is not the optimizer's.  Activations are all
    slots of the registers on the rank, an upper bound.
    """
    parameters: Counter[int] = Counter()
    optimizer: Counter[int] = Counter()
    activations: Counter[int] = Counter()
    elements_of: dict[_Look, list[int]] = {}  # those that lie alike have equal parts, as a weight and its moments do
    items: Counter[tuple[_Look, bool]] = Counter()  # bytes of an element of all that lie alike
    for variable in plan.variables:
        look = (variable.shape, variable.placement, variable.sbp)
        if look not in elements_of:
            elements_of[look] = [numel(variable_shape(variable, rank)) for rank in variable.placement.ranks]
        items[look, variable.kind == VariableKind.OPTIMIZER] += ITEM_BYTES[variable.dtype]
    for (look, is_optimizer), item in items.items():
        kind = optimizer if is_optimizer else parameters
        for rank, count in zip(look[1].ranks, elements_of[look], strict=True):
            kind[rank] += count * item
    sizes: dict[int, int] = {}  # id of a register's tensors, which those of many ranks share → their bytes
    for register in plan.registers:
        nbytes = sizes.get(id(register.tensors))
        if nbytes is None:
            nbytes = sizes[id(register.tensors)] = register.nbytes
        activations[plan.home(register)] += register.slots * nbytes
    return tuple(RankBytes(r, parameters[r], optimizer[r], activations[r]) for r in range(plan.world))


def variable_shape(variable: Variable, rank: int) -> tuple[int, ...]:
    """The shape of the part of a variable that a rank of its placement holds."""
    place, shape = variable.placement, variable.shape
    rest = place.index(rank)
    inner = place.size
    for entry, parts in zip(variable.sbp, place.axes, strict=True):
        inner //= device_count(parts)
        at, rest = divmod(rest, inner)
        shape = local_shape(shape, entry, parts, at)
    return shape


def moved(plan: Plan) -> tuple[tuple[str, int], ...]:
    """(kind of communication, bytes that all ranks together send in an iteration), in the order of ``COMM_LABELS``.

    An all-reduce of T bytes over p ranks counts 2(p-1)·T, what a ring sends.
    """
    found: Counter[str] = Counter()
    actors = {a.id: a.comm for a in plan.actors}
    for id, nbytes in sent_bytes(plan).items():
        comm = actors[id]
        assert comm is not None
        found[comm.label] += nbytes
    return tuple((kind, found[kind]) for kind in COMM_LABELS if kind in found)


def sent_bytes(plan: Plan) -> dict[int, int]:
    """Actor that communicates → the bytes that it sends in an iteration.

    The bytes of an all-reduce are those of all its members together, and are counted for the first member only.
    """
    found: dict[int, int] = {}
    reduced: set[tuple[int, tuple[int, ...]]] = set()
    sizes = _Sizes(plan)
    for actor in plan.actors:
        comm = actor.comm
        if comm is None:
            continue
        if isinstance(comm, Collective) and comm.kind == CollectiveKind.ALL_REDUCE:
            if (comm.id, comm.ranks) in reduced:
                continue
            reduced.add((comm.id, comm.ranks))
        found[actor.id] = actor.rate * sum(sizes.sent(actor, comm))
    return found


class _Sizes:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.variables = {v.name: v for v in plan.variables}
        self.constants = {c.name: c for c in plan.constants}

    def sent(self, actor: Actor, comm: Comm) -> Iterator[int]:
        """The bytes that one firing sends of each operand from this rank; of an all-reduce, from all ranks together."""
        for i, operand in enumerate(actor.operands):
            shape, dtype = self.tensor(actor, operand)
            count = numel(shape)
            if isinstance(comm, Send):
                pass
            elif comm.kind == CollectiveKind.ALL_REDUCE:
                count *= 2 * (len(comm.ranks) - 1)
            else:
                exchange = comm.exchanges[i]
                count = self.plan.moved_by(exchange)[0] - elements(exchange.send[comm.ranks.index(actor.rank)])
            yield count * ITEM_BYTES[dtype]

    def tensor(self, actor: Actor, operand: Operand) -> tuple[tuple[int, ...], str]:
        """The local shape and the dtype of an operand."""
        if isinstance(operand, FromRegister):
            spec = self.plan.register(operand.register).tensors[operand.index]
            return spec.shape, spec.dtype
        if isinstance(operand, OfVariable) and operand.name in self.variables:
            variable = self.variables[operand.name]
            return variable_shape(variable, actor.rank), variable.dtype
        if isinstance(operand, OfVariable) and operand.name in self.constants:
            constant = self.constants[operand.name]
            return constant.shape, constant.dtype
        raise PlanError(
            f"plan {self.plan.name!r}: actor {actor.name}: {operand} was found where a tensor was expected; "
            f"a communication moves tensors only"
        )
