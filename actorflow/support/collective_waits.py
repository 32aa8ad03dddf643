"""The collective of global tensors or of ``flow.comm`` that this process is in, for those who say who waits."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CollectiveInProgress", "MadeCalls", "calls_made", "collectives_entered", "has_made", "in_collective",
    "in_progress", "made_of_json", "told_circle",
]  # fmt: skip

REMEMBERED = 16  # calls of a channel


@dataclass(frozen=True, slots=True)
class CollectiveInProgress:
    """A collective that this process has entered and not left."""

    what: str  # "all_reduce of ranks [0,1]"
    peers: tuple[int, ...]  # the other ranks that it needs
    meets: str  # equal on all ranks that are in it
    channel: str = ""  # all ranks of it make its calls in one order: "ranks [0,1]"
    number: int = 0  # of the call, among those of its channel
    since: float = field(default_factory=time.monotonic)  # s


@dataclass(frozen=True, slots=True)
class MadeCalls:
    """The calls of one channel that this process has made."""

    count: int
    last: tuple[int, ...]  # checksums of ``meets`` of the last of them, at most ``REMEMBERED``

    def differs(self, number: int, meets: str) -> bool | None:
        """Whether the call of this number was another one; None if it has not been made."""
        if number >= self.count:
            return None
        back = self.count - number
        return back <= len(self.last) and self.last[-back] != checksum(meets)


def made_of_json(found: Mapping[str, Any]) -> dict[str, MadeCalls]:
    """The calls of each channel, from what ``dataclasses.asdict`` makes of them as JSON data."""
    return {channel: MadeCalls(one["count"], tuple(one["last"])) for channel, one in found.items()}


def has_made(made: Mapping[str, MadeCalls], channel: str, number: int, meets: str) -> bool:
    """Whether a rank that has made these calls has made the one of this number in a channel; False for no channel."""
    calls = made.get(channel) if channel else None
    return calls is not None and calls.differs(number, meets) is False


def told_circle(circle: Sequence[int], reasons: Sequence[str]) -> str:
    """What is said of ranks that wait for each other in a circle, each for the next, with the reason of each."""
    lines = [
        f"  rank {rank} waits for rank {other}: {reason}"
        for rank, other, reason in zip(circle, [*circle[1:], circle[0]], reasons, strict=True)
    ]
    who = " and ".join(f"rank {rank}" for rank in circle)
    return (
        f"{who} wait for each other in different collectives, for ever: all ranks of a group have to call the same "
        f"ones in the same order\n" + "\n".join(lines)
    )


_now: list[CollectiveInProgress] = []  # the innermost last; only the script's thread changes it
_entered = 0
_count: Counter[str] = Counter()  # calls made, by channel
_last: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=REMEMBERED))


def checksum(meets: str) -> int:
    """A number for what is equal on all ranks of a collective."""
    return zlib.crc32(meets.encode())


def in_progress() -> CollectiveInProgress | None:
    """The collective that this process is in; None if it is in none.  For any thread."""
    known = tuple(_now)
    return known[-1] if known else None


def collectives_entered() -> int:
    """How many this process has entered or left so far; it grows where anything happens."""
    return _entered


def calls_made() -> Mapping[str, MadeCalls]:
    """The calls that this process has made, by channel.  For any thread, while the script's stands in a collective."""
    return {channel: MadeCalls(count, tuple(_last[channel])) for channel, count in tuple(_count.items())}


@contextlib.contextmanager
def in_collective(what: str, peers: tuple[int, ...], meets: str, channel: str = "") -> Iterator[None]:
    """Tell that this process is in a collective, in the body.

    A call that raises is not counted among those of its channel.
    """
    global _entered
    _now.append(CollectiveInProgress(what, peers, meets, channel or meets, _count[channel or meets]))
    _entered += 1
    try:
        yield
        _last[channel or meets].append(checksum(meets))
        _count[channel or meets] += 1
    finally:
        _now.pop()
        _entered += 1
