"""Tasks enter a queue; one thread does them in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Lane(Generic[T]):
    """A thread that does the tasks put to it, one after the other, without gradients.

    An exception goes to ``fail`` with the task that raised it, and ends the lane.
    """

    def __init__(
        self, name: str, device: torch.device, work: Callable[[T], None], fail: Callable[[BaseException, T], None]
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


def prepare_thread(device: torch.device) -> None:
    """Make this thread one that runs tensor code of a plan on ``device``."""
    torch.set_grad_enabled(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
