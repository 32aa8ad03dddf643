"""The CPU as a device: work is done when its call returns, so its queue and marks are null objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from actorflow.devices.base import Mark
from actorflow.support.heap import Heap
from actorflow.support.openmp import leave_team

__all__ = ["Cpu"]

R = TypeVar("R")


class Cpu:
    """The processors that this process may use; see ``Device``."""

    kind = "cpu"
    ahead = False
    replays = False
    where = torch.device("cpu")

    def __init__(self, index: int = 0) -> None:
        """All ranks of a machine share its processors, so ``index`` makes no difference."""
        self._queue = NullQueue()
        self._heap = Heap()

    def label(self, threads: int) -> str:
        """See ``Device``."""
        return f"cpu-{threads}"

    def prepare_thread(self) -> None:
        """See ``Device``."""

    def leave_thread(self) -> None:
        """See ``Device``."""
        leave_team(torch.get_num_threads())
        self._heap.settle()

    def queue(self, name: str) -> NullQueue:
        """See ``Device``."""
        return self._queue

    def here(self) -> NullQueue:
        """See ``Device``."""
        return self._queue

    def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See ``Device``."""
        return [t.to(self.where) for t in tensors]

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See ``Device``."""
        return [t.cpu() for t in tensors]

    def staging(self, nbytes: int) -> Tensor:
        """See ``Device``."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def capture(self, launch: Callable[[], R], warm: int = 0, *, apart: bool = False) -> tuple[Callable[[], None], R]:
        """See ``Device``; not supported, as a replay would not be faster than calling the ops."""
        raise NotImplementedError("a CPU captures nothing")

    def synchronize(self) -> None:
        """See ``Device``."""


class NullQueue:
    """The only queue of a CPU: work is done at once, so waiting and recording do nothing."""

    name = "cpu"

    def context(self) -> AbstractContextManager[object]:
        """See ``Queue``."""
        return _NO_CONTEXT

    def mark(self) -> NullMark:
        """See ``Queue``."""
        return _PASSED

    def wait(self, mark: Mark | None) -> None:
        """See ``Queue``."""
        assert mark is None or mark is _PASSED, "a mark of another device"

    def use(self, tensors: Iterable[Tensor]) -> None:
        """See ``Queue``."""


class NullMark:
    """A mark that has passed."""

    def passed(self) -> bool:
        """See ``Mark``."""
        return True

    def wait_on_host(self) -> None:
        """See ``Mark``."""


_PASSED = NullMark()
_NO_CONTEXT = nullcontext()
