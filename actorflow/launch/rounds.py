"""Decide after each attempt whether the ranks start again, and with which nodes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol, Self

from actorflow.launch.attempt import AttemptResult
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.settings import Settings

__all__ = ["EndedBySignal", "OneNode", "Rounds"]


class EndedBySignal(BaseException):
    """A signal has ended a wait for other nodes."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class Rounds(AbstractContextManager["Rounds"], Protocol):
    """The attempts of a run, as one launcher sees them."""

    status: int  # exit status of a node that never had an attempt

    def next(self, before: AttemptResult | None) -> Settings | None:
        """This node's part of the next attempt, None where there is none; ``before`` is how the last one has ended.

        Blocks until the nodes of the attempt are there.  Raises ClusterError if they do not come.
        """

    def attend(self, launcher: str) -> None:
        """An attempt has begun, whose ranks report to this socket."""


class OneNode(Rounds):
    """``Rounds`` of a launcher that needs no other for its decision: it counts restarts alone."""

    status = 0

    def __init__(self, run: Settings, say: Callable[[str], object]) -> None:
        self._run = run
        self._say = say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def next(self, before: AttemptResult | None) -> Settings | None:
        """See ``Rounds``; ranks that could not come together would not do so with the same settings again."""
        if before is None:
            return self._run
        if before.failure is None or before.failure.kind is FailureKind.JOIN:
            return None
        if self._run.attempt >= self._run.max_restarts:
            if self._run.max_restarts:
                self._say(f"no restart is left (--max-restarts {self._run.max_restarts})")
            return None
        self._run = replace(self._run, attempt=self._run.attempt + 1)
        self._say(f"all ranks start again: restart {self._run.attempt} of {self._run.max_restarts}")
        return self._run

    def attend(self, launcher: str) -> None:
        """See ``Rounds``; no node is waited for."""
