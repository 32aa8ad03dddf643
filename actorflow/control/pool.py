"""A pool of daemon threads that serves until the process has ended.

``concurrent.futures.ThreadPoolExecutor`` rejects work once the script's last line is done, but a rank may
still have to serve its peers then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

__all__ = ["DaemonPool"]

P = ParamSpec("P")
T = TypeVar("T")


class DaemonPool(Executor):
    """At most ``size`` daemon threads, started as they are needed."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0  # waiting threads minus queued calls
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` on a thread of the pool.  Raises RuntimeError after ``shutdown``."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._work.put(run)
            self._idle -= 1
            if self._idle < 0 and self._threads < self._size:
                self._threads += 1
                self._idle += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()
        return future

    def _serve(self) -> None:
        while (run := self._work.get()) is not None:
            run()
            with self._lock:
                self._idle += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Reject further calls; threads end after the queued ones.  Waits for nothing, and cancels nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._threads):
                    self._work.put(None)
