"""Agree between ranks on the plans and variables to drop: those that every rank's script has released.

Ranks form a tree.  Each adds up what it and its subtree have released, so that rank 0 knows what all have; the others
check what it says against what they have themselves.  No clock and no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from actorflow.support.refusals import MessageRefused, RefusalReason

__all__ = ["NO_DROPS", "DropSet", "DropTally", "ReleasedHere", "drop_set"]


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


def _all(drops: DropSet) -> list[int | str]:
    return [*drops.plans, *drops.variables]


def drop_set(plans: Iterable[int], variables: Iterable[str]) -> DropSet:
    """The set of these plans and variables."""
    return DropSet(frozenset(plans), frozenset(variables))


class DropTally:
    """Collects the drops that each rank reports, and returns those that all ranks have reported.

    >>> tally = DropTally(range(2))
    >>> tally.report(0, DropSet(variables=frozenset({"w"})), call=3)
    >>> tally.report(1, DropSet(variables=frozenset({"w"})), call=5)
    >>> bool(tally.agreed(4))
    False
    >>> sorted(tally.agreed(5).variables)
    ['w']
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._by = dict.fromkeys(ranks, NO_DROPS)
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
        plans = frozenset.intersection(*(one.plans for one in self._by.values()))
        found = DropSet(plans, frozenset.intersection(*(one.variables for one in self._by.values())))
        self._forget(found)
        return found

    def forget(self, drops: DropSet, call: int) -> None:
        """Remove drops that all ranks have already carried out, of reports with calls up to this one."""
        if drops:
            self._forget(drops)
            for at in [at for at in self._later if at <= call]:
                self._later[at] = [(rank, found - drops) for rank, found in self._later[at]]

    def _forget(self, drops: DropSet) -> None:
        self._by = {rank: found - drops for rank, found in self._by.items()}


class ReleasedHere:
    """What a rank has told the master that its script has released, until all ranks have agreed on it.

    >>> here = ReleasedHere()
    >>> here.tell(DropSet(variables=frozenset({"w"})), step=5)
    >>> here.agree(DropSet(variables=frozenset({"w"})), steps=5)
    """

    def __init__(self) -> None:
        self._told: dict[int | str, deque[int]] = {}  # plan or variable → the steps with which it was told
        self._forgotten: deque[tuple[int, DropSet]] = deque()

    def tell(self, drops: DropSet, step: int) -> None:
        """Note what the master is told with a step; a name may come again, of something new."""
        for one in _all(drops):
            self._told.setdefault(one, deque()).append(step)

    def agree(self, drops: DropSet, steps: int) -> None:
        """Note that all ranks have released this in their first ``steps`` steps.

        Raises MessageRefused, with nothing changed, for anything that this rank has not told.
        """
        if unknown := [str(one) for one in _all(drops) if one not in self._told]:
            what = f"the drop of {', '.join(sorted(unknown))}"
            raise MessageRefused(RefusalReason.NUMBER, what, "what this rank's script has released")
        for one in _all(drops):
            self._remove_first(one)
        while self._forgotten and self._forgotten[0][0] <= steps:
            before, gone = self._forgotten.popleft()
            for one in _all(gone):
                while one in self._told and self._told[one][0] <= before:
                    self._remove_first(one)

    def forget(self, drops: DropSet, steps: int) -> None:
        """Note drops that all ranks have carried out by other means in their first ``steps`` steps.

        The master may still say so too, with the first of its words that covers these steps, but not later.
        """
        self._forgotten.append((steps, drops))

    def _remove_first(self, one: int | str) -> None:
        told = self._told[one]
        told.popleft()
        if not told:
            del self._told[one]
