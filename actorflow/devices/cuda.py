"""A GPU: queues are streams, marks are events.

The caching allocator reuses memory that was freed on a stream for later work of that stream, in order.  So a tensor
that one stream made and another reads may die only if the maker's stream has waited for the reader, the reader's event
has passed, or the reading stream was recorded on the tensor (``Queue.use``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from actorflow.devices.base import Mark
from actorflow_compiler.core.errors import ClusterError, PlanError
from actorflow_compiler.core.torch_internals import captured_graph

__all__ = ["Cuda"]

R = TypeVar("R")

_FETCH = "fetch"
_CAPTURE = "capture"
_POOL = 32  # streams that torch has of each priority and hands out round-robin
_COMPUTE = (0,)  # priorities; a lower number goes first
_URGENT = (-1, -2, -3)  # short transfers go before long kernels


class Cuda:
    """One GPU of this machine; see ``Device``."""

    kind = "cuda"
    ahead = True
    replays = True

    def __init__(self, index: int = 0) -> None:
        self.where = torch.device("cuda", index)
        self._queues: dict[str, _StreamQueue] = {}
        self._lock = threading.Lock()
        self._graphs: Any = None  # the memory that captures share

    def label(self, threads: int) -> str:
        """See ``Device``."""
        return torch.cuda.get_device_name(self.where)

    def prepare_thread(self) -> None:
        """See ``Device``."""
        torch.cuda.set_device(self.where)

    def leave_thread(self) -> None:
        """See ``Device``."""

    def queue(self, name: str) -> _StreamQueue:
        """See ``Device``.  Queues other than "compute" have a higher priority."""
        found = self._queues.get(name)
        if found is None:
            with self._lock:
                found = self._queues.get(name)
                if found is None:
                    found = self._queues[name] = _StreamQueue(name, self._stream(name))
        return found

    def _stream(self, name: str) -> torch.cuda.Stream:
        """A stream that no other queue has; the caller holds the lock.  Raises ClusterError if none is left.

        Torch has 32 streams of each priority: after these it hands out the first one again.  Two queues must not share
        a stream, because it does their work in the order in which it was launched, and that can deadlock: a copy to the
        host, which a message on another plane needs, could stand behind an NCCL receive whose sender waits for that
        message.
        """
        taken = {queue.stream.cuda_stream for queue in self._queues.values()}
        for priority in _COMPUTE if name == "compute" else _URGENT:
            for _ in range(_POOL):
                stream = torch.cuda.Stream(self.where, priority)  # type: ignore[no-untyped-call]
                if stream.cuda_stream not in taken:
                    return stream
        raise ClusterError(
            f"{self.where}: queue {name} needs a stream of its own, and torch has no more than the {len(taken)} that "
            "other queues have; each rank that this one receives from takes one or two. Let a rank exchange data "
            "with fewer others: tensor parallelism and pipelines within a node, data parallelism across"
        )

    def here(self) -> _StreamQueue:
        """See ``Device``."""
        return _StreamQueue("of the calling thread", torch.cuda.current_stream(self.where))

    def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See ``Device``.

        The pinned copy may die here, before it is read: torch reuses pinned memory only when the copies made from it
        are done.
        """
        return [
            t if t.device == self.where else (t if t.is_cuda else _pinned(t)).to(self.where, non_blocking=True)
            for t in tensors
        ]

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See ``Device``."""
        if all(t.device.type == "cpu" for t in tensors):
            return list(tensors)
        # one queue for each source stream, so that a copy does not stand behind a copy that waits for another stream
        fetch = self.queue(f"{_FETCH} {torch.cuda.current_stream(self.where).cuda_stream:#x}")
        fetch.wait(self.here().mark())
        with fetch.context():
            found = [
                t
                if t.device.type == "cpu"
                else torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            ]
        fetch.mark().wait_on_host()
        return found

    def staging(self, nbytes: int) -> Tensor:
        """See ``Device``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, launch: Callable[[], R], warm: int = 0, *, apart: bool = False) -> tuple[Callable[[], None], R]:
        """See ``Device``: a CUDA graph."""
        if self._graphs is None:
            self._graphs = torch.cuda.graph_pool_handle()
        pool = torch.cuda.graph_pool_handle() if apart else self._graphs
        with torch.cuda.stream(self.queue(_CAPTURE).stream):
            for _ in range(warm):
                launch()
            try:
                return captured_graph(launch, pool)
            except RuntimeError:
                if not apart:
                    self._graphs = None  # torch 2.11 regards the failed capture as still using this pool
                raise

    def synchronize(self) -> None:
        """See ``Device``."""
        torch.cuda.synchronize(self.where)


class _StreamQueue:
    """A stream; see ``Queue``."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.stream = stream

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def mark(self) -> _EventMark:
        # blocking: a thread that waits on the host sleeps, and leaves its core to threads that launch
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return _EventMark(event)

    def wait(self, mark: Mark | None) -> None:
        if mark is None:
            return
        if not isinstance(mark, _EventMark):
            raise PlanError(f"queue {self.name}: a mark of another kind of device was found: {type(mark).__name__}")
        self.stream.wait_event(mark.event)

    def use(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.stream)


class _EventMark:
    """An event; see ``Mark``."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self) -> None:
        self.event.synchronize()


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()
