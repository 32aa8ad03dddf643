"""What one rank's script does in common with the others: a digest of each step, to be compared, and a text to be told.

The script's thread adds steps; the control plane's takes them in batches, and forgets those that all ranks have done.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from actorflow.control.drops import DropSet

__all__ = ["DIGEST", "CommonStep", "Described", "StepBatch", "StepKind", "StepLog"]

DIGEST = 8  # bytes of the digest of a step


class StepKind(enum.StrEnum):
    """The kinds of common steps."""

    CALL = "call"  # of a job
    GATHER = "gather"
    SCATTER = "scatter"
    END = "end"  # of the script


@dataclass(frozen=True, slots=True)
class CommonStep:
    """Something that every rank must do in the same order: a call, a gather, a scatter, or the end of its script."""

    kind: StepKind
    tag: str = ""  # a text that must be equal on all ranks
    text: str = ""  # the call as source text
    call: int = 0  # number of the call, as the frontend counts


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The next steps of a rank, of which each digest stands for all steps before it, too."""

    digests: bytes  # ``DIGEST`` bytes for each step
    dropped: tuple[tuple[int, DropSet], ...] = ()  # with the call that they came with: what the script has released
    ended: bool = False  # the last step is the end of the script
    wanted: int = 0  # steps of which the rank wants to know at once when all ranks have done them; 0: in its own time


@dataclass(frozen=True, slots=True)
class Described:
    """A common step for people."""

    kind: StepKind
    text: str  # made call 3: step(x: float32[4])


class StepLog:
    """The common steps of one rank, those which all ranks are known to have done left out.

    >>> log = StepLog()
    >>> _ = log.add(CommonStep(StepKind.CALL, "ab", "step(x)", 0)), log.add(CommonStep(StepKind.GATHER, "losses"))
    >>> len(log.take().digests), log.describe(1).text
    (16, "is at gather 'losses', after 1 call")
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: deque[tuple[CommonStep, int]] = deque()  # with the number of calls up to it
        self._first = 0  # number of the oldest of them
        self._history = b""
        self._calls = 0
        self._digests = bytearray()  # of steps that were not taken yet
        self._dropped: list[tuple[int, DropSet]] = []
        self._ended = False
        self._wanted = 0

    def add(self, step: CommonStep, dropped: DropSet | None = None) -> int:
        """Add the next step; returns a number of 63 bits that stands for it and all steps before it."""
        text = f"{step.kind} {step.call} {step.tag}".encode()
        with self._lock:
            self._history = blake2b(self._history + text, digest_size=DIGEST).digest()
            self._calls += step.kind is StepKind.CALL
            self._ended |= step.kind is StepKind.END
            self._steps.append((step, self._calls))
            self._digests += self._history
            if dropped:
                self._dropped.append((step.call, dropped))
            return int.from_bytes(self._history, "little") >> 1

    @property
    def told(self) -> int:
        """How many steps have been taken."""
        with self._lock:
            return self._first + len(self._steps) - len(self._digests) // DIGEST

    @property
    def forgotten(self) -> int:
        """How many steps all ranks are known to have done."""
        with self._lock:
            return self._first

    @property
    def ended(self) -> bool:
        """Whether this rank has come to the end of its script."""
        with self._lock:
            return self._ended

    def want(self) -> None:
        """Ask to be told at once when all ranks have done what this one has done so far."""
        with self._lock:
            self._wanted = self._first + len(self._steps)

    def take(self) -> StepBatch | None:
        """The steps since the last time; None if there is nothing to tell."""
        with self._lock:
            if not self._digests and not self._wanted:
                return None
            batch = StepBatch(bytes(self._digests), tuple(self._dropped), self._ended, self._wanted)
            self._digests.clear()
            self._dropped.clear()
            self._wanted = 0
            return batch

    def forget(self, steps: int) -> int:
        """Forget the first so many steps, which all ranks have done; returns the last call among them, -1 if none."""
        found = -1
        with self._lock:
            while self._first < steps and self._steps:
                step, _ = self._steps.popleft()
                self._first += 1
                if step.kind is StepKind.CALL:
                    found = step.call
        return found

    def last_call(self, steps: int) -> int:
        """The last call among the first so many steps, those that are forgotten left out; -1 if there is none."""
        with self._lock:
            known = islice(self._steps, max(0, steps - self._first))
            return max((step.call for step, _ in known if step.kind is StepKind.CALL), default=-1)

    def describe(self, number: int) -> Described | None:
        """What this rank has done as its step of this number; None if it has done nothing yet, or it is forgotten."""
        with self._lock:
            if not self._first <= number < self._first + len(self._steps):
                return None
            step, calls = self._steps[number - self._first]
        many = f"{calls} call{'s' * (calls != 1)}"
        if step.kind is StepKind.END:
            return Described(step.kind, f"came to the end of its script after {many}")
        if step.kind is StepKind.CALL:
            return Described(step.kind, f"made call {calls}: {step.text}")
        return Described(step.kind, f"is at {step.kind} {step.tag!r}, after {many}")
