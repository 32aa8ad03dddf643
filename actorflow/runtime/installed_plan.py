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
from actorflow.transport.contributions import Contribution
from actorflow.transport.messages import DataPlane, Filled, Ready, Region
from actorflow.transport.shared import SharedSlots, make_region, map_region, region_bytes, shared_registers
from actorflow.transport.small_tensors import decode
from actorflow_compiler.core.errors import CallError, ClusterError, PlanError
from actorflow_compiler.core.ops import ITEM_BYTES
from actorflow_compiler.plan.plan import OfInput, OfScalar, Plan, Send, TensorSpec, ToResult
from actorflow_compiler.plan.stamping import stamps_from, stamps_to
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler.machine import Machine

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
        when a body has ended.
        """
        found: set[str] = set()
        if failed is not None:
            found.update(self.plan.worked_on_by(failed.actor, None if step is None else step + 1))
        for unit in self.units.values():
            if self.machine.finished(unit.actor.id) > iteration * unit.rate:
                found |= self.plan.changed_by(unit.actor)
        return sorted(found)

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
        """Raise PlanError unless the token that a peer announces has the register and the sizes of the plan."""
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
        """Map the shared memory that a peer fills.  Raises ClusterError if it does not have the plan's size."""
        try:
            if region.group >= 0:
                self.group(peer, region.group).memory.take(peer, region.descriptor, region.nbytes)
                return
            self.shared.update(map_region(region.descriptor, shared_registers(self.plan, peer, self._rank)))
        except ClusterError as e:
            raise ClusterError(f"plan {self.plan.name!r}, from rank {peer} for rank {self._rank}: {e}") from None
        finally:
            os.close(region.descriptor)

    def group(self, peer: int, number: int) -> GroupProgress:
        """The group of that number; PlanError if a peer that names it is not in it."""
        found = self.groups.get(number)
        if found is None or peer not in found.others:
            raise PlanError(
                f"plan {self.plan.name!r}: rank {peer} takes part in collectives of group {number}, in which rank "
                f"{self._rank} does not"
            )
        return found

    def token(self, peer: int, filled: Filled) -> Sequence[Tensor]:
        """The token in shared memory that a peer has announced; PlanError if the peer shares no such register."""
        source, shared = self.sources.get(filled.register), self.shared.get(filled.register)
        if shared is None or source is None or source.rank != peer:
            raise PlanError(
                f"plan {self.plan.name!r}: rank {peer} says that it has filled register {filled.register}, which it "
                f"does not share with rank {self._rank}"
            )
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
