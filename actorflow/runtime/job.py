"""One rank's part of a plan enters; what fires its actors leaves: kernels, slots, operands and targets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.devices import Device, Queue
from actorflow.runtime.bodies.adding import adding, products
from actorflow.runtime.bodies.kernels import Kernel, Kernels
from actorflow.runtime.bodies.prepare import prepare
from actorflow.runtime.bodies.run import Run, Runs
from actorflow.runtime.call import Call
from actorflow.runtime.collective_order import calls
from actorflow.runtime.slots import Slots, of_one_firing
from actorflow.runtime.stream_events import Passage, Trails, barrier
from actorflow.transport.messages import DataPlane, Filled, Ready, Region
from actorflow.transport.shared import Room, make_region, map_region, region_bytes, rooms_of
from actorflow.transport.small_tensors import decode
from actorflow_compiler.core.errors import CallError, ClusterError, PlanError
from actorflow_compiler.core.ops import ITEM_BYTES, Symbol
from actorflow_compiler.plan.modes import MODES, Mode
from actorflow_compiler.plan.plan import (
    ORDERED,
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
    Plane,
    Register,
    Send,
    TensorSpec,
    ToResult,
)
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler.machine import ActorFinished, Machine

UNDONE = 1 << 20  # bytes; the values of larger variables are not kept while a call changes them
QUICK = 1 << 20  # bytes; up to here the compute thread copies a token itself, as a hand-over costs more


@dataclass(frozen=True, slots=True)
class Store:
    """How an actor's outputs fill one register of this rank."""

    at: int  # position in the writes of a firing
    slots: Slots
    outputs: tuple[int, ...]  # output number of each tensor
    all: bool  # the outputs are the token, as they come
    summed: tuple[int, ...]  # places in the token of sums that the actor itself adds to, see ``Adding``


@dataclass(frozen=True, slots=True)
class Adding:
    """How an actor fires when its sums are begun: they are its last operands, store by store."""

    kernel: Kernel
    stores: tuple[Store, ...]

    def sums(self) -> list[Tensor]:
        """These operands; empty when the firing is the first of its tokens."""
        return [tensor for store in self.stores for tensor in store.slots.sums(store.summed)]


@dataclass(frozen=True, slots=True)
class Unit:
    """An actor, ready to fire.

    An operand is ``boxes[box][key]``.  The boxes are the tokens of ``reads``, then, where ``outer``:
    variables, constants, the call's inputs, its scalars, and the piece.
    """

    actor: Actor
    rate: int
    finished: ActorFinished
    inline: bool  # fires on the compute thread
    passage: Passage | None  # how it is ordered with others on a device that runs ahead
    body: Body | None
    kernel: Kernel | None
    run: Run | None  # what fires the body instead of the kernel, where its plan does not run bodies op by op
    adding: Adding | None
    reads: tuple[tuple[int, Slots], ...]  # (position in the reads of a firing, register)
    outer: bool
    operands: tuple[tuple[int, int | str], ...]  # (box, key)
    stores: tuple[Store, ...]
    variables: tuple[tuple[int, str], ...]  # (output, variable that it overwrites)
    results: tuple[tuple[int, int, bool], ...]  # (output, result, whether it must be copied)
    comm: Comm | None
    plane: DataPlane | None  # None where nothing moves, or inside the message, or through shared memory
    shared: bool  # a send that writes into the slots of the other rank
    borrows: tuple[int, ...]  # registers in shared memory whose tokens its outputs, which are kept, may be views of
    specs: tuple[TensorSpec, ...]  # of a collective's outputs
    sent: tuple[int, int] | None  # (position in the writes of a firing, register) that a send fills
    undone: tuple[str, ...]  # variables whose values before a call are kept, for the case that it is given up

    @property
    def in_turn(self) -> bool:
        """Whether it is one of the communications that all ranks issue in one order."""
        return self.plane is not None and self.comm is not None and self.comm.plane in ORDERED


class Job:
    """A plan that is installed on one rank.

    Raises PlanError where the plan cannot be run here.
    """

    def __init__(
        self,
        number: int,
        plan: Plan,
        rank: int,
        device: Device,
        kernels: Kernels,
        runs: Runs,
        planes: Mapping[str, DataPlane],
        variables: Mapping[str, Tensor],
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.number = number
        self.plan = verify(plan)
        self.machine = Machine(plan, rank)
        if constants is None:
            constants = dict(zip((c.name for c in plan.constants), _constants(plan, device.where), strict=True))
        self.constants = constants
        self.frozen = calls(self.plan, rank)  # of an iteration, those that all ranks make in one order
        self.begun = 0  # iterations
        self.calls: dict[int, Call] = {}  # by iteration; those that are under way
        self.rooms: dict[int, Room] = {}  # by register: what this rank fills, and reads, in shared memory
        self.slots: dict[int, Slots] = {r.id: Slots(r, device.where) for r in plan.registers if plan.home(r) == rank}
        self._mode = MODES[plan.mode]
        self.trails = Trails(plan, rank, device, self.slots) if device.ahead else None
        self._rank = rank
        self._device = device
        self._kernels, self._runs = kernels, runs
        self._planes = planes
        self._variables = variables
        mine = [a for a in plan.actors if a.rank == rank]
        self.units = {a.id: self._unit(a) for a in mine}
        self.queues: tuple[Queue, ...] = tuple(
            {u.passage.queue.name: u.passage.queue for u in self.units.values() if u.passage is not None}.values()
        )
        self.sources = {r.id: plan.actor(r.producer) for r in plan.registers if plan.actor(r.producer).rank != rank}
        self.firings = sum(a.rate for a in mine)  # in an iteration
        self.results = frozenset(t.index for a in mine for t in a.targets if isinstance(t, ToResult))
        self.inputs = frozenset(o.name for a in mine for o in a.operands if isinstance(o, OfInput))
        self.scalars = frozenset(o.name for a in mine for o in a.operands if isinstance(o, OfScalar))
        compiled = {u.actor.id: u.run for u in self.units.values() if u.run is not None}
        if compiled:
            prepare(plan, rank, compiled, kernels, {**variables, **constants}, device.where)

    def join(self, before: Job | None, call: Call) -> None:
        """Let a call's work on a device that runs ahead begin after that of another plan, and after its caller's."""
        if before is not None and before is not self:
            barrier(before.queues, self.queues)
        for queue in self.queues:
            queue.wait(call.start)

    def sweep(self) -> None:
        """Let go of tokens that a device which runs ahead has done with."""
        if self.trails is not None:
            self.trails.sweep()

    def changed_in(self, iteration: int, failed: Unit | None = None, step: int | None = None) -> list[str]:
        """The variables that may have changed here since an iteration began, in which ``failed`` has failed in a step.

        What a body works on in place may have changed up to that step, or anywhere where it is not known; what it puts
        into variables it puts there when it has ended.
        """
        found: set[str] = set()
        if failed is not None:
            found.update(self.plan.worked_on_by(failed.actor, None if step is None else step + 1))
        for unit in self.units.values():
            if self.machine.finished(unit.actor.id) > iteration * unit.rate:
                found |= self.plan.changed_by(unit.actor)
        return sorted(found)

    @property
    def carries(self) -> bool:
        """Whether registers carry values from one iteration to the next."""
        return any(r.initial and r.tensors for r in self.plan.registers)

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

    def lend(self) -> list[tuple[int, Region]]:
        """Make the shared memory that this rank fills: the regions, and the rank that each is for.

        Raises ClusterError where there is too little memory.
        """
        made = []
        for home in self.plan.peers(self._rank):
            registers = rooms_of(self.plan, self._rank, home)
            if registers:
                nbytes = region_bytes(registers)
                descriptor = make_region(nbytes, self._rank, home)
                self.rooms.update(map_region(descriptor, registers))
                made.append((home, Region(self.number, nbytes, descriptor)))
        return made

    def borrow(self, peer: int, region: Region) -> None:
        """Map the shared memory that a peer fills.  Raises ClusterError where it is not what the plan says."""
        try:
            self.rooms.update(map_region(region.descriptor, rooms_of(self.plan, peer, self._rank)))
        except ClusterError as e:
            raise ClusterError(f"plan {self.plan.name!r}, from rank {peer} for rank {self._rank}: {e}") from None
        finally:
            os.close(region.descriptor)

    def token(self, peer: int, filled: Filled) -> Sequence[Tensor]:
        """The token that a peer has put into its slot.  Raises PlanError where the plan knows no such register."""
        source, room = self.sources.get(filled.register), self.rooms.get(filled.register)
        if room is None or source is None or source.rank != peer:
            raise PlanError(
                f"plan {self.plan.name!r}: rank {peer} says that it has filled register {filled.register}, which it "
                f"does not share with rank {self._rank}"
            )
        return room.slots[filled.sequence % len(room.slots)]

    def plane_of(self, register: int) -> DataPlane:
        """The data plane that fills a register of this rank from another one."""
        comm = self.sources[register].comm
        assert comm is not None
        return self._plane(self.sources[register], comm)

    def _run(self, actor: Actor, body: Body | None) -> Run | None:
        """What joins or replays the body of an actor of the compute queue; None where that is not asked for."""
        if body is None or self._mode == Mode() or actor.queue != "compute":
            return None
        numbers = [i for i, o in enumerate(actor.operands) if isinstance(o, OfScalar | OfPiece)]
        return self._runs.of(body, numbers, self._mode)

    def _unit(self, actor: Actor) -> Unit:
        where = f"plan {self.plan.name!r}, rank {self._rank}, actor {actor.name}"
        reads = self.plan.inputs_of[actor.id]
        writes = self.plan.outputs_of[actor.id]
        taken = [(at, self.slots[r.id]) for at, r in enumerate(reads) if r.tensors]
        box = {slots.id: i for i, (_, slots) in enumerate(taken)}
        comm = actor.comm
        send = isinstance(comm, Send)
        body = None if actor.body is None else self.plan.bodies[actor.body]
        if comm is not None and body is not None:
            raise PlanError(f"{where}: it has a body and a communication; one of them was expected")
        operands = self._in_order(actor, writes, where) if send else actor.operands
        filled = () if send else [(at, r) for at, r in enumerate(writes) if r.tensors]
        run = self._run(actor, body)
        stores = tuple(self._store(actor, None if run else body, at, register, where) for at, register in filled)
        inside = isinstance(comm, Send) and (comm.plane == Plane.INLINE or not operands)  # travels in the message
        shared = send and comm is not None and comm.plane == Plane.SHARED and not inside
        quick = inside or (shared and writes[0].nbytes <= QUICK)
        passage = None if self.trails is None else self.trails.passage(actor, body is None or not _makes_tensors(body))
        return Unit(
            actor=actor,
            rate=actor.rate,
            finished=ActorFinished(actor.id),
            inline=(passage is None and (comm is None or quick)) or (passage is not None and passage.inline),
            passage=passage,
            body=body,
            kernel=None if body is None else self._kernels.kernel(body),
            run=run,
            adding=None if body is None or run is not None else self._adding(body, stores),
            reads=tuple(taken),
            outer=any(not isinstance(o, FromRegister) for o in operands),
            operands=tuple(self._operand(o, box, where) for o in operands),
            stores=stores,
            variables=tuple(
                (i, self._known(t.name, where)) for i, t in enumerate(actor.targets) if isinstance(t, OfVariable)
            ),
            results=tuple(
                (i, t.index, self._shared(actor, i)) for i, t in enumerate(actor.targets) if isinstance(t, ToResult)
            ),
            comm=comm,
            plane=None if comm is None or inside or shared else self._plane(actor, comm),
            shared=shared,
            borrows=tuple(s.id for _, s in taken if self._is_shared(s.id)) if stores and passage is None else (),
            specs=() if comm is None or send else tuple(self._spec(actor, i) for i in range(len(actor.targets))),
            sent=(0, writes[0].id) if send else None,
            undone=() if passage is not None else self._undone(actor),
        )

    def _undone(self, actor: Actor) -> tuple[str, ...]:
        """The small variables beside parameters and optimizers' state that an actor of several ranks' plans changes.

        One rank may have changed its part of them when a call fails on another one.
        """
        if self.plan.world == 1:
            return ()
        listed = {v.name: v for v in self.plan.variables if v.kind in ("buffer", "tensor")}
        changed = sorted(self.plan.changed_by(actor) & listed.keys())
        return tuple(name for name in changed if self._variables[name].nbytes <= UNDONE)

    def _is_shared(self, register: int) -> bool:
        comm = self.plan.actor(self.plan.register(register).producer).comm
        return comm is not None and comm.plane == Plane.SHARED

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

    def _store(self, actor: Actor, body: Body | None, at: int, register: Register, where: str) -> Store:
        filled = {
            t.index: i for i, t in enumerate(actor.targets) if isinstance(t, FromRegister) and t.register == register.id
        }
        if sorted(filled) != list(range(len(register.tensors))):
            raise PlanError(
                f"{where}: it fills tensors {sorted(filled)} of the {len(register.tensors)} of register {register.id}"
            )
        outputs = tuple(filled[i] for i in range(len(register.tensors)))
        summed: tuple[int, ...] = ()
        if body is not None and register.fill == actor.rate > 1:
            sums = [output for output, spec in zip(outputs, register.tensors, strict=True) if spec.combine == "sum"]
            summed = tuple(outputs.index(output) for output in products(body, sums))
        return Store(at, self.slots[register.id], outputs, outputs == tuple(range(len(actor.targets))), summed)

    def _adding(self, body: Body, stores: Sequence[Store]) -> Adding | None:
        sums = [store.outputs[i] for store in stores for i in store.summed]
        return Adding(self._kernels.kernel(adding(body, sums)), tuple(stores)) if sums else None

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
            register = self.plan.register(found.register)
            return of_one_firing(register.tensors[found.index], register.fill)
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
                f"plan {self.plan.name!r}, actor {actor.name}: data plane {comm.plane.value!r} was found; "
                f"this rank has {sorted(map(str, self._planes))}"
            )
        return found


def _makes_tensors(body: Body) -> bool:
    """Whether a body makes tensors on the device of a rank, wherever its operands lie."""
    args = [(*step.args, *(value for _, value in step.kwargs)) for step in body.steps]
    return any(isinstance(arg, Symbol) and arg.text.startswith("device:") for some in args for arg in some)


def open_planes(plan: Plan, rank: int, planes: Mapping[str, DataPlane]) -> None:
    """Make the communicators that a plan needs on this rank; every rank of the plan must do so, plan by plan."""
    for name in sorted(planes):
        pairs: set[tuple[int, int]] = set()
        groups: set[tuple[int, ...]] = set()
        for actor in plan.actors:
            comm = actor.comm
            if comm is None or comm.plane != name or rank not in comm.ranks:
                continue
            if isinstance(comm, Send):
                pairs.add(comm.ranks)
            else:
                groups.add(comm.ranks)
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
