"""Notice the first transfer that does not end in time, and tell a callback.

Nothing polls: a thread sleeps until the oldest call's time is over, and looks then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actorflow.devices import Mark

__all__ = ["Patience", "Started"]


@dataclass(slots=True, eq=False)
class Started:
    """A call, from when it is issued until all its marks have passed."""

    what: str  # for people
    since: float  # seconds, of the monotonic clock: when it was issued, or the call before it was seen to have ended
    issued: bool = False  # its issuing has ended; before that the call is under way on the host
    marks: list[Mark] = field(default_factory=list)  # behind what the device does for it

    def ended(self) -> bool:
        """Whether it is done; never blocks.  A device that has failed says nothing of it: then it is not."""
        try:
            return self.issued and all(mark.passed() for mark in self.marks)
        except RuntimeError:
            return False

    @property
    def seconds(self) -> float:
        """For how long it could have been under way."""
        return time.monotonic() - self.since


class Patience:
    """Watches calls, which end one after the other; the first that takes longer than ``seconds`` goes to ``late``.

    A call's time begins when it is issued or, where the host runs ahead, when the one before it ends: as
    long as calls end, none is late.  ``late`` is called on a thread of its own.
    """

    def __init__(self, seconds: float, late: Callable[[Started], None]) -> None:
        self._seconds = seconds
        self._late = late
        self._changed = threading.Condition()
        self._calls: deque[Started] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, what: str) -> Started:
        """Note a call that is issued now."""
        started = Started(what, time.monotonic())
        with self._changed:
            self._drop_ended()
            self._calls.append(started)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name="actorflow nccl patience", daemon=True)
                self._thread.start()
            elif len(self._calls) == 1:
                self._changed.notify_all()
        return started

    def explain(self) -> str:
        """The oldest call that has not ended, for people; nothing where all have."""
        with self._changed:
            waiting = [call for call in self._calls if not call.ended()]
        if not waiting:
            return ""
        return f"oldest NCCL call of {len(waiting)} under way: {waiting[0].what}, since {waiting[0].seconds:.1f} s"

    def close(self) -> None:
        """Watch no longer."""
        with self._changed:
            self._closed = True
            self._calls.clear()
            self._changed.notify_all()

    def _drop_ended(self) -> None:
        ended = 0
        while self._calls and self._calls[0].ended():
            self._calls.popleft()
            ended += 1
        if ended and self._calls:
            self._calls[0].since = max(self._calls[0].since, time.monotonic())

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                self._drop_ended()
                if not self._calls:
                    self._changed.wait()
                    continue
                oldest = self._calls[0]
                left = self._seconds - oldest.seconds
                if left > 0:
                    self._changed.wait(left)
                    continue
                break
            else:
                return
        self._late(oldest)
