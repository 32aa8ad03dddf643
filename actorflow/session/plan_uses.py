"""Keep which plans are installed, which variables they use, and which the script cannot call any more.

Finalizers run at any moment, on any thread and within locks: they append a number, and the next call looks at it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

__all__ = ["PlanUses"]


class PlanUses:
    """The plans that are installed on a rank, their variables, and which plans its script cannot call any more."""

    def __init__(self) -> None:
        self._uses: dict[int, frozenset[str]] = {}  # plan → its variables; those that are installed
        self._parked: set[int] = set()  # put aside until the script uses their state again
        self._finalized: deque[int] = deque()  # appended to by finalizers, not looked at yet
        self._gone: set[int] = set()

    def installed(self, number: int, uses: Iterable[str], handle: object) -> None:
        """A plan can be called as long as somebody holds ``handle``."""
        self._uses[number] = frozenset(uses)
        weakref.finalize(handle, self._finalized.append, number).atexit = False

    def died(self, number: int) -> Callable[[Any], None]:
        """What to call, from anywhere, when a plan cannot be called any more."""
        return partial(_append, self._finalized, number)

    def park(self, number: int) -> None:
        """Note that a plan is put aside."""
        self._parked.add(number)

    def unpark(self, number: int) -> None:
        """Note that a plan is in use again."""
        self._parked.discard(number)

    @property
    def news(self) -> bool:
        """Whether finalizers have reported plans that ``plans`` has not looked at yet."""
        return bool(self._finalized)

    def among(self, plans: Collection[int]) -> set[int]:
        """Those of these plans that are installed."""
        return self._uses.keys() & set(plans)

    def used_by_others(self, plans: Collection[int]) -> set[str]:
        """The variables of all plans but these; equal on all ranks where these are."""
        return set().union(*(uses for number, uses in self._uses.items() if number not in plans))

    def ready(self) -> set[str]:
        """The variables of plans that are in use; equal on all ranks."""
        return set().union(*(uses for number, uses in self._uses.items() if number not in self._parked))

    def uses(self, number: int) -> frozenset[str]:
        """The variables of a plan."""
        return self._uses.get(number, frozenset())

    def plans(self) -> set[int]:
        """The plans that the script has released."""
        while self._finalized:
            number = self._finalized.popleft()
            if number in self._uses:
                self._gone.add(number)
        return set(self._gone)

    def used(self) -> set[str]:
        """The variables of all other plans."""
        return self.used_by_others(self.plans())

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove plans that are dropped, on all ranks alike."""
        for number in numbers:
            self._uses.pop(number, None)
            self._gone.discard(number)
            self._parked.discard(number)


def _append(word: deque[int], number: int, _: Any) -> None:
    word.append(number)
