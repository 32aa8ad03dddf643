"""Build the units that fire the actors of one rank: find their kernels, data planes, slots, operands and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from actorflow.devices import Device
from actorflow.runtime.actor_units import (
    ActorUnit,
    CollectiveUnit,
    ComputeUnit,
    InlineSendUnit,
    PassThroughUnit,
    PlaneSendUnit,
    RegisterStore,
    SharedCollectiveUnit,
    SharedSendUnit,
    SummingKernel,
)
from actorflow.runtime.bodies.adding import adding, products
from actorflow.runtime.bodies.kernels import Kernels
from actorflow.runtime.bodies.run import BodyCompiler, BodyRunner
from actorflow.runtime.slots import Slots, of_one_firing
from actorflow.runtime.source_kernel import SourceKernel
from actorflow.runtime.stream_events import StreamEvents
from actorflow.transport.contributions import contribution
from actorflow.transport.messages import DataPlane
from actorflow.transport.shared import SharedSlots
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import FEW_BITS, Symbol
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import (
    ORDERED,
    SUM,
    Actor,
    ActorKind,
    Body,
    Collective,
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
    VariableKind,
)
from actorflow_compiler.plan.stamping import stamps_before
from actorflow_scheduler.machine import ActorFinished

__all__ = ["UnitBuilder", "plane_of"]

UNDONE = 1 << 20  # bytes; old values of larger variables are not kept, so a call that changed one cannot be given up
QUICK = 1 << 20  # bytes; the compute thread copies tokens up to this size itself, as handing over would cost more


class UnitBuilder:
    """Builds the units of a plan that is being installed as plan ``number``.

    ``shared`` is the memory shared with other ranks, by register; the caller may fill it after the units are built.
    All methods raise PlanError if the plan cannot run here.
    """

    def __init__(
        self,
        number: int,
        plan: Plan,
        rank: int,
        device: Device,
        slots: Mapping[int, Slots],
        stream_events: StreamEvents,
        kernels: Kernels,
        runs: BodyCompiler,
        planes: Mapping[str, DataPlane],
        variables: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        shared: Mapping[int, SharedSlots],
    ) -> None:
        self._number, self._plan, self._rank, self._device = number, plan, rank, device
        self._slots, self._stream_events = slots, stream_events
        self._kernels, self._runs, self._mode = kernels, runs, plan.mode
        self._planes, self._variables, self._constants, self._shared = planes, variables, constants, shared

    def unit(self, actor: Actor) -> ActorUnit:
        """The unit of one actor."""
        if actor.comm is not None and actor.body is not None:
            raise PlanError(f"{self._where(actor)}: it has a body and a communication; one of them was expected")
        match actor.comm:
            case Send() as send:
                return self._send(actor, send)
            case Collective() as collective:
                return self._collective(actor, collective)
            case None if actor.body is not None:
                return self._compute(actor, self._plan.bodies[actor.body])
            case None:
                return PassThroughUnit(**self._common(actor, actor.operands, self._stores(actor, None)))

    # ---- one method for each way to fire

    def _compute(self, actor: Actor, body: Body) -> ComputeUnit:
        run = self._run(actor, body)
        stores = self._stores(actor, None if run else body)
        common = self._common(actor, actor.operands, stores, host=not _makes_tensors(body))
        if actor.kind == ActorKind.SOURCE:
            names = [o.name if isinstance(o, OfInput) else "" for o in actor.operands]
            common["operands"] += ((len(common["reads"]) + 4, 1),)
            return ComputeUnit(body=body, execute=SourceKernel(self._kernels, body, names), **common)
        kernel = self._kernels.kernel(body)
        sums = [store.outputs[i] for store in stores for i in store.summed]
        if run is not None:
            return ComputeUnit(body=body, execute=run, **common)
        if sums:
            summing = SummingKernel(kernel, self._kernels.kernel(adding(body, sums)), stores)
            return ComputeUnit(body=body, execute=summing, **common)
        return ComputeUnit(body=body, execute=kernel, **common)

    def _send(self, actor: Actor, send: Send) -> InlineSendUnit | SharedSendUnit | PlaneSendUnit:
        writes = self._plan.outputs_of[actor.id]
        operands = self._in_order(actor, writes)
        inline = send.plane == Plane.INLINE or not operands
        shared = send.plane == Plane.SHARED and not inline
        quick = inline or (shared and writes[0].nbytes <= QUICK)
        common = self._common(actor, operands, (), quick=quick)
        common |= {"plan": self._number, "to_rank": send.to_rank, "register": writes[0].id}
        if inline:
            return InlineSendUnit(**common)
        if shared:
            return SharedSendUnit(memory=self._shared, **common)
        plane = plane_of(self._planes, self._plan, actor, send)
        return PlaneSendUnit(plane=plane, in_order=send.plane in ORDERED, **common)

    def _collective(self, actor: Actor, collective: Collective) -> CollectiveUnit | SharedCollectiveUnit:
        specs = tuple(self._spec(actor, i) for i in range(len(actor.targets)))
        stores = self._stores(actor, None)
        agrees = stamps_before(collective, self._rank)
        if collective.plane == Plane.SHARED:
            if self._device.ahead:
                raise PlanError(
                    f"{self._where(actor)}: a collective in shared memory was found; {self._device.where} has memory "
                    "of its own"
                )
            side = contribution(collective, self._rank, specs)
            common = self._common(actor, actor.operands, stores, quick=True)
            placed = tuple((i, name) for i, name in common["variables"] if not side.exchanges[i].add)
            return SharedCollectiveUnit(comm=collective, side=side, placed=placed, agrees=agrees, **common)
        return CollectiveUnit(
            comm=collective,
            plane=plane_of(self._planes, self._plan, actor, collective),
            specs=specs,
            agrees=agrees,
            **self._common(actor, actor.operands, stores),
        )

    # ---- what the ways to fire have in common

    def _common(
        self,
        actor: Actor,
        operands: Sequence[Operand],
        stores: tuple[RegisterStore, ...],
        *,
        host: bool = True,
        quick: bool = False,
    ) -> dict[str, Any]:
        """The fields of ``ActorUnit``.

        ``host``: its body can also run on tensors in host memory.  ``quick``: a communication that does not block the
        compute thread for long if its operands lie in host memory.
        """
        taken = [(at, self._slots[r.id]) for at, r in enumerate(self._plan.inputs_of[actor.id]) if r.tensors]
        box = {slots.id: i for i, (_, slots) in enumerate(taken)}
        stream = self._stream_events.actor_stream(actor, host)
        blocks = stream.prepares if actor.comm is None else self._device.ahead or not quick
        borrowed = tuple(slots.id for _, slots in taken if self._in_shared_memory(slots.id))
        return {
            "actor": actor,
            "rate": actor.rate,
            "finished": ActorFinished(actor.id),
            "inline": not blocks,
            "stream": stream,
            "reads": tuple(taken),
            "outer": any(not isinstance(o, FromRegister) for o in operands),
            "inputs": tuple(o.name for o in operands if isinstance(o, OfInput)),
            "operands": tuple(self._operand(actor, o, box) for o in operands),
            "stores": stores,
            "variables": tuple(
                (i, self._known(actor, t.name)) for i, t in enumerate(actor.targets) if isinstance(t, OfVariable)
            ),
            "results": tuple(
                (i, t.index, self._must_copy(actor, i)) for i, t in enumerate(actor.targets) if isinstance(t, ToResult)
            ),
            # a device with its own memory reads copies of these tokens, and learns too late that a call has failed
            "borrows": borrowed if stores and not self._device.ahead else (),
            "changes": self._plan.changed_by(actor),
            "undone": () if self._device.ahead else self._undone(actor),
        }

    def _stores(self, actor: Actor, body: Body | None) -> tuple[RegisterStore, ...]:
        """The registers that an actor's outputs fill; with a ``body``, its kernel may add to sums itself."""
        writes = enumerate(self._plan.outputs_of[actor.id])
        return tuple(self._store(actor, body, at, register) for at, register in writes if register.tensors)

    def _store(self, actor: Actor, body: Body | None, at: int, register: Register) -> RegisterStore:
        filled = {
            t.index: i for i, t in enumerate(actor.targets) if isinstance(t, FromRegister) and t.register == register.id
        }
        if sorted(filled) != list(range(len(register.tensors))):
            raise PlanError(
                f"{self._where(actor)}: it fills tensors {sorted(filled)} of the {len(register.tensors)} of register "
                f"{register.id}"
            )
        outputs = tuple(filled[i] for i in range(len(register.tensors)))
        summed: tuple[int, ...] = ()
        if body is not None and register.fill == actor.rate > 1:
            sums = [
                output
                for output, spec in zip(outputs, register.tensors, strict=True)
                if spec.combine == SUM and spec.dtype not in FEW_BITS
            ]
            summed = tuple(outputs.index(output) for output in products(body, sums))
        return RegisterStore(at, self._slots[register.id], outputs, outputs == tuple(range(len(actor.targets))), summed)

    def _operand(self, actor: Actor, operand: Operand, box: Mapping[int, int]) -> tuple[int, int | str]:
        outer = len(box)
        match operand:
            case FromRegister(register, index):
                return box[register], index
            case OfVariable(name) if name in self._constants:
                return outer + 1, name
            case OfVariable(name):
                return outer, self._known(actor, name)
            case OfInput(name):
                return outer + 2, name
            case OfScalar(name):
                return outer + 3, name
            case OfPiece():
                return outer + 4, 0

    def _known(self, actor: Actor, name: str) -> str:
        if name not in self._variables:
            raise PlanError(
                f"{self._where(actor)}: variable {name!r} is not on this rank; it holds {len(self._variables)} others"
            )
        return name

    def _must_copy(self, actor: Actor, target: int) -> bool:
        """Whether a result may share memory with a register or variable, so that it must be copied."""
        if actor.body is not None:
            return True
        operand = actor.operands[target]
        owned = isinstance(operand, FromRegister) and self._slots[operand.register].owns
        return not owned or actor.operands.count(operand) > 1

    def _undone(self, actor: Actor) -> tuple[str, ...]:
        """The small buffers and other tensors, but not parameters or optimizer state, that an actor changes.

        Empty in a plan for one rank.  With several ranks, one may have changed them when the call fails on another.
        """
        if self._plan.world == 1:
            return ()
        listed = {v.name: v for v in self._plan.variables if v.kind in (VariableKind.BUFFER, VariableKind.TENSOR)}
        changed = sorted(self._plan.changed_by(actor) & listed.keys())
        return tuple(name for name in changed if self._variables[name].nbytes <= UNDONE)

    def _in_shared_memory(self, register: int) -> bool:
        comm = self._plan.actor(self._plan.register(register).producer).comm
        return isinstance(comm, Send) and comm.plane == Plane.SHARED

    # ---- helpers of single ways to fire

    def _run(self, actor: Actor, body: Body) -> BodyRunner | None:
        """The runner of a body that is compiled or captured; None if its ops run one by one."""
        if self._mode is Mode.EAGER or actor.queue != "compute":
            return None
        numbers = [i for i, o in enumerate(actor.operands) if isinstance(o, OfScalar | OfPiece)]
        return self._runs.of(body, numbers, self._mode)

    def _in_order(self, actor: Actor, writes: tuple[Register, ...]) -> tuple[Operand, ...]:
        """The operands of a send, in the order of the tensors of the register that they fill on the other rank."""
        filled = dict(zip(actor.targets, actor.operands, strict=True))
        wanted = [FromRegister(r.id, i) for r in writes for i in range(len(r.tensors))]
        if len(writes) != 1 or writes[0].fill != 1 or filled.keys() != set(wanted):
            raise PlanError(
                f"{self._where(actor)}: a send fills one register, one token with each firing; it fills {len(writes)}"
            )
        return tuple(filled[target] for target in wanted)

    def _spec(self, actor: Actor, target: int) -> TensorSpec:
        """The shape and dtype of a collective's output for one of its targets."""
        found = actor.targets[target]
        if isinstance(found, FromRegister):
            register = self._plan.register(found.register)
            return of_one_firing(register.tensors[found.index], register.fill)
        if isinstance(found, OfVariable):
            tensor = self._variables[found.name]
            return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "")
        raise PlanError(
            f"plan {self._plan.name!r}, actor {actor.name}: "
            "a collective gives to registers and variables; a result was found"
        )

    def _where(self, actor: Actor) -> str:
        return f"plan {self._plan.name!r}, rank {self._rank}, actor {actor.name}"


def plane_of(planes: Mapping[str, DataPlane], plan: Plan, actor: Actor, comm: Comm) -> DataPlane:
    """The data plane of a communication.  Raises PlanError if this rank does not have it."""
    found = planes.get(comm.plane)
    if found is None:
        raise PlanError(
            f"plan {plan.name!r}, actor {actor.name}: data plane {str(comm.plane)!r} was found; "
            f"this rank has {sorted(map(str, planes))}"
        )
    return found


def _makes_tensors(body: Body) -> bool:
    """Whether a body has a step that makes a tensor on the rank's device, wherever its operands lie."""
    args = [(*step.args, *(value for _, value in step.kwargs)) for step in body.steps]
    return any(isinstance(arg, Symbol) and arg.text.startswith("device:") for some in args for arg in some)
