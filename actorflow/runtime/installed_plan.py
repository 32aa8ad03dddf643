"""A plan that is installed on one rank: its slots, its units, the calls under way, and the memory shared with peers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from actorflow.devices import Device
from actorflow.runtime.actor_units import ActorUnit, ComputeUnit, SharedCollectiveUnit
from actorflow.runtime.bodies.kernels import Kernels
from actorflow.runtime.bodies.prepare import prepare
from actorflow.runtime.bodies.run import BodyCompiler, BodyRunner
from actorflow.runtime.call import Call
from actorflow.runtime.collective_order import nccl_calls
from actorflow.runtime.group_progress import GroupProgress
from actorflow.runtime.slots import Slots
from actorflow.runtime.stream_events import StreamEvents, barrier
from actorflow.runtime.unit_builder import UnitBuilder, plane_of
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.transport.contributions import Contribution
from actorflow.transport.messages import DataPlane, Filled, Ready, Region
from actorflow.transport.shared import SharedSlots, make_region, map_region, region_bytes, shared_registers
from actorflow.transport.small_tensors import decode
from actorflow_compiler.core.errors import CallError, ClusterError, PlanError
from actorflow_compiler.core.ops import ITEM_BYTES
from actorflow_compiler.plan.plan import OfInput, OfScalar, Plan, Plane, Send, TensorSpec, ToResult
from actorflow_compiler.plan.stamping import stamps_from, stamps_to
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler.machine import CreditReturned, Fire, IllegalEvent, Instruction, Machine, TokenArrived

__all__ = ["InstalledPlan", "open_planes"]


class InstalledPlan:
    """A plan that is installed on one rank.

    The constructor raises PlanError if the plan cannot run here.
    """

    def __init__(
        self,
        number: int,
        plan: Plan,
        rank: int,
        device: Device,
        kernels: Kernels,
        runs: BodyCompiler,
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
        self.nccl_calls = nccl_calls(self.plan, rank)  # of one iteration
        self.stamps_to = stamps_to(plan, rank)
        # the ranks whose stamps must be here before a call begins: NCCL receives without a message that comes first
        self.stamps_first = stamps_from(plan, rank) if self.nccl_calls else ()
        self.changing: dict[int, int] = {}  # actor → the last call, as all ranks count, in which it changed variables
        self.begun = 0  # number of iterations that have begun
        self.calls: dict[int, Call] = {}  # the calls under way, by iteration
        self.shared: dict[int, SharedSlots] = {}  # by register: slots in shared memory that this rank fills or reads
        self.slots: dict[int, Slots] = {r.id: Slots(r, device.where) for r in plan.registers if plan.home(r) == rank}
        self.stream_events = StreamEvents(plan, rank, device, self.slots)
        self._rank = rank
        self._planes = planes
        builder = UnitBuilder(
            number, plan, rank, device, self.slots, self.stream_events, kernels, runs, planes, variables, constants,
            self.shared,
        )  # fmt: skip
        mine = [a for a in plan.actors if a.rank == rank]
        self.units = {a.id: builder.unit(a) for a in mine}
        self.groups = {group.id: group for group in _groups(self.units.values(), rank)}
        self.group_of = {id: group for group in self.groups.values() for id in group.actors}  # by actor
        self.queues = tuple({u.stream.queue.name: u.stream.queue for u in self.units.values()}.values())
        self.sources = {r.id: plan.actor(r.producer) for r in plan.registers if plan.actor(r.producer).rank != rank}
        # of registers that other ranks fill: the token that must arrive next, and that must be announced next
        self.due = {r.id: r.initial for r in plan.registers if r.id in self.sources}
        self._announced = dict(self.due)  # for the thread that receives from the rank
        # the rank that reads a register, of those that this one fills on others
        self.homes = {r.id: plan.home(r) for r in plan.registers if r.id not in self.sources and plan.home(r) != rank}
        self._borrowed: set[tuple[int, int]] = set()  # (rank, group) from which shared memory has come
        self.firings = sum(a.rate for a in mine)  # of this rank in an iteration
        self.results = frozenset(t.index for a in mine for t in a.targets if isinstance(t, ToResult))
        self.inputs = frozenset(o.name for a in mine for o in a.operands if isinstance(o, OfInput))
        self.scalars = frozenset(o.name for a in mine for o in a.operands if isinstance(o, OfScalar))
        compiled = {
            id: unit.execute
            for id, unit in self.units.items()
            if isinstance(unit, ComputeUnit) and isinstance(unit.execute, BodyRunner)
        }
        if compiled:
            prepare(plan, rank, compiled, kernels, {**variables, **constants}, device.where)

    def join(self, before: InstalledPlan | None, call: Call) -> None:
        """Make the device's queues wait, before a call's work, for the work of plan ``before`` and of the caller."""
        if before is not None and before is not self:
            barrier(before.queues, self.queues)
        for queue in self.queues:
            queue.wait(call.start)

    def changed_in(self, iteration: int, failed: ActorUnit | None = None, step: int | None = None) -> list[str]:
        """The variables that actors of this rank may have changed since an iteration began, sorted by name.

        ``failed`` is the unit that failed in it, if any, at ``step`` of its body (None: unknown).  Of that body, only
        changes in place up to the step count, or all of them if the step is unknown: outputs are written to variables
        when a body has ended.  Collectives that are under way may have written parts of their outputs to variables.
        """
        found: set[str] = set()
        if failed is not None:
            found.update(self.plan.worked_on_by(failed.actor, None if step is None else step + 1))
        for unit in self.units.values():
            if self.machine.finished(unit.actor.id) > iteration * unit.rate:
                found |= self.plan.changed_by(unit.actor)
        for unit, fire in self._meeting():
            if fire.firing >= iteration * unit.rate and self.group_of[unit.actor.id].placing:
                found.update(name for _, name in unit.placed)
        return sorted(found)

    def spare(self, call: int) -> None:
        """Have collectives that a call has begun write no more into variables: it will be given up, or end the run."""
        for unit, fire in self._meeting():
            if self.calls[fire.firing // unit.rate].number == call:
                self.group_of[unit.actor.id].spare()

    def _meeting(self) -> list[tuple[SharedCollectiveUnit, Fire]]:
        """The collectives that are under way in shared memory."""
        under_way = [group.firing for group in self.groups.values()]
        return [(unit, fire) for unit, fire, _ in filter(None, under_way)]

    def last_changes(self) -> Iterator[tuple[str, int]]:
        """Variables with the last call, as all ranks count, in which an actor here has changed them or begun to."""
        for id, call in tuple(self.changing.items()):
            for name in self.units[id].changes:
                yield name, call

    @property
    def carries(self) -> bool:
        """Whether registers carry values from one iteration to the next."""
        return any(r.initial and r.tensors for r in self.plan.registers)

    def check(self, inputs: Mapping[str, object], scalars: Mapping[str, float]) -> None:
        """Raise CallError, with their names, if a call lacks arguments that the plan needs on this rank."""
        missing = sorted((self.inputs - inputs.keys()) | (self.scalars - scalars.keys()))
        if missing:
            raise CallError(
                f"rank {self._rank}: a call of plan {self.plan.name!r} came without {', '.join(missing)}; "
                f"expected inputs {sorted(self.inputs)} and scalars {sorted(self.scalars)}"
            )

    def expect(self, peer: int, ready: Ready) -> None:
        """Raise MessageRefused unless a token that a peer announces has the register, way and sizes of the plan.

        A token whose tensors follow on a data plane must also be the next one, since its thread waits for them.
        """
        register, payload = ready.register, ready.payload
        source = self.sources.get(register)
        if source is None or source.rank != peer or source.comm is None:
            raise self._not_filled(peer, register)
        slots = self.slots[register]
        sizes = None if payload is None else [len(p) for p in payload]
        if ready.nbytes != slots.nbytes or (sizes is not None and sizes != [t.nbytes for t in slots.specs]):
            tensors = ", ".join(f"{t.dtype}{list(t.shape)}" for t in slots.specs)
            raise self.refused(
                RefusalReason.SIZE, peer, f"{ready.nbytes} bytes for register {register}, filled by {source.name}",
                f"{slots.nbytes} bytes: {tensors}",
            )  # fmt: skip
        plane = source.comm.plane
        inline = plane == Plane.INLINE or not slots.specs
        if inline != (payload is not None) or (plane == Plane.SHARED and not inline):
            how = "inside a message" if payload is not None else "on its way"
            raise self.refused(RefusalReason.VALUE, peer, f"a token of register {register} {how}", f"one by {plane!r}")
        if not inline:
            if ready.sequence != self._announced[register]:
                raise self._out_of_turn(peer, register, ready.sequence, self._announced[register])
            self._announced[register] += 1

    def refused(self, reason: RefusalReason, peer: int, found: str, expected: str) -> MessageRefused:
        """The error for something about this plan that a peer has sent."""
        return MessageRefused(reason, f"plan {self.plan.name!r} on rank {self._rank}: {found}", expected, peer)

    def _not_filled(self, peer: int, register: int) -> MessageRefused:
        found = f"a token of register {register}, which it does not fill on rank {self._rank}"
        mine = sorted(id for id, source in self.sources.items() if source.rank == peer)
        return self.refused(RefusalReason.NUMBER, peer, found, f"one of registers {mine[:8]}")

    def _out_of_turn(self, peer: int, register: int, sequence: int, due: int) -> MessageRefused:
        return self.refused(RefusalReason.SEQUENCE, peer, f"token {sequence} of register {register}", f"token {due}")

    def arrived(self, register: int, sequence: int) -> list[Instruction]:
        """Tell the machine that a token of another rank is here; returns what follows.

        Raises MessageRefused unless it is the next one, and its slot is free.
        """
        due = self.due[register]
        if sequence != due:
            raise self._out_of_turn(self.sources[register].rank, register, sequence, due)
        try:
            found = self.machine.handle(TokenArrived(register))
        except IllegalEvent as error:
            what = f"token {sequence} of register {register} ({error})"
            raise self.refused(RefusalReason.SLOT, self.sources[register].rank, what, "a free slot for it") from None
        self.due[register] = due + 1
        return found

    def credited(self, register: int) -> list[Instruction]:
        """Tell the machine that a slot on another rank is free again; returns what follows.

        Raises MessageRefused unless a token is in it.
        """
        try:
            return self.machine.handle(CreditReturned(register))
        except IllegalEvent as error:
            raise self.credited_too_often(self.homes[register], register, f" ({error})") from None

    def credited_too_often(self, peer: int, register: int, why: str = "") -> MessageRefused:
        """The error for a credit of a peer that has no token for it."""
        what = f"a credit for register {register}{why}"
        return self.refused(RefusalReason.SLOT, peer, what, "one for a slot with a token")

    def check_credit(self, peer: int, register: int) -> None:
        """Raise MessageRefused unless a peer has the slots of a register that this rank fills."""
        if self.homes.get(register) != peer:
            found = f"a credit for register {register}, which rank {self._rank} does not fill there"
            mine = sorted(id for id, home in self.homes.items() if home == peer)
            raise self.refused(RefusalReason.NUMBER, peer, found, f"one for registers {mine[:8]}")

    def lend(self) -> list[tuple[int, Region]]:
        """Make the shared memory that this rank fills; return pairs of the rank to send it to and the region.

        Raises ClusterError if there is too little memory.
        """
        made = []
        for home in self.plan.peers(self._rank):
            registers = shared_registers(self.plan, self._rank, home)
            if registers:
                nbytes = region_bytes(registers)
                descriptor = make_region(nbytes, self._rank, home)
                self.shared.update(map_region(descriptor, registers))
                made.append((home, Region(self.number, nbytes, descriptor)))
        for group in self.groups.values():
            made += [(r, Region(self.number, group.memory.nbytes, fd, group.id)) for r, fd in group.memory.make()]
        return made

    def borrow(self, peer: int, region: Region) -> None:
        """Map the shared memory that a peer fills.

        Raises MessageRefused if it comes again, does not have the plan's size, or is no memory that stays as it is.
        """
        try:
            group = None if region.group < 0 else self.group(peer, region.group)
            if (peer, region.group) in self._borrowed:
                raise self.refused(RefusalReason.SEQUENCE, peer, "shared memory for what has some", "memory once")
            if group is not None:
                group.memory.take(peer, region.descriptor, region.nbytes)
            else:
                registers = shared_registers(self.plan, peer, self._rank)
                if not registers or region.nbytes != region_bytes(registers):
                    size = f"shared memory of {region.nbytes} bytes was found; the plan says {region_bytes(registers)}"
                    raise ClusterError(size)
                self.shared.update(map_region(region.descriptor, registers))
            self._borrowed.add((peer, region.group))
        except MessageRefused:
            raise
        except ClusterError as e:
            raise self.refused(RefusalReason.MEMORY, peer, str(e), "the memory that the plan says") from None
        finally:
            os.close(region.descriptor)

    def group(self, peer: int, number: int) -> GroupProgress:
        """The group of that number; MessageRefused if a peer that names it is not in it."""
        found = self.groups.get(number)
        if found is None or peer not in found.others:
            what = f"a part in collectives of group {number}, in which rank {self._rank} has none with it"
            raise self.refused(RefusalReason.NUMBER, peer, what, f"one of groups {sorted(self.groups)[:8]}")
        return found

    def token(self, peer: int, filled: Filled) -> Sequence[Tensor]:
        """The token in shared memory that a peer has announced; MessageRefused if the peer shares no such register."""
        source, shared = self.sources.get(filled.register), self.shared.get(filled.register)
        if shared is None or source is None or source.rank != peer:
            what = f"the word that it has filled register {filled.register}, which it does not share"
            raise self.refused(RefusalReason.NUMBER, peer, what, "one that it shares")
        return shared.slots[filled.sequence % len(shared.slots)]

    def plane_of(self, register: int) -> DataPlane:
        """The data plane over which another rank fills a register of this one."""
        source = self.sources[register]
        assert source.comm is not None
        return plane_of(self._planes, self.plan, source, source.comm)


def _groups(units: Iterable[ActorUnit], rank: int) -> list[GroupProgress]:
    of: dict[tuple[int, ...], dict[int, Contribution]] = {}
    for unit in units:
        if isinstance(unit, SharedCollectiveUnit):
            of.setdefault(unit.comm.ranks, {})[unit.actor.id] = unit.side
    return [GroupProgress(sides, rank) for sides in of.values()]


def open_planes(plan: Plan, rank: int, planes: Mapping[str, DataPlane]) -> None:
    """Make the communicators that a plan needs on this rank.

    Every rank of the plan must call it, and all ranks for the same plans in the same order.
    """
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
