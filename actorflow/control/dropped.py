"""What each rank's script has let go of goes in, as its calls tell it; what all of them have comes out, once.

Pure: no clock, no I/O.  The master keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["NOTHING", "Dropped", "Tally", "dropped"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Plans, by their numbers, and variables, by their names, that scripts cannot come to any more."""

    plans: frozenset[int] = frozenset()
    variables: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.plans or self.variables)

    def __or__(self, other: Dropped) -> Dropped:
        return Dropped(self.plans | other.plans, self.variables | other.variables)

    def __sub__(self, other: Dropped) -> Dropped:
        return Dropped(self.plans - other.plans, self.variables - other.variables)


NOTHING = Dropped()


def dropped(plans: Iterable[int], variables: Iterable[str]) -> Dropped:
    """These plans and variables."""
    return Dropped(frozenset(plans), frozenset(variables))


class Tally:
    """What some ranks have told of, and others have not yet.

    >>> tally = Tally(world=2)
    >>> tally.told(0, Dropped(variables=frozenset({"w"})))
    >>> bool(tally.agreed())
    False
    >>> tally.told(1, Dropped(variables=frozenset({"w"})))
    >>> sorted(tally.agreed().variables)
    ['w']
    """

    def __init__(self, world: int) -> None:
        self._by = [NOTHING] * world
        self._news = False

    def told(self, rank: int, dropped: Dropped) -> None:
        """Note what a rank tells of."""
        if dropped:
            self._by[rank] |= dropped
            self._news = True

    def agreed(self) -> Dropped:
        """What every rank has told of; it is forgotten."""
        if not self._news:
            return NOTHING
        self._news = False
        plans = frozenset.intersection(*(one.plans for one in self._by))
        found = Dropped(plans, frozenset.intersection(*(one.variables for one in self._by)))
        self.forget(found)
        return found

    def forget(self, dropped: Dropped) -> None:
        """These are gone, on all ranks alike."""
        if dropped:
            self._by = [one - dropped for one in self._by]
