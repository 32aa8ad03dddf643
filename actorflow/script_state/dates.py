"""Refuse that code asks ``datetime.datetime`` and ``datetime.date`` what time it is.

Both are classes of C, whose methods cannot be replaced, and code compares and pickles the classes themselves.  So the
interpreter is asked to tell of each call of a function of C, in those captures whose code may ask for the time.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from types import BuiltinMethodType, FrameType
from typing import Any

__all__ = ["ASKING_NOW", "NOW", "watching_dates"]

ASKING_NOW = frozenset(("now", "today", "utcnow"))
DATES = (datetime.datetime, datetime.date)
NOW = tuple(getattr(kind, name) for kind in DATES for name in sorted(ASKING_NOW) if hasattr(kind, name))


@contextlib.contextmanager
def watching_dates(asked: Callable[[FrameType], None]) -> Iterator[None]:
    """A context in which ``asked`` is called with the frame of each call on this thread that asks a date for the time.

    It does nothing where a profiler looks at the calls.
    """

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and type(called) is BuiltinMethodType and called.__name__ in ASKING_NOW:
            kind = called.__self__
            if isinstance(kind, type) and issubclass(kind, datetime.date):
                asked(frame)

    if sys.getprofile() is not None:
        yield
        return
    sys.setprofile(watch)
    try:
        yield
    finally:
        if sys.getprofile() is watch:
            sys.setprofile(None)
