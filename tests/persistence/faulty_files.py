"""The system calls by which checkpoints are written, counted; one of them can be made to fail or to end the process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from actorflow.persistence import folder_lock, storage

__all__ = ["FaultyCalls", "full_disk", "killed"]

COUNTED = ("write", "fsync", "replace", "unlink", "open")


class FaultyCalls:
    """``os`` for the modules that write checkpoints; at call ``number`` (from 1 on), ``fault`` takes its place."""

    def __init__(self, number: int = 0, fault: Callable[..., Any] | None = None) -> None:
        self.count = 0
        self.said: list[str] = []
        self._number, self._fault = number, fault

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in COUNTED:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.said.append(name)
            if self.count == self._number and self._fault is not None:
                return self._fault(name, *args)
            return real(*args, **kwargs)

        return call

    @contextmanager
    def in_force(self) -> Iterator[FaultyCalls]:
        modules: list[Any] = [storage, folder_lock]
        for module in modules:
            module.os = self
        try:
            yield self
        finally:
            for module in modules:
                module.os = os


def killed(name: str, *args: Any) -> Any:
    """The process ends in the call: half of a write is done, nothing of another."""
    if name == "write":
        fd, data = args
        os.write(fd, data[: len(data) // 2])
    os._exit(9)


def full_disk(name: str, *args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
