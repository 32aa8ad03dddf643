"""The interface of devices: queues (streams) do work in order, marks (events) say how far a queue has come.

On a device that runs ``ahead``, a call that puts work into a queue returns before the work is done.  If another queue
or the host reads a tensor, marks must order the accesses: the reader waits for the mark of the work that wrote the
tensor, and work that overwrites it or frees its memory waits for the marks of all readers.  On any other device, work
is done when its call returns: it has one queue, whose marks have always passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["Device", "Mark", "Queue"]

R = TypeVar("R")


class Mark(Protocol):
    """A place in a queue (a stream event), which has passed when all work put into the queue before it is done."""

    def passed(self) -> bool:
        """Whether the mark has passed; never blocks."""

    def wait_on_host(self) -> None:
        """Block the calling thread until the mark has passed."""


class Queue(Protocol):
    """A queue of work that the device does in order.

    Any thread may use it; callers that put in work from several threads must order these themselves.
    """

    @property
    def name(self) -> str:
        """The name of the plan's queue, for messages."""

    def context(self) -> AbstractContextManager[object]:
        """A context in which the calling thread launches work into this queue.  Contexts may be nested."""

    def mark(self) -> Mark:
        """Record a mark after all work that is in the queue now."""

    def wait(self, mark: Mark | None) -> None:
        """Make work that is put into this queue from now on start after ``mark`` (None: no wait); returns at once."""

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors until all work in this queue now is done, even if the tensors die before.

        It is for tensors that others may free, such as a caller's.  The runtime's tokens do not need it: see
        ``RegisterEvents``.
        """


class Device(Protocol):
    """The device on which one rank computes.  For any thread that has called ``prepare_thread``."""

    @property
    def kind(self) -> str:
        """The kind as in placements: "cpu", "cuda"."""

    @property
    def where(self) -> torch.device:
        """The torch device of its tensors."""

    @property
    def ahead(self) -> bool:
        """Whether calls return before their work is done, so that marks have to order the queues."""

    def label(self, threads: int) -> str:
        """A name for files of measurements; devices or thread counts of different speed have different names."""

    def prepare_thread(self) -> None:
        """Prepare the calling thread to launch work on this device."""

    def leave_thread(self) -> None:
        """Leave the device to other threads: the calling one has issued a call, and will wait for its results."""

    def queue(self, name: str) -> Queue:
        """The queue of this name, which is made at the first call."""

    def here(self) -> Queue:
        """The queue into which the calling thread launches now: that of the innermost ``context``, or its default."""

    def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the device, in the queue into which the calling thread launches.

        Tensors that lie on the device are returned as they are.  Others are copied through pinned memory, and the call
        returns at once.  The caller may change them afterwards; a tensor that was pinned itself only after a mark.
        """

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to host memory; tensors that lie there are returned as they are.

        The copies start after the work that the calling thread's queue holds now, go through pinned memory on a
        separate queue, and block the calling thread until they are made.
        """

    def staging(self, nbytes: int) -> Tensor:
        """Allocate flat uint8 host memory that copies to and from the device can use without blocking."""

    @property
    def replays(self) -> bool:
        """Whether ``capture`` may be called."""

    def capture(self, launch: Callable[[], R], warm: int = 0, *, apart: bool = False) -> tuple[Callable[[], None], R]:
        """Call ``launch`` ``warm`` times, and once more to capture the work that it launches, without doing it.

        Returns a function ``replay`` and what ``launch`` returned.  ``replay()`` puts the same work, on the same
        memory, into the caller's queue.  The returned tensors hold the results from then on until any capture of this
        device is replayed, because captures share memory; so all of them must be replayed in one queue.  A capture
        ``apart`` shares no memory: its results last until it is itself replayed.

        Must be called while nothing runs on the device and no other thread uses it.  Raises RuntimeError for work that
        cannot be captured, such as waiting for the device.
        """

    def synchronize(self) -> None:
        """Block until the work in all queues is done.  For measurements and installing plans, never in a step."""
