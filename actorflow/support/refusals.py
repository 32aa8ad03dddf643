"""Refuse what comes from outside and is nothing that this run sends, and count it by its door and the reason.

A check comes before anything changes.  What a door does with a refusal depends on who has sent the message: where it is
a rank of this run, the run ends and names it, since going on would be wrong; anybody else is not listened to any more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from actorflow.support.terminal import say
from actorflow_compiler.core.errors import ClusterError

__all__ = ["REFUSALS", "MessageRefused", "RefusalCount", "RefusalReason"]

LINES, SPAN = 10, 60.0  # most lines that are printed in so many seconds; all refusals are counted
SHOWN = 300  # most characters of what was found that an error shows: it may be anything


class RefusalReason(StrEnum):
    """What is wrong with a message."""

    UNREADABLE = "unreadable"  # bytes that are no message
    UNKNOWN_FIELD = "unknown field"
    SENDER = "wrong sender"  # one who never sends such a message, or not to this process
    NUMBER = "unknown number"  # a plan, register, group, rank or call that does not exist, or is another rank's
    SEQUENCE = "out of turn"  # repeated, left out, or never asked for
    SLOT = "no slot"  # a token for which no slot is free, or a credit for a slot that is not taken
    SIZE = "wrong size"
    VALUE = "wrong value"  # a number or a text that is none of those which are possible
    MEMORY = "wrong memory"  # a descriptor of something else than was agreed
    LIMIT = "too much"


class MessageRefused(ClusterError):
    """A message was refused before it changed anything."""

    def __init__(self, reason: RefusalReason, found: str, expected: str, sender: int = -1) -> None:
        """``found`` and ``expected`` are texts; ``sender`` is the rank that has sent it, -1 where that is not known."""
        super().__init__(reason, found, expected, sender)  # so that it can be copied
        self.reason, self.expected, self.sender = reason, expected, sender
        self.found = found if len(found) <= SHOWN else f"{found[:SHOWN]}…"

    @property
    def cause(self) -> str:
        """What was found and expected, as the end of a sentence that begins with its sender."""
        return f"sent what no rank sends ({self.reason}): {self.found}; expected {self.expected}"

    def of(self, sender: int) -> MessageRefused:
        """The same of this rank, unless it names one."""
        return self if self.sender >= 0 else MessageRefused(self.reason, self.found, self.expected, sender)

    def __str__(self) -> str:
        who = f"rank {self.sender}" if self.sender >= 0 else "somebody"
        return (
            f"{who} {self.cause}. Install the same version of actorflow on every node; where they have it, see who "
            "else knows the token of the run."
        )


class RefusalCount:
    """How often which door has refused messages, and why; any thread.

    >>> count = RefusalCount(say=print)
    >>> count.add("pull", MessageRefused(RefusalReason.SIZE, "9 bytes", "8"), "ipv4:10.0.0.7:4242")
    a message was refused (pull, from ipv4:10.0.0.7:4242): wrong size: 9 bytes; expected 8
    >>> count.text()
    'refused messages: 1 (pull: wrong size 1)'
    """

    def __init__(self, say: Callable[[str], object] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say or _print, clock
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, RefusalReason]] = Counter()
        self._printed: deque[float] = deque(maxlen=LINES)  # when the last lines were

    def add(self, door: str, error: MessageRefused, who: str = "") -> None:
        """Count a refusal and, but for a flood of them, say it; ``who``: an address, or other words for the sender."""
        with self._lock:
            self._counts[door, error.reason] += 1
            now = self._clock()
            full = len(self._printed) == LINES and now - self._printed[0] < SPAN
            if not full:
                self._printed.append(now)
        if not full:
            whom = f", from {who}" if who else ""
            self._say(f"a message was refused ({door}{whom}): {error.reason}: {error.found}; expected {error.expected}")

    def of(self, door: str) -> dict[RefusalReason, int]:
        """The counts of one door."""
        with self._lock:
            return {reason: count for (at, reason), count in self._counts.items() if at == door}

    def text(self) -> str:
        """All counts for people; empty where nothing was refused."""
        with self._lock:
            counts = sorted(self._counts.items())
        if not counts:
            return ""
        each = ", ".join(f"{door}: {reason} {count}" for (door, reason), count in counts)
        return f"refused messages: {sum(count for _, count in counts)} ({each})"


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be gone
        say(text)


REFUSALS = RefusalCount()  # of this process
