"""Communicators enter; each is given up on a thread of its own, which the process waits for before it ends."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

from actorflow.support import background

__all__ = ["give_up"]


class Given(Protocol):
    """What is used of ``torch.distributed``'s process groups."""

    def abort(self) -> None: ...


def give_up(communicators: Iterable[Given], name: str) -> None:
    """Make what is under way on communicators fail; returns at once.

    Giving one up may wait for kernels that wait for another one, so each has a thread, called ``name``.
    """
    for communicator in communicators:
        background.start(partial(_abort, communicator), name)


def _abort(communicator: Given) -> None:
    with suppress(RuntimeError):  # it may be broken already, which is why
        communicator.abort()
