"""One rank's part of a plan enters; what fires its actors leaves: kernels, slots, operands and targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.runtime.call import Call
from actorflow.runtime.kernels import Kernel, Kernels
from actorflow.runtime.messages import DataPlane, Ready
from actorflow.runtime.slots import Slots
from actorflow.runtime.wire import decode
from actorflow_compiler.errors import CallError, PlanError
from actorflow_compiler.ops import ITEM_BYTES
from actorflow_compiler.plan import (
    Actor,
    Body,
    Comm,
    FromRegister,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Operand,
    Plan,
    Register,
    TensorSpec,
    ToResult,
    verify,
)
from actorflow_scheduler.machine import Finished, Machine

INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Store:
    """How an actor's outputs fill one register of this rank."""

    at: int  # position in the writes of a firing
    slots: Slots
    outputs: tuple[int, ...]  # output number of each tensor
    all: bool  # the outputs are the token, as they come


@dataclass(frozen=True, slots=True)
class Unit:
    """An actor, ready to fire.

    An operand is ``boxes[box][key]``.  The boxes are the tokens of ``reads``, then, where ``outer``:
    variables, constants, the call's inputs, its scalars, and the piece.
    """

    actor: Actor
    rate: int
    finished: Finished
    inline: bool  # fires on the compute thread
    body: Body | None
    kernel: Kernel | None
    reads: tuple[tuple[int, Slots], ...]  # (position in the reads of a firing, register)
    outer: bool
    operands: tuple[tuple[int, int | str], ...]  # (box, key)
    stores: tuple[Store, ...]
    variables: tuple[tuple[int, str], ...]  # (output, variable that it overwrites)
    results: tuple[tuple[int, int, bool], ...]  # (output, result, whether it must be copied)
    comm: Comm | None
    plane: DataPlane | None  # None where nothing moves, or inside the message
    specs: tuple[TensorSpec, ...]  # of a collective's outputs
    sent: tuple[int, int] | None  # (position in the writes of a firing, register) that a send fills


class Job:
    """A plan that is installed on one rank.

    Raises PlanError where the plan cannot be run here.
    """

    def __init__(
        self,
        number: int,
        plan: Plan,
        rank: int,
        device: torch.device,
        kernels: Kernels,
        planes: Mapping[str, DataPlane],
        variables: Mapping[str, Tensor],
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.number = number
        self.plan = verify(plan)
        self.machine = Machine(plan, rank)
        if constants is None:
            constants = dict(zip((c.name for c in plan.constants), _constants(plan, device), strict=True))
        self.constants = constants
        self.begun = 0  # iterations
        self.calls: dict[int, Call] = {}  # by iteration; those that are under way
        self.slots: dict[int, Slots] = {r.id: Slots(r, device) for r in plan.registers if plan.home(r) == rank}
        self._rank = rank
        self._device = device
        self._kernels = kernels
        self._planes = planes
        self._variables = variables
        mine = [a for a in plan.actors if a.rank == rank]
        self.units = {a.id: self._unit(a) for a in mine}
        self.sources = {r.id: plan.actor(r.producer) for r in plan.registers if plan.actor(r.producer).rank != rank}
        self.firings = sum(a.rate for a in mine)  # in an iteration
        self.results = frozenset(t.index for a in mine for t in a.targets if isinstance(t, ToResult))
        self.inputs = frozenset(o.name for a in mine for o in a.operands if isinstance(o, OfInput))
        self.scalars = frozenset(o.name for a in mine for o in a.operands if isinstance(o, OfScalar))

    def check(self, inputs: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        """Raise CallError that names an argument which the plan needs on this rank and the call lacks."""
        missing = sorted((self.inputs - inputs.keys()) | (self.scalars - scalars.keys()))
        if missing:
            raise CallError(
                f"rank {self._rank}: a call of plan {self.plan.name!r} came without {', '.join(missing)}; "
                f"expected inputs {sorted(self.inputs)} and scalars {sorted(self.scalars)}"
            )

    def expect(self, peer: int, ready: Ready) -> None:
        """Raise PlanError unless what a peer announces is what the plan says."""
        where = f"plan {self.plan.name!r}: rank {peer} announces"
        source = self.sources.get(ready.register)
        if source is None or source.rank != peer:
            raise PlanError(f"{where} register {ready.register}, which it does not fill on rank {self._rank}")
        slots = self.slots[ready.register]
        sizes = None if ready.payload is None else [len(p) for p in ready.payload]
        if ready.nbytes != slots.nbytes or (sizes is not None and sizes != [t.nbytes for t in slots.specs]):
            tensors = ", ".join(f"{t.dtype}{list(t.shape)}" for t in slots.specs)
            raise PlanError(
                f"{where} {ready.nbytes} bytes for register {ready.register} on rank {self._rank}, "
                f"filled by {source.name}; the plan says {slots.nbytes} bytes: {tensors}"
            )

    def plane_of(self, register: int) -> DataPlane:
        """The data plane that fills a register of this rank from another one."""
        comm = self.sources[register].comm
        assert comm is not None
        return self._plane(self.sources[register], comm)

    def _unit(self, actor: Actor) -> Unit:
        where = f"plan {self.plan.name!r}, rank {self._rank}, actor {actor.name}"
        reads = self.plan.inputs_of[actor.id]
        writes = self.plan.outputs_of[actor.id]
        taken = [(at, self.slots[r.id]) for at, r in enumerate(reads) if r.tensors]
        box = {slots.id: i for i, (_, slots) in enumerate(taken)}
        comm = actor.comm
        send = comm is not None and comm.kind == "send"
        body = None if actor.body is None else self.plan.bodies[actor.body]
        if comm is not None and body is not None:
            raise PlanError(f"{where}: it has a body and a communication; one of them was expected")
        operands = self._in_order(actor, writes, where) if send else actor.operands
        inside = send and comm is not None and (comm.plane == INLINE or not operands)  # travels in the message
        return Unit(
            actor=actor,
            rate=actor.rate,
            finished=Finished(actor.id),
            inline=comm is None or (inside and self._device.type == "cpu"),
            body=body,
            kernel=None if body is None else self._kernels.kernel(body),
            reads=tuple(taken),
            outer=any(not isinstance(o, FromRegister) for o in operands),
            operands=tuple(self._operand(o, box, where) for o in operands),
            stores=() if send else tuple(self._store(actor, at, r, where) for at, r in enumerate(writes) if r.tensors),
            variables=tuple(
                (i, self._known(t.name, where)) for i, t in enumerate(actor.targets) if isinstance(t, OfVariable)
            ),
            results=tuple(
                (i, t.index, self._shared(actor, i)) for i, t in enumerate(actor.targets) if isinstance(t, ToResult)
            ),
            comm=comm,
            plane=None if comm is None or inside else self._plane(actor, comm),
            specs=() if comm is None or send else tuple(self._spec(actor, i) for i in range(len(actor.targets))),
            sent=(0, writes[0].id) if send else None,
        )

    def _in_order(self, actor: Actor, writes: tuple[Register, ...], where: str) -> tuple[Operand, ...]:
        """The operands of a send in the order of the register that they fill on the other rank."""
        filled = dict(zip(actor.targets, actor.operands, strict=True))
        wanted = [FromRegister(r.id, i) for r in writes for i in range(len(r.tensors))]
        if len(writes) != 1 or writes[0].fill != 1 or filled.keys() != set(wanted):
            raise PlanError(f"{where}: a send fills one register, one token with each firing; it fills {len(writes)}")
        return tuple(filled[target] for target in wanted)

    def _operand(self, operand: Operand, box: Mapping[int, int], where: str) -> tuple[int, int | str]:
        outer = len(box)
        match operand:
            case FromRegister(register, index):
                return box[register], index
            case OfVariable(name) if name in self.constants:
                return outer + 1, name
            case OfVariable(name):
                return outer, self._known(name, where)
            case OfInput(name):
                return outer + 2, name
            case OfScalar(name):
                return outer + 3, name
            case OfPiece():
                return outer + 4, 0

    def _known(self, name: str, where: str) -> str:
        if name not in self._variables:
            raise PlanError(f"{where}: variable {name!r} is not on this rank; it holds {len(self._variables)} others")
        return name

    def _store(self, actor: Actor, at: int, register: Register, where: str) -> Store:
        filled = {
            t.index: i for i, t in enumerate(actor.targets) if isinstance(t, FromRegister) and t.register == register.id
        }
        if sorted(filled) != list(range(len(register.tensors))):
            raise PlanError(
                f"{where}: it fills tensors {sorted(filled)} of the {len(register.tensors)} of register {register.id}"
            )
        outputs = tuple(filled[i] for i in range(len(register.tensors)))
        return Store(at, self.slots[register.id], outputs, outputs == tuple(range(len(actor.targets))))

    def _shared(self, actor: Actor, target: int) -> bool:
        """Whether a result may be held by others as well."""
        if actor.body is not None:
            return True
        operand = actor.operands[target]
        owned = isinstance(operand, FromRegister) and self.slots[operand.register].owns
        return not owned or actor.operands.count(operand) > 1

    def _spec(self, actor: Actor, target: int) -> TensorSpec:
        found = actor.targets[target]
        if isinstance(found, FromRegister):
            return self.plan.register(found.register).tensors[found.index]
        if isinstance(found, OfVariable):
            tensor = self._variables[found.name]
            return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "")
        raise PlanError(
            f"plan {self.plan.name!r}, actor {actor.name}: "
            "a collective gives to registers and variables; a result was found"
        )

    def _plane(self, actor: Actor, comm: Comm) -> DataPlane:
        found = self._planes.get(comm.plane)
        if found is None:
            raise PlanError(
                f"plan {self.plan.name!r}, actor {actor.name}: data plane {comm.plane!r} was found; "
                f"this rank has {sorted(self._planes)}"
            )
        return found


def open_planes(plan: Plan, rank: int, planes: Mapping[str, DataPlane]) -> None:
    """Make the communicators that a plan needs on this rank; every rank of the plan must do so, plan by plan."""
    for name in sorted(planes):
        pairs: set[tuple[int, int]] = set()
        groups: set[tuple[int, ...]] = set()
        for actor in plan.actors:
            comm = actor.comm
            if comm is None or comm.plane != name or rank not in comm.group:
                continue
            if comm.kind == "send":
                pairs.add((comm.group[0], comm.group[1]))
            else:
                groups.add(comm.group)
        planes[name].open(sorted(pairs), sorted(groups))


def _constants(plan: Plan, device: torch.device) -> list[Tensor]:
    specs = [TensorSpec(c.shape, c.dtype, "B") for c in plan.constants]
    for constant, spec in zip(plan.constants, specs, strict=True):
        if constant.dtype not in ITEM_BYTES or len(constant.data) != spec.nbytes:
            raise PlanError(
                f"plan {plan.name!r}: constant {constant.name!r} has {len(constant.data)} bytes "
                f"for {constant.dtype}{list(constant.shape)}"
            )
    return decode([c.data for c in plan.constants], specs, device)
