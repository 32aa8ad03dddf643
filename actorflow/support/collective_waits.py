"""The collective of global tensors or of ``flow.comm`` that this process is in, for those who say who waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["CollectiveInProgress", "collectives_entered", "in_collective", "in_progress"]


@dataclass(frozen=True, slots=True)
class CollectiveInProgress:
    """A collective that this process has entered and not left."""

    what: str  # "all_reduce of ranks [0,1]"
    peers: tuple[int, ...]  # the other ranks that it needs
    meets: str  # equal on all ranks that are in it
    since: float = field(default_factory=time.monotonic)  # s


_now: list[CollectiveInProgress] = []  # the innermost last; only the script's thread changes it
_entered = 0


def in_progress() -> CollectiveInProgress | None:
    """The collective that this process is in; None if it is in none.  For any thread."""
    known = tuple(_now)
    return known[-1] if known else None


def collectives_entered() -> int:
    """How many this process has entered or left so far; it grows where anything happens."""
    return _entered


@contextlib.contextmanager
def in_collective(what: str, peers: tuple[int, ...], meets: str) -> Iterator[None]:
    """Tell that this process is in a collective, in the body."""
    global _entered
    _now.append(CollectiveInProgress(what, peers, meets))
    _entered += 1
    try:
        yield
    finally:
        _now.pop()
        _entered += 1
