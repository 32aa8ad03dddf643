"""Count for how long peers have given no sign of life, in time during which this process itself was running."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LongSilence", "SilenceCounter", "SilenceEvent"]


RECENT = 5  # ticks for which a process knows that it was stopped


class SilenceEvent(enum.Enum):
    """What has become of a peer's silence."""

    SUSPECT = "suspect"  # it has lasted for a while
    LONG = "long"  # it has lasted as long as the limit, or twice as long, and so on
    OVER = "over"  # the peer, which was a suspect, has given a sign of life


@dataclass(frozen=True, slots=True)
class LongSilence:
    """A peer's silence that others should know about."""

    peer: int
    seconds: float
    event: SilenceEvent


class SilenceCounter:
    """The silence of each peer, counted in ticks of this process; uses no clock and no I/O.

    A process that was stopped, or whose machine was, finds on waking that long has passed since its peers' last signs
    of life, which wait to be read.  So what passes between two ticks counts as two ticks' length at most.

    >>> counter = SilenceCounter(suspect=5.0, limit=15.0, tick=1.0)
    >>> [counter.tick(float(second), {1: False}) for second in range(5)][-1]
    []
    >>> counter.tick(5.0, {1: False})
    [LongSilence(peer=1, seconds=5.0, event=<SilenceEvent.SUSPECT: 'suspect'>)]
    >>> counter.tick(6.0, {1: True})
    [LongSilence(peer=1, seconds=6.0, event=<SilenceEvent.OVER: 'over'>)]
    """

    def __init__(self, suspect: float, limit: float, tick: float) -> None:
        self._suspect, self._limit = suspect, limit  # seconds
        self._most = 2 * tick
        self._last: float | None = None
        self._gaps: deque[float] = deque(maxlen=RECENT)  # seconds before each of the last ticks; 0 unless too long
        self._silent: dict[int, float] = {}  # peer → seconds

    def begin(self, now: float) -> None:
        """Count from now on, and not from the first tick, before which this process may be stopped, too."""
        self._last = now

    def tick(self, now: float, heard: Mapping[int, bool]) -> list[LongSilence]:
        """Count the time since the last tick; ``heard``: each peer, and whether it gave a sign of life meanwhile.

        ``now`` is in seconds of any clock that never goes back.  A peer that is new begins with no silence, and one
        that is missing is forgotten.
        """
        passed = 0.0 if self._last is None else min(now - self._last, self._most)
        self._gaps.append(self._gap(now))
        self._last = now
        found = []
        silent: dict[int, float] = {}
        for peer, sign in heard.items():
            before = self._silent.get(peer)
            after = 0.0 if before is None else before + passed
            silent[peer] = 0.0 if sign else after
            if before is None:
                continue
            if sign:
                if before >= self._suspect:
                    found.append(LongSilence(peer, after, SilenceEvent.OVER))
                continue
            if before < self._suspect <= after:
                found.append(LongSilence(peer, after, SilenceEvent.SUSPECT))
            if before // self._limit < after // self._limit:
                found.append(LongSilence(peer, after, SilenceEvent.LONG))
        self._silent = silent
        return found

    def of(self, peer: int) -> float:
        """The seconds of a peer's silence."""
        return self._silent.get(peer, 0.0)

    def stopped(self, now: float) -> float:
        """For how many seconds this process itself was stopped, at most in one go; 0 where that is some ticks ago.

        It is ticks that count, as a process that was stopped may hardly run afterwards on a busy machine.
        """
        return max(self._gap(now), *self._gaps, 0.0)

    def _gap(self, now: float) -> float:
        """The seconds since the last tick, if they are too many."""
        passed = 0.0 if self._last is None else now - self._last
        return passed if passed > self._most else 0.0

    @property
    def longest(self) -> float:
        """The seconds of the longest silence; 0 without peers."""
        return max(self._silent.values(), default=0.0)
