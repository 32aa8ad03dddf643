"""Keep the messages for plans that are not installed yet, as far as ranks can be ahead of each other."""

from __future__ import annotations

import os
from collections import Counter

from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.transport.messages import Contributed, Credit, Filled, Ready, Region

__all__ = ["EarlyMessages"]

AHEAD = 64  # plans; a run compiles with all ranks, so that one is ahead by one plan at most
MOST = 1 << 16  # messages of one rank
ROOM = 1 << 28  # bytes inside these

Early = Ready | Credit | Filled | Region | Contributed


class EarlyMessages:
    """The messages that came before their plans, by plan; for one thread at a time.

    >>> early = EarlyMessages()
    >>> early.keep(3, Credit(plan=0, register=5))
    >>> early.take(0)
    [(3, Credit(plan=0, register=5))]
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[int, Early]]] = {}
        self._dropped: set[int] = set()  # numbers of plans
        self._next = 0  # one more than the highest number of a plan that was installed
        self._counts: Counter[int] = Counter()  # by rank
        self._bytes: Counter[int] = Counter()

    def keep(self, peer: int, message: Early) -> None:
        """Keep a message, but for what nobody needs any more of a plan that was dropped: credits and memory.

        Raises MessageRefused for anything else of such a plan, and where no rank is so far ahead.
        """
        number, size = message.plan, _bytes_of(message)
        if number in self._dropped:
            if isinstance(message, Region):
                os.close(message.descriptor)
            elif not isinstance(message, Credit):
                what = f"{type(message).__name__} of plan {number}, which all ranks have dropped"
                raise MessageRefused(RefusalReason.NUMBER, what, "none of it but credits", peer)
            return
        ahead = number >= self._next + AHEAD
        if ahead or self._counts[peer] >= MOST or self._bytes[peer] + size > ROOM:
            if isinstance(message, Region):
                os.close(message.descriptor)
            what = f"{type(message).__name__} of plan {number}"
            if ahead:
                raise MessageRefused(RefusalReason.NUMBER, what, f"one of a plan below {self._next + AHEAD}", peer)
            what = f"{self._counts[peer] + 1} messages for plans that are not here, of {self._bytes[peer] + size} bytes"
            raise MessageRefused(RefusalReason.LIMIT, what, f"at most {MOST}, of {ROOM} bytes", peer)
        self._counts[peer] += 1
        self._bytes[peer] += size
        self._kept.setdefault(number, []).append((peer, message))

    @property
    def plans(self) -> list[int]:
        """The numbers of the plans for which messages are kept."""
        return sorted(self._kept)

    def take(self, number: int) -> list[tuple[int, Early]]:
        """Remove the messages for a plan, which is installed now, in the order in which they came."""
        self._next = max(self._next, number + 1)
        self._dropped.discard(number)
        found = self._kept.pop(number, [])
        for peer, message in found:
            self._counts[peer] -= 1
            self._bytes[peer] -= _bytes_of(message)
        return found

    def drop(self, number: int) -> None:
        """Expect nothing more of a plan, which all ranks have dropped."""
        self._dropped.add(number)

    def close(self) -> None:
        """Close the descriptors in the messages that nobody takes any more."""
        for kept in self._kept.values():
            for _, message in kept:
                if isinstance(message, Region):
                    os.close(message.descriptor)
        self._kept.clear()


def _bytes_of(message: Early) -> int:
    return sum(map(len, message.payload)) if isinstance(message, Ready) and message.payload is not None else 0
