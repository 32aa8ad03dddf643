"""Call the callbacks of jobs' results (``tp.Callback``) on a separate thread, each once and in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from actorflow.runtime.observer import Observer
from actorflow.support import background

__all__ = ["CallbackQueue", "CallbackObserver", "callbacks"]


class CallbackQueue:
    """The callbacks of one process, called one after the other in the order in which they were added."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[Any], object], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._left = 0
        self._changed = threading.Condition()  # guards ``_thread``, ``_error`` and ``_left``
        self._stopped = False

    def add(self, callback: Callable[[Any], object], result: Callable[[], Any]) -> None:
        """Queue ``callback(result())``.  Raises the exception of an earlier callback, if one has failed."""
        self._raise()
        with self._changed:
            self._left += 1
            if self._thread is None:
                self._thread = background.start(self._run, "actorflow-callbacks", self._stop)
        self._waiting.put((callback, result))

    def finish(self) -> None:
        """Wait until all queued callbacks have been called; raises the exception of a callback that has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left or threading.current_thread() is self._thread)
        self._raise()

    def _raise(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            callback, result = waiting
            error: BaseException | None = None
            try:
                if self._error is None and not self._stopped:  # after an error no further callback is called
                    callback(result())
            except BaseException as raised:
                error = raised
            with self._changed:
                self._error = self._error or error
                self._left -= 1
                self._changed.notify_all()

    def _stop(self) -> None:
        """Call no further callback, because the process ends."""
        self._stopped = True
        self._waiting.put(None)


callbacks = CallbackQueue()  # of this process


class CallbackObserver(Observer):
    """Waits for the callbacks of a process before its run ends."""

    def finish(self) -> None:
        """Wait for all callbacks; raises the exception of a callback that has failed."""
        callbacks.finish()
