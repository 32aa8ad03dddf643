"""Pack the tensors of one transfer into flat buffers, and unpack received buffers.

Small tensors of a transfer share one buffer, as a message of its own would cost more than their bytes.  In an exchange,
everything for one member shares one buffer.  In an all-reduce, all tensors of a dtype do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.transport.redistribution import cut, cut_like, dtype_of, join, padded, run_bytes, windows
from actorflow_compiler.core.tensor_bytes import as_bytes
from actorflow_compiler.plan.plan import Collective, TensorSpec

__all__ = ["SMALL", "Parcels", "Room", "packed_by_size", "plain_room", "room_by_size", "sum_by_dtype"]

SMALL = 65536  # bytes; for tensors up to this size a message costs more than its bytes
# Neither Gloo nor NCCL can sum these integers, and neither sums bools as numbers (True + True is 2), so they are
# converted to another dtype to be summed, and back.
_SUMMED_AS = {torch.bool: torch.int32, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}

Room = Callable[[int], Tensor]
"""Allocates a flat uint8 tensor of the given number of bytes."""


def plain_room(nbytes: int) -> Tensor:
    """Allocate a flat uint8 tensor on the CPU."""
    return torch.empty(nbytes, dtype=torch.uint8)


def packed_by_size(tensors: Sequence[Tensor], room: Room) -> list[Tensor]:
    """The bytes of ``tensors`` as the flat buffers that a transfer sends: large tensors, then all small ones in one."""
    wires = [as_bytes(t) for t in tensors]
    small, large = _by_size([w.numel() for w in wires])
    sent = [wires[i] for i in large]
    if small:
        flat, parts = _side_by_side([wires[i].numel() for i in small], room)
        for i, part in zip(small, parts, strict=True):
            part.copy_(wires[i])
        sent.append(flat)
    return sent


def room_by_size(specs: Sequence[TensorSpec], room: Room) -> tuple[list[Tensor], list[Tensor]]:
    """The flat buffers that a transfer of ``packed_by_size`` is received into, and the tensors that lie in them."""
    small, large = _by_size([spec.nbytes for spec in specs])
    wires = [room(0 if i in small else spec.nbytes) for i, spec in enumerate(specs)]
    received = [wires[i] for i in large]
    if small:
        flat, parts = _side_by_side([specs[i].nbytes for i in small], room)
        for i, part in zip(small, parts, strict=True):
            wires[i] = part
        received.append(flat)
    return received, [wire.view(dtype_of(spec.dtype)).view(spec.shape) for wire, spec in zip(wires, specs, strict=True)]


def sum_by_dtype(tensors: Sequence[Tensor], all_reduce: Callable[[Tensor], None]) -> list[Tensor]:
    """The sums of ``tensors`` over ranks, by one call for each dtype of ``all_reduce``, which sums a flat tensor."""
    outputs: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in indices]).to(_SUMMED_AS.get(dtype, dtype))
        all_reduce(flat)
        flat = flat.to(dtype)
        for i, part in zip(indices, torch.split(flat, [tensors[i].numel() for i in indices]), strict=True):
            outputs[i] = part.view(tensors[i].shape)
    return [outputs[i] for i in range(len(tensors))]


def _by_size(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split tensors, by their sizes in bytes, into indices of those sent in one message and of those sent alone.

    Empty tensors are in neither list, as they are not sent.
    """
    small = [i for i, n in enumerate(sizes) if 0 < n <= SMALL]
    if len(small) < 2:
        small = []
    return small, [i for i, n in enumerate(sizes) if n and i not in small]


def _side_by_side(sizes: Sequence[int], room: Room) -> tuple[Tensor, list[Tensor]]:
    """Allocate one flat buffer for several runs of bytes; return it and a view of each run."""
    rooms = [padded(n) for n in sizes]
    flat = room(sum(rooms))
    return flat, [part[:n] for part, n in zip(torch.split(flat, rooms), sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Parcels:
    """One rank's buffers in a collective made of exchanges: one run of bytes for each other member, and from each."""

    comm: Collective
    me: int  # position in the group
    specs: Sequence[TensorSpec]  # of the outputs
    to: tuple[int, ...]  # bytes for each member; none for the rank itself
    come: tuple[int, ...]  # bytes from each member

    @classmethod
    def of(cls, comm: Collective, rank: int, specs: Sequence[TensorSpec]) -> Parcels:
        """The sizes of a rank's runs in a collective; ``specs`` are those of its outputs."""
        me = comm.ranks.index(rank)
        others = [m != me for m in range(len(comm.ranks))]
        pairs = list(zip(comm.exchanges, specs, strict=True))
        to = tuple(other * sum(run_bytes(e.send[m], s.dtype) for e, s in pairs) for m, other in enumerate(others))
        come = tuple(other * sum(run_bytes(e.receive[m], s.dtype) for e, s in pairs) for m, other in enumerate(others))
        return cls(comm, me, specs, to, come)

    def exchange(
        self, tensors: Sequence[Tensor], room: Room, all_to_all: Callable[[Tensor, Tensor, list[int], list[int]], None]
    ) -> list[Tensor]:
        """The outputs, after one ``all_to_all`` of flat buffers: (coming, leaving, bytes from each, bytes for each)."""
        leaving, coming = room(sum(self.to)), room(sum(self.come))
        self._pack(tensors, leaving)
        all_to_all(coming, leaving, list(self.come), list(self.to))
        return self._unpack(tensors, coming)

    def _pack(self, tensors: Sequence[Tensor], leaving: Tensor) -> None:
        """Copy what other members get of ``tensors`` into the flat buffer ``leaving``, member after member."""
        offset = 0
        for m in self._others():
            for exchange, tensor, spec in zip(self.comm.exchanges, tensors, self.specs, strict=True):
                boxes = exchange.send[m]
                for window, part in zip(windows(leaving, offset, boxes, tensor.dtype), cut(tensor, boxes), strict=True):
                    window.copy_(part)
                offset += run_bytes(boxes, spec.dtype)

    def _unpack(self, tensors: Sequence[Tensor], coming: Tensor) -> list[Tensor]:
        """Make the outputs from the flat buffer ``coming`` from other members and this rank's own ``tensors``."""
        pieces: list[list[list[Tensor]]] = [[[] for _ in self.comm.ranks] for _ in tensors]
        offset = 0
        for m in self._others():
            for i, (exchange, spec) in enumerate(zip(self.comm.exchanges, self.specs, strict=True)):
                boxes = exchange.receive[m]
                pieces[i][m] = windows(coming, offset, boxes, dtype_of(spec.dtype))
                offset += run_bytes(boxes, spec.dtype)
        outputs = []
        for i, (exchange, tensor, spec) in enumerate(zip(self.comm.exchanges, tensors, self.specs, strict=True)):
            pieces[i][self.me] = cut_like(tensor, exchange.send[self.me], exchange.receive[self.me])
            outputs.append(join(exchange, spec, pieces[i], coming.device))
        return outputs

    def _others(self) -> list[int]:
        return [m for m in range(len(self.comm.ranks)) if m != self.me]
