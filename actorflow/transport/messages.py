"""What peers tell each other while a plan runs, and the two interfaces behind which it travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from actorflow_compiler.plan.plan import Collective, TensorSpec


@dataclass(frozen=True, slots=True)
class Ready:
    """A token of a register is on its way: its payload is inside, or follows on the data plane."""

    plan: int  # number of the plan on this run, equal on all ranks
    register: int
    sequence: int  # number of the token since the plan was installed
    nbytes: int  # of all its tensors; checked against the plan before data moves
    payload: tuple[bytes, ...] | None  # one for each tensor where the plane is "inline"


@dataclass(frozen=True, slots=True)
class Credit:
    """A slot of a register is free again."""

    plan: int
    register: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A token lies in its slot in shared memory, complete."""

    plan: int
    register: int
    sequence: int  # number of the token since the plan was installed; it is in slot sequence mod slots


@dataclass(frozen=True, slots=True)
class Region:
    """Shared memory for the slots of all registers of a plan that the sender fills on the receiver.

    It comes before the first token of the plan, and only over a transport that can carry descriptors.
    """

    plan: int
    nbytes: int  # of the whole region; checked against the plan
    descriptor: int  # of the memory; whoever takes the message closes it


Message = Ready | Credit | Filled | Region


class Transport(Protocol):
    """Carries messages to peers.

    Incoming ones are handed to ``Worker.deliver`` on any thread, or come from a ``Line``.
    """

    def send(self, peer: int, message: Message) -> None:
        """Queue a message; returns at once, may be called on any thread; messages to one peer stay in order."""


class Line(Protocol):
    """A socket to one peer whose messages the worker reads itself (``Worker.attach``)."""

    peer: int
    unsent: bool  # ``flush`` has something to do
    stuck: bool  # the peer reads too slowly: flush again when the socket can be written to
    ended: bool  # the peer is gone, or has closed on purpose

    def fileno(self) -> int:
        """Readable when messages are there, or the end."""

    def own(self) -> None:
        """Make the calling thread the one that receives; what it sends leaves with its next flush."""

    def receive(self) -> list[Message]:
        """The messages that have come, in order; never blocks.  Raises ClusterError for what is none."""

    def flush(self) -> None:
        """Let leave what was queued; never blocks, and is no error when the peer is gone."""


class DataPlane(Protocol):
    """Moves tensors between ranks.

    ``send``, ``receive`` and ``collective`` block; each runs on a thread of its queue.
    """

    def open(self, peers: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """Make the communicators for directed pairs (from, to) and collective groups, in this order on every rank.

        Those that exist already are kept.  Only pairs and groups that hold this rank are listed.
        """

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors to a rank; they match what it receives from this rank in order."""

    def receive(self, source: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Receive the next tensors that a rank sends."""

    def collective(self, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Take part in a collective and return this rank's outputs, shaped as ``specs``; inputs are not changed."""

    def explain(self) -> str:
        """What it is at that takes long, for people; nothing where that is what its threads are at."""

    def close(self) -> None:
        """End: calls that are blocked fail where the medium can wake them; none may follow."""
