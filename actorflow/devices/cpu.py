"""The device that is done when a call returns: no queues, no marks, nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from actorflow.devices.base import Mark

__all__ = ["Cpu"]

R = TypeVar("R")

_NOTHING = nullcontext()


class Cpu:
    """The processors that this process may use; see ``Device``."""

    kind = "cpu"
    ahead = False
    replays = False
    where = torch.device("cpu")

    def __init__(self, index: int = 0) -> None:
        """All ranks of a machine share its processors, so ``index`` makes no difference."""
        self._queue = _Done("cpu")

    def label(self, threads: int) -> str:
        """See ``Device``."""
        return f"cpu-{threads}"

    def prepare_thread(self) -> None:
        """See ``Device``."""

    def queue(self, name: str) -> _Done:
        """See ``Device``."""
        return self._queue

    def here(self) -> _Done:
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

    def capture(self, launch: Callable[[], R], warm: int = 0) -> tuple[Callable[[], None], R]:
        """See ``Device``; a call of an op costs no more than what would replay it."""
        raise NotImplementedError("a CPU captures nothing")

    def synchronize(self) -> None:
        """See ``Device``."""


class _Done:
    """A queue whose work is always done."""

    def __init__(self, name: str) -> None:
        self.name = name

    def context(self) -> AbstractContextManager[object]:
        return _NOTHING

    def mark(self) -> None:
        return None

    def wait(self, mark: Mark | None) -> None:
        assert mark is None, "a mark of another device"

    def use(self, tensors: Iterable[Tensor]) -> None:
        pass
