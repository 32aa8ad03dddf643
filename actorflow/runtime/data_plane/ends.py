"""Communicators enter; each is given up on a thread of its own, which the process waits for before it ends."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

__all__ = ["give_up"]

_SECONDS = 5.0  # that the end of the process waits for one of them


class Given(Protocol):
    """What is used of ``torch.distributed``'s process groups."""

    def abort(self) -> None: ...


def give_up(communicators: Iterable[Given], name: str) -> None:
    """Make what is under way on communicators fail; returns at once.

    Giving one up may wait for kernels that wait for another one, so each has a thread, called ``name``.  A thread that
    comes back from torch's code when the interpreter is gone already ends the process with SIGABRT.
    """
    for communicator in communicators:
        thread = threading.Thread(target=_abort, args=(communicator,), name=name, daemon=True)
        thread.start()
        atexit.register(thread.join, _SECONDS)


def _abort(communicator: Given) -> None:
    with suppress(RuntimeError):  # it may be broken already, which is why
        communicator.abort()
