"""Calls of jobs enter by number, as this rank issues them and as every rank has made them; who waits for one goes on.

Other ranks' pulls are served on threads of their own, as soon as this rank is where the asking one is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from actorflow.control.cluster import Alone, Cluster
from actorflow.control.dropped import NOTHING, Dropped
from actorflow.runtime.call import Call

__all__ = ["Gates"]


class Gates:
    """How far one rank is; any thread.  Waiting raises what ended the run."""

    def __init__(self, cluster: Alone | Cluster) -> None:
        self._cluster = cluster
        self._changed = threading.Condition()
        self._issued: deque[tuple[int, Call]] = deque()  # calls that may be under way, by their number
        self._begun = 0
        self._gone: set[int] = set()  # calls that every rank has made and this one has not issued yet
        self._numbers: dict[int, int] = {}  # call → its number in the worker, until it may go
        self._gone_on = 0  # calls that every rank has made
        self._dropped: deque[tuple[int, Dropped]] = deque()  # with which of them word came of what all have let go of

    @property
    def begun(self) -> int:
        """Calls issued so far, counted as calls are."""
        return self._begun

    def issue(self, number: int, call: Call) -> bool:
        """This rank has issued a call; returns whether it may go: every rank has made it."""
        with self._changed:
            while self._issued and self._issued[0][1].done:
                self._issued.popleft()
            self._issued.append((number, call))
            self._begun = number + 1
            go = number in self._gone
            if go:
                self._gone.discard(number)
            else:
                self._numbers[number] = call.number
            self._changed.notify_all()
        return go

    def go(self, number: int, dropped: Dropped = NOTHING) -> int | None:
        """Every rank has made a call; returns its number in the worker, where this rank has issued it.

        ``dropped`` is what, by then, every rank's script has let go of.
        """
        with self._changed:
            self._gone_on = number + 1
            if dropped:
                self._dropped.append((number, dropped))
            self._changed.notify_all()
            mine = self._numbers.pop(number, None)
            if mine is None:
                self._gone.add(number)
        return mine

    def dropped_by(self, calls: int) -> Dropped:
        """What all ranks have let go of by the first ``calls`` calls; blocks until every rank has made these."""
        if self._gone_on < calls:
            self.until(lambda: self._gone_on >= calls)
        found = NOTHING
        with self._changed:
            while self._dropped and self._dropped[0][0] < calls:
                found |= self._dropped.popleft()[1]
        return found

    def moved(self) -> None:
        """Something that ``until`` waits for may have come."""
        with self._changed:
            self._changed.notify_all()

    def until(self, there: Callable[[], bool]) -> None:
        """Block until this rank is far enough."""
        with self._changed:
            self._changed.wait_for(lambda: there() or self._cluster.failed.is_set())
        if self._cluster.failure is not None:
            raise self._cluster.failure.error()

    def until_done(self, calls: int, there: Callable[[], bool] = lambda: True) -> None:
        """Block until the first ``calls`` calls are done, and this rank is far enough."""
        self.until(lambda: self._begun >= calls and there())
        with self._changed:
            last = [call for number, call in self._issued if number < calls][-1:]
        for call in last:
            call.wait(tell=False)
