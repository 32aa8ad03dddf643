"""The thread of a queue: it does the tasks that are put to it in order."""

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
    """A thread that does the tasks put to it, one after the other, without gradients.

    An exception goes to ``fail`` with the task that raised it, and ends the thread.
    """

    def __init__(
        self, name: str, device: Device, work: Callable[[T], None], fail: Callable[[BaseException, T], None]
    ) -> None:
        self.name = name
        self.doing: T | None = None  # the task that it is at
        self._device = device
        self._work = work
        self._fail = fail
        self._tasks: SimpleQueue[T | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"actorflow {name}", daemon=True)
        self.thread.start()

    def put(self, task: T) -> None:
        """Do a task after those that were put before."""
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
    """Make this thread one that runs tensor code of a plan on ``device``, on some cores (none: on any)."""
    torch.set_grad_enabled(False)
    if cores:
        with contextlib.suppress(OSError):  # a sandbox may forbid it, or a core may be gone
            os.sched_setaffinity(0, cores)  # of this thread, and of those that torch starts from it
    device.prepare_thread()
