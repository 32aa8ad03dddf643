"""Notice the first transfer that does not end in time, and call a callback.

A thread sleeps until the oldest call's time is over, and checks it then; nothing polls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actorflow.devices import Mark

__all__ = ["Patience", "Started"]

ASLEEP = 5.0  # seconds that a thread is woken too late when its process was stopped


@dataclass(slots=True, eq=False)
class Started:
    """A call under way, from when it is issued until all its marks have passed."""

    what: str  # description, for messages
    since: float  # seconds of the monotonic clock: when it was issued, or when the call before it was seen to end
    issued: bool = False  # the host has put all its operations into the queue
    marks: list[Mark] = field(default_factory=list)  # recorded after its operations

    def ended(self) -> bool:
        """Whether the call is done; never blocks.  False on a device that has failed, where it is not known."""
        try:
            return self.issued and all(mark.passed() for mark in self.marks)
        except RuntimeError:
            return False

    @property
    def seconds(self) -> float:
        """How many seconds the call has been under way at most."""
        return time.monotonic() - self.since


class Patience:
    """Watches calls, which end one after the other; passes the first that takes longer than ``seconds`` to ``late``.

    A call's time begins when it is issued or, if the host runs ahead, when the call before it ends: as long as calls
    keep ending, none is late.  After this process was stopped, times begin anew.  ``late`` is called on the watching
    thread.
    """

    def __init__(self, seconds: float, late: Callable[[Started], None]) -> None:
        self._seconds = seconds
        self._late = late
        self._changed = threading.Condition()
        self._calls: deque[Started] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, what: str) -> Started:
        """Watch a call that is being issued now."""
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
        """The oldest call that has not ended, as text; empty if all have ended."""
        with self._changed:
            waiting = [call for call in self._calls if not call.ended()]
        if not waiting:
            return ""
        return f"oldest NCCL call of {len(waiting)} under way: {waiting[0].what}, since {waiting[0].seconds:.1f} s"

    def close(self) -> None:
        """Stop watching."""
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
                    due = time.monotonic() + left
                    self._changed.wait(left)
                    if time.monotonic() > due + ASLEEP:
                        for call in self._calls:
                            call.since = time.monotonic()
                    continue
                break
            else:
                return
        self._late(oldest)
