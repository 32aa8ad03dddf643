"""Pack the tensors of one transfer into flat buffers, and unpack what came.

Small tensors of a transfer travel together, as a message costs more than their bytes; in an exchange all
that goes to one member does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.transport.redistribution import cut, dtype_of, join, padded, run_bytes, windows
from actorflow_compiler.plan.plan import Collective, TensorSpec

__all__ = ["SMALL", "Parcels", "Room", "by_size", "plain_room", "side_by_side"]

SMALL = 65536  # bytes; up to here a message costs more than its bytes do

Room = Callable[[int], Tensor]
"""Makes flat uint8 memory of so many bytes."""


def plain_room(nbytes: int) -> Tensor:
    """Flat uint8 memory on the CPU."""
    return torch.empty(nbytes, dtype=torch.uint8)


def by_size(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Which of some tensors travel in one message, and which alone; empty ones do not travel."""
    small = [i for i, n in enumerate(sizes) if 0 < n <= SMALL]
    if len(small) < 2:
        small = []
    return small, [i for i, n in enumerate(sizes) if n and i not in small]


def side_by_side(sizes: Sequence[int], room: Room) -> tuple[Tensor, list[Tensor]]:
    """Flat bytes with room for several runs, and the view of each run."""
    rooms = [padded(n) for n in sizes]
    flat = room(sum(rooms))
    return flat, [part[:n] for part, n in zip(torch.split(flat, rooms), sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Parcels:
    """One rank's part of a collective that follows exchanges: what it sends each other member, in one run of bytes."""

    comm: Collective
    me: int  # position in the group
    specs: Sequence[TensorSpec]  # of the outputs
    to: tuple[int, ...]  # bytes for each member; none for the rank itself
    come: tuple[int, ...]  # bytes from each member

    @classmethod
    def of(cls, comm: Collective, rank: int, specs: Sequence[TensorSpec]) -> Parcels:
        """The parcels of a rank, by their sizes."""
        me = comm.ranks.index(rank)
        others = [m != me for m in range(len(comm.ranks))]
        pairs = list(zip(comm.exchanges, specs, strict=True))
        to = tuple(other * sum(run_bytes(e.send[m], s.dtype) for e, s in pairs) for m, other in enumerate(others))
        come = tuple(other * sum(run_bytes(e.receive[m], s.dtype) for e, s in pairs) for m, other in enumerate(others))
        return cls(comm, me, specs, to, come)

    def pack(self, tensors: Sequence[Tensor], leaving: Tensor) -> None:
        """Copy what goes to other members into flat bytes, member after member."""
        offset = 0
        for m in self._others():
            for exchange, tensor, spec in zip(self.comm.exchanges, tensors, self.specs, strict=True):
                boxes = exchange.send[m]
                for window, part in zip(windows(leaving, offset, boxes, tensor.dtype), cut(tensor, boxes), strict=True):
                    window.copy_(part)
                offset += run_bytes(boxes, spec.dtype)

    def unpack(self, tensors: Sequence[Tensor], coming: Tensor, device: torch.device) -> list[Tensor]:
        """The outputs: of what came from other members, and of what the rank keeps of its own ``tensors``."""
        pieces: list[list[list[Tensor]]] = [[[] for _ in self.comm.ranks] for _ in tensors]
        offset = 0
        for m in self._others():
            for i, (exchange, spec) in enumerate(zip(self.comm.exchanges, self.specs, strict=True)):
                boxes = exchange.receive[m]
                pieces[i][m] = windows(coming, offset, boxes, dtype_of(spec.dtype))
                offset += run_bytes(boxes, spec.dtype)
        outputs = []
        for i, (exchange, tensor, spec) in enumerate(zip(self.comm.exchanges, tensors, self.specs, strict=True)):
            pieces[i][self.me] = cut(tensor, exchange.send[self.me])
            outputs.append(join(exchange, spec, pieces[i], device))
        return outputs

    def _others(self) -> list[int]:
        return [m for m in range(len(self.comm.ranks)) if m != self.me]
