"""Run work on daemon threads that are stopped and joined before the interpreter ends.

A thread that comes back from torch's code (an op, a store, a communicator) when the interpreter is gone already ends
the process with SIGABRT.  So at the end of the process each is told to stop, and waited for a little, until it is
gone: what it lets go of last, a communicator perhaps, may be torch's code, too.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["start"]

_SECONDS = 5.0  # that the end of the process waits for all of them

_working: dict[threading.Thread, Callable[[], object]] = {}  # what tells each to stop; those that are gone go later


def _nothing() -> None:
    """For work that has ended, or cannot be told to stop."""


def start(work: Callable[[], object], name: str, stop: Callable[[], object] = _nothing) -> threading.Thread:
    """Do ``work`` on a daemon thread called ``name``; ``stop``, which returns at once, makes it end soon."""

    def do() -> None:
        try:
            work()
        finally:
            _working[thread] = _nothing

    for gone in [other for other in tuple(_working) if other.ident is not None and not other.is_alive()]:
        _working.pop(gone, None)
    thread = threading.Thread(target=do, name=name, daemon=True)
    _working[thread] = stop
    thread.start()
    return thread


os.register_at_fork(after_in_child=_working.clear)  # threads do not live on in a fork


@atexit.register
def _end() -> None:
    working = tuple(_working.items())
    for _, stop in working:
        with suppress(Exception):  # the others are told, too
            stop()
    end = time.monotonic() + _SECONDS
    for thread, _ in working:
        with suppress(RuntimeError):  # another thread is about to start it
            thread.join(max(0.0, end - time.monotonic()))
