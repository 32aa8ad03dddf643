"""The thread of a queue, which does tasks in the order in which they are put."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Set
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from actorflow.devices import Device

T = TypeVar("T")


class QueueThread(Generic[T]):
    """A thread that calls ``work(task)`` for each task put to it, in order, with gradients off.

    An exception ends the thread, after ``fail(error, task)`` was called.
    """

    def __init__(
        self, name: str, device: Device, work: Callable[[T], None], fail: Callable[[BaseException, T], None]
    ) -> None:
        self.name = name
        self.doing: T | None = None  # the task in progress
        self._device = device
        self._work = work
        self._fail = fail
        self._tasks: SimpleQueue[T | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"actorflow {name}", daemon=True)
        self.thread.start()

    def put(self, task: T) -> None:
        """Add a task, to be done after those that were put before."""
        self._tasks.put(task)

    def stop(self) -> None:
        """End the thread after the tasks that were put before."""
        self._tasks.put(None)

    def _run(self) -> None:
        prepare_thread(self._device)
        while True:
            task = self._tasks.get()
            if task is None:
                return
            self.doing = task
            try:
                self._work(task)
            except BaseException as error:
                self._fail(error, task)
                return
            self.doing = task = None  # the tensors of a task die with it, not when the next one comes


def prepare_thread(device: Device, cores: Set[int] = frozenset()) -> None:
    """Prepare the calling thread to run a plan's tensor code on ``device``; pin it to ``cores`` (empty: no pinning)."""
    torch.set_grad_enabled(False)
    if cores:
        with contextlib.suppress(OSError):  # a sandbox may forbid it, or a core may be gone
            os.sched_setaffinity(0, cores)  # of this thread, and of those that torch starts from it
    device.prepare_thread()
