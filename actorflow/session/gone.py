"""Installed plans go in, and word of those that the script has let go of; what can be dropped comes out.

Finalizers run at any moment, on any thread and within locks: they append a number, and the next call looks at it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

__all__ = ["Gone"]


class Gone:
    """Which plans are installed on a rank, and which of them its script cannot call any more."""

    def __init__(self) -> None:
        self._uses: dict[int, frozenset[str]] = {}  # plan → its variables; those that are installed
        self._parked: set[int] = set()  # that wait for what they work on to come back
        self._word: deque[int] = deque()
        self._gone: set[int] = set()

    def installed(self, number: int, uses: Iterable[str], handle: object) -> None:
        """A plan can be called as long as somebody holds ``handle``."""
        self._uses[number] = frozenset(uses)
        weakref.finalize(handle, self._word.append, number).atexit = False

    def died(self, number: int) -> Callable[[Any], None]:
        """What to call, from anywhere, when a plan cannot be called any more."""
        return partial(_append, self._word, number)

    def park(self, number: int) -> None:
        """A plan is put aside."""
        self._parked.add(number)

    def unpark(self, number: int) -> None:
        """It is wanted again."""
        self._parked.discard(number)

    @property
    def news(self) -> bool:
        """Whether there is word of a plan that was not looked at yet."""
        return bool(self._word)

    def among(self, plans: Collection[int]) -> set[int]:
        """Those of these plans that are installed."""
        return self._uses.keys() & set(plans)

    def used_by_others(self, plans: Collection[int]) -> set[str]:
        """The variables of all plans but these; equal on all ranks where these are."""
        return set().union(*(uses for number, uses in self._uses.items() if number not in plans))

    def ready(self) -> set[str]:
        """The variables of plans that are not put aside; equal on all ranks."""
        return set().union(*(uses for number, uses in self._uses.items() if number not in self._parked))

    def uses(self, number: int) -> frozenset[str]:
        """The variables of a plan."""
        return self._uses.get(number, frozenset())

    def plans(self) -> set[int]:
        """Those that the script has let go of."""
        while self._word:
            number = self._word.popleft()
            if number in self._uses:
                self._gone.add(number)
        return set(self._gone)

    def used(self) -> set[str]:
        """The variables of all other plans."""
        return self.used_by_others(self.plans())

    def drop(self, numbers: Iterable[int]) -> None:
        """These are dropped, on all ranks alike."""
        for number in numbers:
            self._uses.pop(number, None)
            self._gone.discard(number)
            self._parked.discard(number)


def _append(word: deque[int], number: int, _: Any) -> None:
    word.append(number)
