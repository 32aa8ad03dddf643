"""The interface of devices: queues (streams) do work in order, marks (events) say how far a queue has come.

On a device that runs ``ahead`` a call that puts work into a queue returns before the work is done.  What another
queue or the host reads must then be ordered by marks: the reader's queue waits for the mark of what wrote it, and
whoever overwrites it, or frees its memory, waits for the marks of all readers.  On any other device work is done when
its call returns: it has one queue, whose marks have always passed.
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
    """A place in a queue, a stream event; it has passed when all that was put into the queue before it is done."""

    def passed(self) -> bool:
        """Whether it has passed; never blocks."""

    def wait_on_host(self) -> None:
        """Block the calling thread until it has passed."""


class Queue(Protocol):
    """Work that is done in order.  Any thread may use it; who puts work in from several threads orders them."""

    @property
    def name(self) -> str:
        """The name of the plan's queue, for people."""

    def context(self) -> AbstractContextManager[object]:
        """A context manager: what the calling thread launches inside goes into this queue.  Contexts may be nested."""

    def mark(self) -> Mark:
        """Record a mark after all that is in the queue now."""

    def wait(self, mark: Mark | None) -> None:
        """Let all that is put into this queue from now on start after ``mark``, if there is one; returns at once."""

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors until all that is in this queue now is done, even if nobody holds them.

        For memory that others free, such as a caller's own tensors.  The runtime's tokens do without: see
        ``RegisterEvents``.
        """


class Device(Protocol):
    """What one rank computes on.  All methods may be called on any thread that called ``prepare_thread``."""

    @property
    def kind(self) -> str:
        """As placements write it: "cpu", "cuda"."""

    @property
    def where(self) -> torch.device:
        """Where its tensors lie."""

    @property
    def ahead(self) -> bool:
        """Whether calls return before their work is done, so that queues have to be ordered by marks."""

    def label(self, threads: int) -> str:
        """What it is, for files of measurements: what else could make the same work take longer on ``threads``."""

    def prepare_thread(self) -> None:
        """Make the calling thread one that launches work here."""

    def queue(self, name: str) -> Queue:
        """The queue of this name; made when it is first asked for."""

    def here(self) -> Queue:
        """The queue that the calling thread launches into now: the innermost ``context``, else the thread's own."""

    def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors with these values on the device, written by the queue that the calling thread launches into.

        Those that lie there stay as they are.  Others go through pinned memory and this returns at
        once; they may be changed afterwards, unless they were pinned themselves: then after a mark.
        """

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of tensors in host memory, when they are there; those that lie there stay as they are.

        It copies after what the calling thread's queue holds now, through pinned memory, on a queue of its
        own, and blocks the calling thread until the copies are made.
        """

    def staging(self, nbytes: int) -> Tensor:
        """Flat uint8 host memory of a call's own that copies to and from the device can use without blocking."""

    @property
    def replays(self) -> bool:
        """Whether ``capture`` may be called."""

    def capture(self, launch: Callable[[], R], warm: int = 0) -> tuple[Callable[[], None], R]:
        """Call ``launch`` ``warm`` times, and once more to keep what it puts into a queue, without doing it.

        Returns what puts the same work, on the same memory, into the queue of whoever calls it, and what ``launch``
        returned: tensors that hold something when that is done, until any capture of this device is replayed again,
        as captures share memory; so all of them are replayed in one queue.  To be called while nothing runs on the
        device and no other thread uses it.  Raises RuntimeError for work that cannot be kept, such as waiting for
        the device.
        """

    def synchronize(self) -> None:
        """Block until all that was put into any queue is done; for measurements and starts, never in a step."""
