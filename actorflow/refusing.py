"""What a script reads that gives something else each time (clocks, iterators) goes in; what refuses to, and says so.

While a step is captured these stand where the others were: a plan would have what they gave once.  Other threads get
what they ask for.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from actorflow.find import is_user_class, is_user_file
from actorflow_compiler.errors import CaptureError
from actorflow_compiler.lines import STDLIB

__all__ = ["instead", "refusing_clocks"]

CLOCKS = tuple(
    getattr(time, name)
    for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
)
RANDOM = (os.urandom,)  # the system's
THREADS = (threading.Thread.start, ThreadPoolExecutor.submit)  # what they compute is no part of a trace
LOADS = (DataLoader.__iter__,)
_IN = (  # modules and classes, and which functions of theirs
    (time, CLOCKS), (os, RANDOM), (random, RANDOM), (threading.Thread, THREADS), (ThreadPoolExecutor, THREADS),
    (DataLoader, LOADS),
)  # fmt: skip


class _Refused:
    """Stands for an iterator."""

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        self._iterator, self._name, self._thread = iterator, name, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> _Refused:
        return self

    def __next__(self) -> Any:
        if threading.get_ident() == self._thread:
            _refuse(f"takes the next item of {self._name}", "take it outside and pass it as an argument")
        return next(self._iterator)


def instead(value: Any, name: str) -> Any:
    """What stands for a value called ``name``; None for a value that is the same each time."""
    if any(value is function for function in (*CLOCKS, *RANDOM)):
        return _refused(value)
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_user_class(type(value)):
        return _Refused(value, name)
    return None


@contextlib.contextmanager
def refusing_clocks() -> Iterator[None]:
    """In which code of the user's that asks for the time, or the system for random numbers, raises CaptureError."""
    were = [(module, name, f) for module, some in _IN for name, f in vars(module).items() if any(f is g for g in some)]
    try:
        for module, name, function in were:
            setattr(module, name, _refused(function))
        yield
    finally:
        for module, name, function in were:
            setattr(module, name, function)


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and function in LOADS:
            _refuse("takes batches from a DataLoader", "iterate over it outside, and pass each batch as an argument")
        if threading.get_ident() == thread and _asked_by_user(sys._getframe(1), deep=function in THREADS):
            if function in THREADS:
                _refuse("has another thread work", "all of it on one thread: ops of a plan run side by side anyway")
            what = "asks the system for random numbers" if function in RANDOM else "asks for the time"
            _refuse(what, "do this outside, and pass it as an argument if the step needs it")
        return function(*args, **kwargs)

    return call


def _asked_by_user(frame: FrameType | None, deep: bool) -> bool:
    """Whether the user's code calls; where ``deep``, also through Python's own."""
    while deep and frame is not None and frame.f_code.co_filename.startswith(STDLIB):
        if "-packages" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _refuse(what: str, instead: str) -> NoReturn:
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    raise CaptureError(
        f"{frame.f_code.co_filename}:{frame.f_lineno}: the step {what}, which it would do once, when it is captured, "
        f"and not in every call; expected: {instead}"
    )
