"""Agree between ranks on the plans and variables to drop: those that every rank's script has released.

The tally is on the master.  It uses no clock and no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["NO_DROPS", "DropSet", "DropTally", "drop_set"]


@dataclass(frozen=True, slots=True)
class DropSet:
    """Plans (by number) and variables (by name) that scripts can no longer reach."""

    plans: frozenset[int] = frozenset()
    variables: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.plans or self.variables)

    def __or__(self, other: DropSet) -> DropSet:
        return DropSet(self.plans | other.plans, self.variables | other.variables)

    def __sub__(self, other: DropSet) -> DropSet:
        return DropSet(self.plans - other.plans, self.variables - other.variables)


NO_DROPS = DropSet()


def drop_set(plans: Iterable[int], variables: Iterable[str]) -> DropSet:
    """The set of these plans and variables."""
    return DropSet(frozenset(plans), frozenset(variables))


class DropTally:
    """Collects the drops that each rank reports, and returns those that all ranks have reported.

    >>> tally = DropTally(world=2)
    >>> tally.report(0, DropSet(variables=frozenset({"w"})), call=3)
    >>> tally.report(1, DropSet(variables=frozenset({"w"})), call=5)
    >>> bool(tally.agreed(4))
    False
    >>> sorted(tally.agreed(5).variables)
    ['w']
    """

    def __init__(self, world: int) -> None:
        self._by = [NO_DROPS] * world
        self._later: dict[int, list[tuple[int, DropSet]]] = {}  # call → reports that came with it
        self._news = False

    def report(self, rank: int, drops: DropSet, call: int) -> None:
        """Add a rank's report, which came with a call of it."""
        if drops:
            self._later.setdefault(call, []).append((rank, drops))

    def agreed(self, call: int) -> DropSet:
        """Remove and return the drops that every rank has reported with calls up to this one."""
        for at in [at for at in self._later if at <= call]:
            for rank, drops in self._later.pop(at):
                self._by[rank] |= drops
                self._news = True
        if not self._news:
            return NO_DROPS
        self._news = False
        plans = frozenset.intersection(*(one.plans for one in self._by))
        found = DropSet(plans, frozenset.intersection(*(one.variables for one in self._by)))
        self.forget(found)
        return found

    def forget(self, drops: DropSet) -> None:
        """Remove drops that all ranks have already carried out."""
        if drops:
            self._by = [one - drops for one in self._by]
            self._later = {
                call: [(rank, found - drops) for rank, found in reports] for call, reports in self._later.items()
            }
