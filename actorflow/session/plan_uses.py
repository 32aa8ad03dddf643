"""Track which plans are installed, which variables they use, and which plans the script cannot call any more.

Finalizers run at any time, on any thread, even inside locks.  They only append a number, which the next call handles.
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
        self._uses: dict[int, frozenset[str]] = {}  # installed plan → its variables
        self._parked: set[int] = set()  # put aside until the script uses their state again
        self._finalized: deque[int] = deque()  # plans reported by finalizers and not handled yet
        self._gone: set[int] = set()
        self._recent: dict[int, None] = {}  # installed plans in the order of their last calls

    def installed(self, number: int, uses: Iterable[str], handle: object) -> None:
        """Record an installed plan, which can be called as long as the object ``handle`` exists."""
        self._uses[number] = frozenset(uses)
        self._recent[number] = None
        weakref.finalize(handle, self._finalized.append, number).atexit = False

    def died(self, number: int) -> Callable[[Any], None]:
        """A finalizer to run, on any thread, when a plan cannot be called any more."""
        return partial(_append, self._finalized, number)

    def called(self, number: int) -> None:
        """Note that a plan is called."""
        del self._recent[number]
        self._recent[number] = None

    def unused(self, most: int) -> set[int]:
        """The installed plans but for those ``most`` that were called last; equal on all ranks."""
        return set([*self._recent][: max(len(self._recent) - most, 0)])

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
        """The installed ones of these plans."""
        return self._uses.keys() & set(plans)

    def used_by_others(self, plans: Collection[int]) -> set[str]:
        """The variables of all plans but these; equal on all ranks if ``plans`` is."""
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
        """Forget plans that are dropped; all ranks do so at the same call."""
        for number in numbers:
            self._uses.pop(number, None)
            self._recent.pop(number, None)
            self._gone.discard(number)
            self._parked.discard(number)


def _append(word: deque[int], number: int, _: Any) -> None:
    word.append(number)
