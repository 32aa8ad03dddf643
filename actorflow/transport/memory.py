"""The data plane between ranks that are threads of one process, for tests and benchmarks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from actorflow.transport.redistribution import check, join, run_of, split_run
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.plan.plan import Collective, CollectiveKind, TensorSpec

_CPU = torch.device("cpu")
_Parts = list[list[Tensor]] | None  # the pieces of each tensor; None: the switchboard was closed
_Key = tuple[tuple[int, ...], int, int]  # group, from, to


class Switchboard:
    """The queues between the data planes of one process; ``plane(rank)`` makes the plane of a rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[_Key, SimpleQueue[_Parts]] = {}
        self._closed = False

    def plane(self, rank: int, device: torch.device = _CPU) -> MemoryPlane:
        """The data plane of one rank."""
        return MemoryPlane(rank, self, device)

    def put(self, key: _Key, parts: _Parts) -> None:
        """Put pieces into the queue of a key."""
        self._queue(key).put(parts)

    def take(self, key: _Key) -> list[list[Tensor]]:
        """Wait for the next pieces in the queue of a key.  Raises ClusterError if the switchboard is closed."""
        parts = self._queue(key).get()
        if parts is None:
            self.put(key, None)
            raise ClusterError(f"rank {key[2]} waited for data of rank {key[1]} when the run was ended")
        return parts

    def close(self) -> None:
        """Make all calls of ``take`` that wait, now or later, raise ClusterError."""
        with self._lock:
            self._closed = True
            for queue in self._queues.values():
                queue.put(None)

    def _queue(self, key: _Key) -> SimpleQueue[_Parts]:
        with self._lock:
            found = self._queues.get(key)
            if found is None:
                found = self._queues[key] = SimpleQueue()
                if self._closed:
                    found.put(None)
            return found


class MemoryPlane:
    """A data plane for one of several ranks in a process.  Tensors are copied, as their owner may change them."""

    def __init__(self, rank: int, board: Switchboard, device: torch.device) -> None:
        self._rank = rank
        self._board = board
        self._device = device

    def open(self, peers: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """See ``DataPlane``; queues are made at their first use."""

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        """See ``DataPlane``."""
        self._board.put(((), self._rank, to), [[t.clone(memory_format=torch.contiguous_format) for t in tensors]])

    def receive(self, source: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``."""
        (tensors,) = self._board.take(((), source, self._rank))
        return [t.to(self._device).view(spec.shape) for t, spec in zip(tensors, specs, strict=True)]

    def collective(self, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``; every member sums in the order of the group, so all results are bitwise equal."""
        check(comm, tensors, specs)
        for m, member in enumerate(comm.ranks):
            if comm.kind == CollectiveKind.ALL_REDUCE:
                parts = [[t.clone()] for t in tensors]
            else:
                parts = [[run_of(t, e.send[m])] for t, e in zip(tensors, comm.exchanges, strict=True)]
            self._board.put((comm.ranks, self._rank, member), parts)
        came = [self._board.take((comm.ranks, member, self._rank)) for member in comm.ranks]
        if comm.kind == CollectiveKind.ALL_REDUCE:
            return [_sum([parts[i][0].to(self._device) for parts in came]) for i in range(len(tensors))]
        return [
            join(e, spec, [split_run(parts[i][0], of) for parts, of in zip(came, e.receive, strict=True)], self._device)
            for i, (e, spec) in enumerate(zip(comm.exchanges, specs, strict=True))
        ]

    def explain(self) -> str:
        """See ``DataPlane``."""
        return ""

    def close(self) -> None:
        """See ``DataPlane``; it ends the whole switchboard, as the ranks of one process end together."""
        self._board.close()


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
