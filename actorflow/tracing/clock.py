"""Estimate how far another machine's clock is ahead of this one's, as NTP does.

An answer that came back within r nanoseconds was given r / 2 ago, with an error of at most r / 2; of several round
trips the shortest is used.  Clocks drift apart by tens of microseconds per second, so there are two estimates, at the
begin and at the end of a recording, and times between them are interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actorflow.runtime.recorder import clock

__all__ = ["ROUNDS", "Estimate", "SharedClock", "estimate"]

ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """The result of one comparison of two clocks."""

    at: int  # ns, on this machine's clock
    ahead: int  # ns that the other clock was ahead
    doubt: int  # ns, the largest error of ``ahead``


def estimate(ask: Callable[[], int], rounds: int = ROUNDS, now: Callable[[], int] = clock) -> Estimate:
    """Compare with a clock that ``ask`` reads; the shortest of several round trips counts."""
    best: Estimate | None = None
    for _ in range(rounds):
        sent = now()
        there = ask()
        back = now()
        middle, doubt = (sent + back) // 2, (back - sent + 1) // 2
        if best is None or doubt < best.doubt:
            best = Estimate(middle, there - middle, doubt)
    assert best is not None, "at least one round trip"
    return best


@dataclass(frozen=True, slots=True)
class SharedClock:
    """Turns this machine's nanoseconds into those of the common clock, which begins at ``begin`` on the other's."""

    begin: int  # ns
    estimates: Sequence[Estimate] = ()  # empty if both clocks are the same machine's

    @property
    def doubt(self) -> int:
        """The error bound of the estimates, in nanoseconds; drift between them is not included."""
        return max((e.doubt for e in self.estimates), default=0)

    def __call__(self, at: int) -> int:
        """Convert nanoseconds of this machine's clock to the common clock."""
        return at + self._ahead(at) - self.begin

    def _ahead(self, at: int) -> int:
        if not self.estimates:
            return 0
        first, last = self.estimates[0], self.estimates[-1]
        if first.at == last.at:
            return first.ahead
        return first.ahead + (last.ahead - first.ahead) * (at - first.at) // (last.at - first.at)
