"""The ways in which an actor of this rank fires: it computes, sends, joins a collective, or passes operands through.

A unit is what a plan's actor becomes when the plan is installed (``unit_builder.py``): it knows its kernel or data
plane, where its operands come from, and where its outputs go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from actorflow.runtime.bodies.kernels import Kernel
from actorflow.runtime.slots import Slots
from actorflow.runtime.stream_events import ActorStream
from actorflow.transport.contributions import Contribution
from actorflow.transport.messages import DataPlane, Filled, Ready, Transport
from actorflow.transport.shared import SharedSlots, fill
from actorflow.transport.small_tensors import encode
from actorflow_compiler.plan.plan import ORDERED, Actor, Body, Collective, TensorSpec
from actorflow_scheduler.machine import ActorFinished, Fire

__all__ = [
    "ActorUnit",
    "CollectiveUnit",
    "ComputeUnit",
    "InlineSendUnit",
    "PassThroughUnit",
    "PlaneSendUnit",
    "SendUnit",
    "SharedCollectiveUnit",
    "SharedSendUnit",
    "RegisterStore",
    "SummingKernel",
]


@dataclass(frozen=True, slots=True)
class RegisterStore:
    """How an actor's outputs fill one register of this rank."""

    at: int  # position in the writes of a firing
    slots: Slots
    outputs: tuple[int, ...]  # output number of each tensor
    all: bool  # the token is all outputs of the actor, in order
    summed: tuple[int, ...]  # positions in the token of the sums that the actor's kernel adds to (``SummingKernel``)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorUnit:
    """An actor, ready to fire; each subclass is one way of firing.

    An operand is ``boxes[box][key]``.  The list of boxes holds the tokens of ``reads``.  If ``outer``, it goes on with
    the variables, the constants, the call's inputs, the call's scalars, and ``(piece, by rows)``: the micro-batch's
    number, and the names of the inputs of which only the rows are there that a source takes.
    """

    computes: ClassVar[bool] = False  # it runs a body, which may take long
    communicates: ClassVar[bool] = False

    actor: Actor
    rate: int  # firings per call
    finished: ActorFinished
    inline: bool  # fires on the compute thread
    stream: ActorStream  # its queue on the device, and the events that order it with others
    reads: tuple[tuple[int, Slots], ...]  # (position in the reads of a firing, register)
    outer: bool  # an operand comes from elsewhere than a register
    inputs: tuple[str, ...]  # arguments of the call among its operands
    operands: tuple[tuple[int, int | str], ...]  # (index into the list of boxes, key in that box)
    stores: tuple[RegisterStore, ...] = ()
    variables: tuple[tuple[int, str], ...] = ()  # (output, variable that it overwrites)
    results: tuple[tuple[int, int, bool], ...] = ()  # (output, result, whether it must be copied)
    borrows: tuple[int, ...] = ()  # registers read in shared memory: outputs that are views of their tokens get copied
    changes: frozenset[str] = frozenset()  # variables that it changes
    agrees: tuple[int, ...] = ()  # ranks that must have made the same call before it fires
    undone: tuple[str, ...] = ()  # those of them whose old values are kept in case the call is given up

    @property
    def ordered(self) -> bool:
        """Whether it is a communication that all ranks must launch in the same order (``collective_order.py``)."""
        return False

    def outputs(self, operands: list[Any], fire: Fire, transport: Transport) -> Sequence[Any]:
        """Fire on the calling thread and return the outputs.

        The caller has entered the queue's context.  May empty the list of operands.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class PassThroughUnit(ActorUnit):
    """A source or sink without a body: operand i goes to target i."""

    def outputs(self, operands: list[Any], fire: Fire, transport: Transport) -> Sequence[Any]:
        """See ``ActorUnit``."""
        return operands


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeUnit(ActorUnit):
    """An actor with a body."""

    computes: ClassVar[bool] = True

    body: Body
    execute: Callable[[list[Any]], Sequence[Any]]  # a ``Kernel``, a ``BodyRunner`` or a ``SummingKernel``

    def outputs(self, operands: list[Any], fire: Fire, transport: Transport) -> Sequence[Any]:
        """See ``ActorUnit``."""
        return self.execute(operands)


@dataclass(frozen=True, slots=True)
class SummingKernel:
    """Runs a body whose outputs are summed over firings: from the second firing on, its kernel adds to the sums."""

    first: Kernel
    later: Kernel  # takes the body's operands, then the sums, store by store
    stores: tuple[RegisterStore, ...]

    def __call__(self, operands: list[Any]) -> Sequence[Any]:
        """Return the outputs, to which the sums so far have been added.  Empties the list of operands."""
        sums: list[Tensor] = [tensor for store in self.stores for tensor in store.slots.sums(store.summed)]
        if not sums:  # the first firing that fills these tokens
            return self.first(operands)
        operands += sums
        del sums  # each tensor dies at its last use in the kernel
        return self.later(operands)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendUnit(ActorUnit):
    """A transfer to another rank, which fills one register there."""

    communicates: ClassVar[bool] = True

    plan: int  # the number of the installed plan
    to_rank: int
    register: int  # the only one that the actor writes


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineSendUnit(SendUnit):
    """The tensors travel inside the message that announces the token."""

    def outputs(self, operands: list[Any], fire: Fire, transport: Transport) -> Sequence[Any]:
        """See ``ActorUnit``."""
        operands = self.stream.device.to_host(operands)
        nbytes = sum(t.nbytes for t in operands)
        transport.send(self.to_rank, Ready(self.plan, self.register, fire.writes[0][1], nbytes, encode(operands)))
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSendUnit(SendUnit):
    """The tensors are copied into memory that the other rank maps; a message says that they are there."""

    memory: Mapping[int, SharedSlots]  # by register; filled when the memory is made, after this unit

    def outputs(self, operands: list[Any], fire: Fire, transport: Transport) -> Sequence[Any]:
        """See ``ActorUnit``."""
        sequence = fire.writes[0][1]
        fill(self.memory[self.register], sequence, self.stream.device.to_host(operands))
        transport.send(self.to_rank, Filled(self.plan, self.register, sequence))
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSendUnit(SendUnit):
    """The tensors go over a data plane."""

    plane: DataPlane
    in_order: bool  # the other rank posts the receive by the plan's order; if False, a message announces the token

    @property
    def ordered(self) -> bool:
        """See ``ActorUnit``."""
        return self.in_order

    def outputs(self, operands: list[Any], fire: Fire, transport: Transport) -> Sequence[Any]:
        """See ``ActorUnit``."""
        if not self.in_order:
            nbytes = sum(t.nbytes for t in operands)
            transport.send(self.to_rank, Ready(self.plan, self.register, fire.writes[0][1], nbytes, None))
        self.plane.send(self.to_rank, operands)
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUnit(ActorUnit):
    """This rank's part in a collective."""

    communicates: ClassVar[bool] = True

    comm: Collective
    plane: DataPlane
    specs: tuple[TensorSpec, ...]  # of its outputs

    @property
    def ordered(self) -> bool:
        """See ``ActorUnit``."""
        return self.comm.plane in ORDERED

    def outputs(self, operands: list[Any], fire: Fire, transport: Transport) -> Sequence[Any]:
        """See ``ActorUnit``."""
        return self.plane.collective(self.comm, operands, self.specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCollectiveUnit(ActorUnit):
    """This rank's part in a collective through memory that all of its ranks share (``group_progress.py``).

    It ends when others have done their parts, and not when it has fired.
    """

    communicates: ClassVar[bool] = True

    comm: Collective
    side: Contribution
    placed: tuple[tuple[int, str], ...]  # those of ``variables`` whose boxes are placed in them, and not added
