"""Track which calls this rank has issued and all ranks have made, and let threads wait for either.

Threads that serve other ranks' pulls wait here until this rank has made the calls that the asking rank has made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from actorflow.control.cluster import Alone, Cluster
from actorflow.control.drops import NO_DROPS, DropSet
from actorflow.runtime.call import Call

__all__ = ["CallBarrier"]


class CallBarrier:
    """The progress of calls on this rank and on all ranks together; may be used on any thread.

    Waiting raises the error that ended the run.
    """

    def __init__(self, cluster: Alone | Cluster) -> None:
        self._cluster = cluster
        self._changed = threading.Condition()
        self._issued: deque[tuple[int, Call]] = deque()  # calls that may be under way, by their number
        self._begun = 0
        self._agreed: set[int] = set()  # calls that every rank has announced and this one has not issued yet
        self._numbers: dict[int, int] = {}  # call → its number in the worker; removed when all ranks have made the call
        self._agreed_calls = 0  # calls that every rank has made
        self._dropped: deque[tuple[int, DropSet]] = deque()  # (call, all that all ranks had released)

    @property
    def begun(self) -> int:
        """Calls issued so far."""
        return self._begun

    def issue(self, number: int, call: Call) -> bool:
        """Record that this rank has issued a call; returns whether every rank has made it, so that it may fire."""
        with self._changed:
            while self._issued and self._issued[0][1].done:
                self._issued.popleft()
            self._issued.append((number, call))
            self._begun = number + 1
            go = number in self._agreed
            if go:
                self._agreed.discard(number)
            else:
                self._numbers[number] = call.number
            self._changed.notify_all()
        return go

    def agreed(self, number: int, dropped: DropSet = NO_DROPS) -> int | None:
        """Record that every rank has made a call; returns its number in the worker, or None if not issued here yet.

        ``dropped`` are the plans and variables that every rank's script has released by then.
        """
        with self._changed:
            self._agreed_calls = number + 1
            if dropped:
                self._dropped.append((number, dropped))
            self._changed.notify_all()
            mine = self._numbers.pop(number, None)
            if mine is None:
                self._agreed.add(number)
        return mine

    def drops_by(self, calls: int) -> DropSet:
        """The plans and variables released on all ranks by the first ``calls`` calls; blocks until all made these."""
        if self._agreed_calls < calls:
            self.wait_until(lambda: self._agreed_calls >= calls)
        found = NO_DROPS
        with self._changed:
            while self._dropped and self._dropped[0][0] < calls:
                found |= self._dropped.popleft()[1]
        return found

    def notify(self) -> None:
        """Have waiting threads check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def wait_until(self, there: Callable[[], bool]) -> None:
        """Block until ``there()`` is true, or the run fails."""
        with self._changed:
            self._changed.wait_for(lambda: there() or self._cluster.failed.is_set())
        if self._cluster.failure is not None:
            raise self._cluster.failure.error()

    def wait_until_done(self, calls: int, there: Callable[[], bool] = lambda: True) -> None:
        """Block until the first ``calls`` calls are done, and ``there()`` is true."""
        self.wait_until(lambda: self._begun >= calls and there())
        with self._changed:
            last = [call for number, call in self._issued if number < calls][-1:]
        for call in last:
            call.wait(tell=False)
