"""Check that all ranks do the same common steps in the same order.

Each rank's ledger has its own steps and those of the ranks next below it, of which each stands for all that are below
it.  It gets the digests of steps in batches, and compares each batch at once, so that it has as much to do for many
steps as for one.  It uses no clock and no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from actorflow.control.step_log import DIGEST, Described, StepKind

__all__ = ["Ledger", "StepDifference", "differs"]


@dataclass(frozen=True, slots=True)
class StepDifference:
    """Two ranks have done different things as their step of the same number."""

    step: int
    first: int  # the rank that told of its step first
    second: int


class Ledger:
    """Compares the n-th step of every rank with the n-th of all others.

    >>> ledger = Ledger(range(2))
    >>> ledger.add(0, b"digest 1digest 2")
    >>> ledger.alike, ledger.add(1, b"digest 1"), ledger.alike, ledger.take_alike()
    (0, None, 1, b'digest 1')
    >>> ledger.add(1, b"other  2")
    StepDifference(step=1, first=0, second=1)
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._done = dict.fromkeys(ranks, 0)  # rank → steps that it has told of
        self._ended: set[int] = set()
        self._digests = bytearray()  # of the steps that not all ranks have done; as the first rank told each
        self._first = 0  # number of the first of these
        self._from: deque[tuple[int, int]] = deque()  # step → the rank that told of it, and of those after it

    def add(self, rank: int, digests: bytes, ended: bool = False) -> StepDifference | None:
        """Record a rank's next steps; returns the first that differs from another rank's, if any does."""
        start = self._done[rank]
        at = (start - self._first) * DIGEST
        theirs = self._digests[at : at + len(digests)]
        if digests[: len(theirs)] != theirs:
            step = next(n for n in range(len(theirs) // DIGEST) if _at(digests, n) != _at(theirs, n))
            return StepDifference(start + step, self._teller(start + step), rank)
        if len(digests) > len(theirs):
            self._from.append((start + len(theirs) // DIGEST, rank))
            self._digests += digests[len(theirs) :]
        self._done[rank] += len(digests) // DIGEST
        if ended:
            self._ended.add(rank)
        return None

    def told(self, rank: int) -> int:
        """How many steps a rank has told of."""
        return self._done[rank]

    @property
    def alike(self) -> int:
        """How many steps all ranks have done, all alike."""
        return min(self._done.values())

    def take_alike(self) -> bytes:
        """Remove and return the digests of the steps that all ranks have done since the last time."""
        least = self.alike
        size = (least - self._first) * DIGEST
        found = bytes(self._digests[:size])
        del self._digests[:size]
        self._first = least
        while len(self._from) > 1 and self._from[1][0] <= least:
            self._from.popleft()
        return found

    @property
    def over(self) -> bool:
        """Whether all ranks have come to the ends of their scripts."""
        return len(self._ended) == len(self._done)

    def late(self, steps: int) -> list[int]:
        """The ranks that have not told of so many steps."""
        return [rank for rank, done in self._done.items() if done < steps]

    def missing(self, rank: int) -> tuple[int, int] | None:
        """The step that a rank has not done and another one has, and that rank; None if there is none."""
        number = self._done.get(rank)
        if number is None or (number - self._first) * DIGEST >= len(self._digests):
            return None
        return number, self._teller(number)

    def _teller(self, step: int) -> int:
        return next(rank for start, rank in reversed(self._from) if start <= step)


def _at(digests: bytes | bytearray, number: int) -> bytes:
    return bytes(digests[number * DIGEST : (number + 1) * DIGEST])


def differs(found: StepDifference, first: Described, second: Described) -> str:
    """The error's text for a difference, from what each of the two ranks says of its step."""
    both = f"rank {found.first} {first.text}\n  rank {found.second} {second.text}"
    if StepKind.END in (first.kind, second.kind):
        head = "a script ended while another rank went on"
    elif first.kind == second.kind == StepKind.CALL:
        head = "a call differs between ranks"
    else:
        head = "ranks do different things"
    return (
        f"{head}:\n  {both}\n"
        "Every rank runs the whole script and must make the same calls, with the same arguments, in the same order; "
        "look for a branch or a loop that depends on the rank, on time or on unseeded random numbers, or a sampler "
        "that gives each rank other rows (DistributedSampler): a job takes whole batches, and each rank uses its rows."
    )
