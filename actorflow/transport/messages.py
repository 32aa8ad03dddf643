"""The messages between ranks while a plan runs, and the interfaces of transports, sockets and data planes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from actorflow_compiler.plan.plan import Collective, TensorSpec


@dataclass(frozen=True, slots=True)
class Ready:
    """Announces a token of a register, whose tensors are inside the message or follow on the data plane."""

    plan: int  # number of the plan in this run, the same on all ranks
    register: int
    sequence: int  # number of the token since the plan was installed
    nbytes: int  # of all its tensors; checked against the plan before data moves
    payload: tuple[bytes, ...] | None  # the bytes of each tensor if the plane is "inline", else None


@dataclass(frozen=True, slots=True)
class Credit:
    """A slot of a register is free again."""

    plan: int
    register: int


@dataclass(frozen=True, slots=True)
class Filled:
    """Announces a token that lies complete in its slot in shared memory."""

    plan: int
    register: int
    sequence: int  # number of the token since the plan was installed; it is in slot sequence mod slots


@dataclass(frozen=True, slots=True)
class Region:
    """Hands over shared memory that the sender fills: for registers of a plan, or for the collectives of a group.

    The first is for the slots of all registers that the sender fills on the receiver, the second is the same for all
    ranks of the group.  It is sent before the first message about what lies in it, and only over a transport that can
    carry file descriptors.
    """

    plan: int
    nbytes: int  # of the whole region; checked against the plan, or against the memory's size
    descriptor: int  # file descriptor of the memory; the receiver of the message closes it
    group: int = -1  # id of the first collective of the group; -1: it is for registers


@dataclass(frozen=True, slots=True)
class Contributed:
    """The sender has done its part of a step of the collectives of a group, which its memory shows now."""

    plan: int
    group: int  # id of the first collective of the group
    step: int  # number of the step since the plan was installed; every rank of the group counts the same steps


@dataclass(frozen=True, slots=True)
class Stamp:
    """Says that the sender has made a call; it comes before what the sender sends in this call."""

    call: int  # number of the call, the same on all ranks
    history: int  # 64-bit digest of all that the sender's script has done in common with others, up to the call


Message = Ready | Credit | Filled | Region | Contributed | Stamp


class Transport(Protocol):
    """Carries messages to peers.

    Incoming messages are passed to ``Worker.deliver`` on any thread, or are read from a ``Line``.
    """

    def send(self, peer: int, message: Message) -> None:
        """Queue a message and return at once.  For any thread; messages to one peer stay in order."""


class Line(Protocol):
    """A socket to one peer whose messages the worker reads itself (``Worker.attach``)."""

    peer: int
    unsent: bool  # messages are queued: call ``flush``
    stuck: bool  # the socket's buffer is full: call ``flush`` again when the socket is writable
    ended: bool  # the peer has closed the socket or died

    def fileno(self) -> int:
        """The file descriptor, which is readable when messages are there or the peer has closed the socket."""

    def own(self) -> None:
        """Make the calling thread the owner, which receives; messages that it sends wait for its next ``flush``."""

    def receive(self) -> list[Message]:
        """The messages that have come, in order; never blocks.  Raises ClusterError for bytes that are no message."""

    def flush(self) -> None:
        """Send queued messages.  Never blocks; it is no error if the peer is gone."""


class DataPlane(Protocol):
    """Moves tensors between ranks.

    ``send``, ``receive`` and ``collective`` may block, so they run on queue threads.
    """

    def open(self, peers: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """Make the communicators for directed pairs (from, to) and collective groups, in this order on every rank.

        Communicators that exist already are kept.  All pairs and groups include this rank.
        """

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors to a rank; its receives from this rank match these sends in order."""

    def receive(self, source: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Receive the next tensors that a rank sends."""

    def collective(self, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Take part in a collective and return this rank's outputs, shaped as ``specs``; inputs are not changed."""

    def explain(self) -> str:
        """The operation under way that is not visible from the calling threads, as text; empty if there is none."""

    def close(self) -> None:
        """End the plane: blocked calls fail if the backend can interrupt them.  No call may follow."""
