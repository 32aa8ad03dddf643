"""Track which calls this rank has issued and all ranks have made, and let threads wait for either.

Other ranks' pulls wait here until this rank has made the calls that the asking rank has made, alike.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

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
        self._histories: dict[int, int] = {}  # call → this rank's history up to it, of calls not yet known to be alike
        self._agreed_calls = 0  # calls that every rank has made
        self._dropped: deque[tuple[int, DropSet]] = deque()  # (call, all that all ranks had released)
        self._announced = -1  # the last call that this rank has announced
        self._awaited: dict[Future[None], Callable[[], bool]] = {}  # what waits without a thread, and for what
        self._forgotten: list[tuple[int, DropSet]] = []  # (call that made a plan, what all ranks dropped with it)

    @property
    def begun(self) -> int:
        """Calls issued so far."""
        return self._begun

    @property
    def agreed_calls(self) -> int:
        """Calls that every rank is known to have made, all alike."""
        return self._agreed_calls

    def announce(self, number: int, history: int) -> None:
        """Record that this rank announces a call, with the digest of its history up to it."""
        with self._changed:
            self._announced = number
            if number >= self._agreed_calls:
                self._histories[number] = history

    def issue(self, number: int, call: Call) -> None:
        """Record that this rank has issued a call."""
        with self._changed:
            while self._issued and self._issued[0][1].done:
                self._issued.popleft()
            self._issued.append((number, call))
            self._begun = number + 1
            self._tell()

    def agreed(self, number: int, dropped: DropSet = NO_DROPS) -> None:
        """Record that every rank has made all calls up to one, alike.

        ``dropped`` are the plans and variables that every rank's script has released by then.
        """
        with self._changed:
            self._agreed_calls = number + 1
            for made, gone in self._forgotten:  # agreed on before the master knew that it was gone
                if number <= made:
                    dropped -= gone
            self._forgotten = [(made, gone) for made, gone in self._forgotten if made > number]
            if dropped:
                self._dropped.append((number, dropped))
            while self._histories and (first := next(iter(self._histories))) <= number:
                del self._histories[first]
            self._tell()

    def history(self, calls: int) -> int:
        """The digest of what this rank has done up to its last of so many calls; -1: all ranks did the same."""
        with self._changed:
            return self._histories.get(calls - 1, -1)

    def wait_if_other(self, calls: int, history: int) -> None:
        """Return if another rank's history after so many calls, from ``history``, is this rank's, else raise.

        Which calls differ is found where all calls are compared; this waits for that.
        """
        if not self.alike(calls, history):
            self.wait_until(lambda: False)

    def alike(self, calls: int, history: int) -> bool:
        """Whether another rank's history after so many calls, from ``history``, is this rank's, as far as is known."""
        ours = self.history(calls)
        return ours == history or -1 in (ours, history)

    def forget(self, dropped: DropSet) -> None:
        """Forget plans and variables that all ranks have dropped by another agreement, with the last call."""
        with self._changed:
            if dropped:
                self._forgotten.append((self._announced, dropped))
            left = [(number, found - dropped) for number, found in self._dropped]
            self._dropped = deque((number, found) for number, found in left if found)

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
            self._tell()

    def _tell(self) -> None:
        """Have all that waits look again; the caller holds the lock."""
        self._changed.notify_all()
        for future in [one for one, there in self._awaited.items() if there() or self._cluster.failed.is_set()]:
            del self._awaited[future]
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def when(self, there: Callable[[], bool]) -> Future[None]:
        """What is done when ``there()`` is true, or the run has failed; whoever waits no longer cancels it."""
        found: Future[None] = Future()
        with self._changed:
            if there() or self._cluster.failed.is_set():
                found.set_result(None)
            else:
                self._awaited[found] = there
                found.add_done_callback(self._waits_no_more)
        return found

    def _waits_no_more(self, future: Future[None]) -> None:
        with self._changed:
            self._awaited.pop(future, None)

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
