"""The data plane over NCCL.

NCCL does not guarantee that two of its operations can run at a time, so a rank issues all of them, over all its
communicators, on one thread and in the order that the plan fixes (``runtime/collective_order.py``).  On the device, an
operation is work in the calling thread's queue like any other.  Only ``open`` waits for the device.

``asyncOp=False`` makes torch put an operation into the current stream, so that memory is freed in that stream's order.
Otherwise the communicator's own stream runs the operation, and torch keeps the tensors until its ``Work`` is waited
for.  Torch's send and receive always use that stream, and free memory only when it has passed, however far the host has
run ahead by then.  So between two ranks a broadcast from the first one takes the place of a send (torch 2.11 and 2.13).

The same class runs over Gloo on the CPU, where calls block until they are done, so that everything but NCCL itself is
tested without a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from actorflow.devices import Device
from actorflow.transport.communicators import CommunicatorRegistry, Maker, Scope, over_nccl
from actorflow.transport.parcels import Parcels, packed_by_size, room_by_size, sum_by_dtype
from actorflow.transport.redistribution import check
from actorflow.transport.timeouts import Patience, Started
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.plan.plan import Collective, CollectiveKind, TensorSpec

__all__ = ["NcclPlane", "nccl_host", "nccl_version"]


def _in_order(options: Any) -> Any:
    """Options of a call, set so that the operation is put into the current stream."""
    options.asyncOp = False
    return options


_MOVED = _in_order(distributed_c10d.BroadcastOptions())  # from position 0
_SUMMED = _in_order(distributed_c10d.AllreduceOptions())
_EXCHANGED = _in_order(distributed_c10d.AllToAllOptions())


class NcclPlane:
    """A data plane over NCCL for one rank; ``store`` is shared by all ranks of the run.

    ``open`` is called on the thread that installs plans.  ``send``, ``receive`` and ``collective`` are all called on
    one thread, in the plan's order.  The first call that has not ended after ``patience`` seconds is passed to
    ``late``, which has to end the run.  ``make`` makes a communicator.
    """

    def __init__(
        self,
        rank: int,
        store: Store,
        device: Device,
        *,
        make: Maker = over_nccl,
        patience: float = 600.0,
        late: Callable[[Started], None] = lambda started: None,
    ) -> None:
        self._rank = rank
        self._communicators = CommunicatorRegistry(
            rank,
            PrefixStore("actorflow/nccl", store),
            make,
            "rank {rank} could not make a communicator of NCCL with ranks {ranks}: {error}. "
            "NCCL_DEBUG=WARN in the environment makes NCCL say more.",
        )
        self._device = device
        self._patience = Patience(patience, late)
        self._closed = threading.Event()

    def open(self, peers: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """See ``DataPlane``.  Raises ClusterError if a communicator cannot be made.

        Each new communicator is used once here.  NCCL connects at first use, which blocks the calling thread, and
        should not happen in the middle of a step.
        """
        used: list[Tensor] = []
        queue = self._device.queue("nccl")
        with queue.context():
            for pair in peers:
                if (Scope.PAIR, pair) not in self._communicators:
                    made = self._communicators.open(Scope.PAIR, pair)
                    with self._doing(f"connecting {pair[0]}>{pair[1]}") as started:
                        mine = [self._room(1)]
                        self._put(started, made.broadcast(mine, _MOVED))
                    used += mine
            for group in groups:
                if (Scope.GROUP, group) not in self._communicators:
                    made = self._communicators.open(Scope.GROUP, group)
                    with self._doing(f"connecting {list(group)}") as started:
                        ones = [1] * len(group)
                        mine = [torch.ones(len(group), dtype=torch.uint8, device=self._device.where) for _ in range(3)]
                        self._put(started, made.allreduce([mine[0]], _SUMMED))
                        # all-to-all needs connections of its own
                        self._put(started, made.alltoall_base(mine[1], mine[2], ones, ones, _EXCHANGED))
                    used += mine
            mark = queue.mark() if used else None
        if mark is not None:
            mark.wait_on_host()

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        """See ``DataPlane``; returns when the operations are put into the queue."""
        pair = self._communicators[Scope.PAIR, (self._rank, to)]
        wires = packed_by_size(tensors, self._room)
        with self._doing(f"send {self._rank}>{to}") as started:
            for wire in wires:
                self._put(started, pair.broadcast([wire], _MOVED))

    def receive(self, source: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``; returns when the operations are put into the queue."""
        pair = self._communicators[Scope.PAIR, (source, self._rank)]
        wires, tensors = room_by_size(specs, self._room)
        with self._doing(f"receive {source}>{self._rank}") as started:
            for wire in wires:
                self._put(started, pair.broadcast([wire], _MOVED))
        return tensors

    def collective(self, comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See ``DataPlane``.  Uses one all-to-all, or one all-reduce for each dtype of an all_reduce."""
        check(comm, tensors, specs)
        group = self._communicators[Scope.GROUP, comm.ranks]
        with self._doing(f"{comm.kind} {list(comm.ranks)}") as started:
            if comm.kind == CollectiveKind.ALL_REDUCE:
                return sum_by_dtype(tensors, lambda flat: self._put(started, group.allreduce([flat], _SUMMED)))

            def all_to_all(coming: Tensor, leaving: Tensor, come: list[int], to: list[int]) -> None:
                self._put(started, group.alltoall_base(coming, leaving, come, to, _EXCHANGED))

            return Parcels.of(comm, self._rank, specs).exchange(tensors, self._room, all_to_all)

    def close(self) -> None:
        """See ``DataPlane``.  Operations under way are aborted in the background; returns at once."""
        if not self._closed.is_set():
            self._closed.set()
            self._patience.close()
            self._communicators.abort("actorflow nccl end")

    def finish(self) -> None:
        """Shut down in order; returns at once.  All ranks must call it, when they have done all their operations.

        A thread does the work, and the process waits for it before it ends.
        """
        if not self._closed.is_set():
            self._closed.set()
            self._patience.close()
            threading.Thread(target=self._communicators.shut_down, name="actorflow nccl end").start()

    def explain(self) -> str:
        """The oldest call that has not ended, as text; empty if all have ended."""
        return self._patience.explain()

    def _room(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device.where)

    @contextmanager
    def _doing(self, what: str) -> Iterator[Started]:
        if self._closed.is_set():
            raise ClusterError(f"rank {self._rank}: {what} came after the run had ended")
        started = self._patience.start(what)
        try:
            yield started
        except RuntimeError as error:
            raise ClusterError(f"rank {self._rank}: {what} over NCCL failed: {error}") from error
        finally:
            started.issued = True

    def _put(self, started: Started, work: Any) -> None:
        """Record a mark after an operation in the calling thread's queue.  Over Gloo, block until it is done."""
        if work is not None:
            work.wait()
        mark = self._device.here().mark()
        if mark is not None:
            started.marks.append(mark)


def nccl_host() -> str:
    """The host that NCCL takes this process to be on, as ``NCCL_HOSTID`` names it; empty: the one it is on.

    NCCL lets no two ranks of a host share a GPU.  Ranks that it takes to be on different hosts may.
    """
    return os.environ.get("NCCL_HOSTID", "")


def nccl_version() -> str:
    """The version of NCCL in this process, such as "2.27.5"; empty if there is no NCCL or no GPU."""
    if getattr(distributed_c10d, "ProcessGroupNCCL", None) is None or not torch.cuda.is_available():
        return ""
    found: object = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)
