"""Handles on the results of calls, and this rank's answers when other ranks read its parts of them.

If every rank holds a result whole, its handle reads the local copy.  Any other result stays with its owners: a handle
pulls the parts when it is read, and each owner keeps its part until the handles of all ranks are gone.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from actorflow.devices import Device
from actorflow.runtime.call import Call
from actorflow.runtime.parts import assemble, sources
from actorflow.standins.lazy_tensor import LazyTensor, TensorFuture
from actorflow.support import background
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.support.requests import OwnRequest, Request
from actorflow.transport.redistribution import dtype_of
from actorflow.transport.small_tensors import decode, encode
from actorflow_compiler.core.sbp import Broadcast
from actorflow_compiler.plan import plan as plans
from actorflow_compiler.plan.plan import TensorSpec
from actorflow_compiler.plan.region import device_shape

__all__ = ["Peers", "ResultDropped", "ResultPart", "Results", "fetch_part"]


@dataclass(frozen=True, slots=True)
class ResultPart(Request):
    """Asks for a rank's part of a result."""

    call: int  # number of the call, the same on all ranks
    index: int  # number of the result
    history: int = -1  # digest of what the asking rank has done up to the call; -1: all ranks did the same


@dataclass(frozen=True, slots=True)
class ResultDropped(OwnRequest):
    """Tells that the handle of the rank that tells it on a result is gone."""

    call: int
    index: int


_Drop = tuple[tuple[int, ...], int, int]  # a result whose handle is gone: its owners, the number of its call, its index


class Peers(Protocol):
    """The part of a cluster's interface that this module uses."""

    rank: int
    world: int

    def pull(self, rank: int, request: Request) -> bytes:
        """Send a request to a rank and return its answer."""


class Results:
    """The results of one rank: makes handles, and keeps this rank's parts of results that others may read."""

    def __init__(self, peers: Peers, on: Device, history: Callable[[int], int] = lambda calls: -1) -> None:
        """``history``: the digest of what this rank has done up to its last of so many calls; see ``ResultPart``."""
        self._peers, self._history = peers, history
        self._on = on
        self._device = on.where
        self._kept: dict[tuple[int, int], TensorFuture] = {}  # by (call, result): parts that other ranks may pull
        self._open: deque[tuple[Call, list[weakref.ref[TensorFuture]]]] = deque()  # calls whose futures are not settled
        self._dropped: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # by (call, result): the ranks without
        self._lock = threading.Lock()
        self._drops: SimpleQueue[_Drop | None] | None = None

    def handles(self, number: int, call: Call, results: Sequence[plans.Result]) -> list[LazyTensor]:
        """Handles on the results of a call, whose ``number`` is the same on all ranks."""
        while self._open and self._open[0][0].done:  # so that a handle keeps no other results of its call
            before, given = self._open.popleft()
            for ref in given:
                promise = ref()
                if promise is not None and before.lost is None:  # if it was given up, reading the handle raises
                    promise.settle()
        refs: list[weakref.ref[TensorFuture]] = []
        found = [self._handle(number, call, result, refs) for result in results]
        self._open.append((call, refs))
        return found

    def _handle(
        self, number: int, call: Call, result: plans.Result, refs: list[weakref.ref[TensorFuture]]
    ) -> LazyTensor:
        peers, index, placement = self._peers, result.index, result.placement
        shape, dtype = result.shape, dtype_of(result.dtype)
        part = None
        if peers.rank in placement:
            part = TensorFuture(lambda: call.result(index))
            refs.append(weakref.ref(part))
            whole_here = placement.size == 1 or all(isinstance(entry, Broadcast) for entry in result.sbp)
            if whole_here and set(range(peers.world)) == set(placement.ranks):
                return LazyTensor.of(part, shape, dtype, self._device)
            with self._lock:
                self._kept[number, index] = part
        whole = TensorFuture(_Fetch(peers, number, call, part, result, self._device, self._history))
        dropped = partial(self._telling().put, (tuple(placement.ranks), number, index))
        handle = LazyTensor.of(whole, shape, dtype, self._device, dropped)
        handle.part = part
        return handle

    def serve(self, number: int, index: int) -> bytes:
        """This rank's part of a result as bytes, for a rank that reads it.

        Raises MessageRefused where it has none: not of this result, or the handles of all ranks are gone.
        """
        with self._lock:
            part = self._kept.get((number, index))
        if part is None:
            raise _not_kept("a pull", number, index)
        return encode(self._on.to_host([part.value()]))[0]

    def forget(self, number: int, index: int, rank: int) -> None:
        """Note that a rank's handle is gone; when those of all ranks are, free this rank's part.

        Raises MessageRefused where this rank has no part, or the handle was gone before.
        """
        with self._lock:
            if (number, index) not in self._kept:
                raise _not_kept("the end", number, index)
            gone = self._dropped[number, index]
            if rank in gone:
                what = f"the end of its handle on result {index} of call {number}, which it has told before"
                raise MessageRefused(RefusalReason.SEQUENCE, what, "it once", rank)
            gone.add(rank)
            if len(gone) == self._peers.world:
                del self._dropped[number, index]
                del self._kept[number, index]

    def close(self) -> None:
        """End the thread that tells owners about handles that are gone."""
        if self._drops is not None:
            self._drops.put(None)

    def _telling(self) -> SimpleQueue[_Drop | None]:
        """The queue of this rank's handles that are gone, which a background thread reads to tell the owners.

        The thread starts when the first such handle is made: a handle may die at any moment, even while locks are held,
        where no thread may be started.
        """
        if self._drops is None:
            self._drops = SimpleQueue()
            background.start(partial(self._tell, self._drops), "actorflow-drops", self.close)
        return self._drops

    def _tell(self, drops: SimpleQueue[_Drop | None]) -> None:
        while (drop := drops.get()) is not None:
            owners, number, index = drop
            for owner in owners:
                if owner == self._peers.rank:
                    self.forget(number, index, owner)
                else:
                    with suppress(Exception):  # the owner keeps this part; it still hears of others
                        self._peers.pull(owner, ResultDropped(self._peers.rank, number, index))


def _not_kept(what: str, number: int, index: int) -> MessageRefused:
    found = f"{what} of result {index} of call {number}, of which this rank has no part"
    return MessageRefused(RefusalReason.NUMBER, found, "one of which it has, and some rank has a handle")


class _Fetch:
    """Assembles a result from its owners' parts when it is called."""

    def __init__(
        self,
        peers: Peers,
        number: int,
        call: Call,
        part: TensorFuture | None,
        result: plans.Result,
        device: torch.device,
        history: Callable[[int], int],
    ) -> None:
        self._peers, self._number, self._call, self._part = peers, number, call, part
        self._result, self._device, self._history = result, device, history

    def __call__(self) -> Tensor:
        result, peers = self._result, self._peers
        self._call.wait()  # raises if the call was given up, which it then was on all ranks

        def one(index: int) -> Tensor:
            owner = result.placement.ranks[index]
            if owner == peers.rank and self._part is not None:
                return self._part.value()
            shape = device_shape(result.shape, result.sbp, result.placement, index)
            asked = ResultPart(self._number, result.index, self._history(self._number + 1))
            return fetch_part(peers, owner, asked, shape, result.dtype, self._device)

        parts = {index: one(index) for index in sources(result.placement, result.sbp, peers.rank)}
        return assemble(parts, result.shape, result.placement, result.sbp)


def fetch_part(
    peers: Peers, owner: int, asked: Request, shape: tuple[int, ...], dtype: str, device: torch.device
) -> Tensor:
    """Pull one rank's part of a tensor, of the given shape, to ``device``."""
    return decode([peers.pull(owner, asked)], [TensorSpec(shape, dtype, "")], device)[0]
