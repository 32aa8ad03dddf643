"""Refuse sources of values that differ each time (clocks, files, iterators, system randomness) during a capture.

A plan would keep the value that was read once.  The functions are replaced during the capture.  Other threads, and code
that is not the user's, can still use them.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import genericpath
import io
import os
import pathlib
import posixpath
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinMethodType, FrameType, MethodWrapperType
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader

from actorflow.script_state.dates import ASKING_NOW, DATES, date_stand_ins
from actorflow.script_state.user_code import is_user_class, is_user_file
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.user_code import STDLIB

__all__ = ["refusing_stand_in", "refuse_nondeterminism"]

PLAIN = (str, bytes, int, float, complex, type(None))
BUILTIN_METHODS = (BuiltinMethodType, MethodWrapperType)
CLOCKS = tuple(
    getattr(time, name + unit)
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
    for unit in ("", "_ns")
    if hasattr(time, name + unit)
)
TIMES = (*CLOCKS, os.times)
CLOCKS_AT = {  # functions that tell the time if they are not given one → how many arguments come before it
    time.gmtime: 0, time.localtime: 0, time.ctime: 0, time.asctime: 0, time.strftime: 1,
}  # fmt: skip
NOW = tuple(getattr(kind, name) for kind in DATES for name in ASKING_NOW if hasattr(kind, name))
RANDOM = tuple(f for f in (os.urandom, getattr(os, "getrandom", None), torch.seed) if f)  # from the system
FRESH = (random.Random.seed,)  # … if it is given no seed
SEEDS = (torch.initial_seed,)  # during a capture the seed is actorflow's, not the script's
THREADS = (threading.Thread.start, ThreadPoolExecutor.submit)  # ops of other threads are no part of the trace
LOADS = (DataLoader.__iter__,)
OPENS = (builtins.open,)
ASKS = {"asks the system for random numbers": (*RANDOM, *FRESH), "asks for torch's seed": SEEDS}
READERS = (  # functions of libraries that open files of these names on behalf of user code
    torch.load, torch.from_file, np.load, np.loadtxt, np.genfromtxt, np.fromfile,
)  # fmt: skip
FILES = (*OPENS, os.stat, os.listdir, os.scandir)
_IN = (  # (module or class, its functions that are replaced)
    (time, (*CLOCKS, *CLOCKS_AT)), (os, (*RANDOM, os.times)), (random, RANDOM), (random.Random, FRESH),
    (threading.Thread, THREADS),
    (ThreadPoolExecutor, THREADS), (DataLoader, LOADS), (builtins, FILES), (io, FILES), (os, FILES),
    (torch, (*RANDOM, *SEEDS, *READERS)), (torch.serialization, READERS), (np, READERS),
    (torch.random, (*RANDOM, *SEEDS)),
)  # fmt: skip
_OF_FILES = tuple(  # files of the standard library that open files on behalf of user code
    text for one in (genericpath, os, pathlib, posixpath) for text in (str(one.__file__), f"<frozen {one.__name__}>")
)
_OF_RANDOM = tuple(str(one.__file__) for one in (random, secrets, uuid))  # … that ask for random numbers on its behalf


class _RefusedIterator:
    """An iterator that raises CaptureError on the thread of the capture."""

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        self._iterator, self._name, self._thread = iterator, name, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return self._send if name == "send" else getattr(self._iterator, name)

    def __iter__(self) -> _RefusedIterator:
        return self

    def __next__(self) -> Any:
        self._refuse()
        return next(self._iterator)

    def _send(self, value: Any) -> Any:
        """What ``send`` of a generator does."""
        self._refuse()
        return self._iterator.send(value)  # type: ignore[attr-defined]

    def _refuse(self) -> None:
        if threading.get_ident() == self._thread:
            _refuse(f"takes the next item of {self._name}", "take it outside and pass it as an argument")


def refusing_stand_in(value: Any, name: str) -> Any:
    """A stand-in that raises CaptureError, for the value called ``name``; None for a value that does not change."""
    if isinstance(value, PLAIN):
        return None
    if isinstance(value, type):
        return date_stand_ins(_refusing_function)[value] if value in DATES else None
    if any(value is function for function in (*TIMES, *CLOCKS_AT, *RANDOM, *READERS)):
        return _refusing_function(value)
    if isinstance(value, BUILTIN_METHODS):
        if any(value == function for function in NOW):
            return _refusing_function(value)
        stand_in = _iterator_stand_in(value.__self__, name)
        return None if stand_in is None else getattr(stand_in, value.__name__)
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
        return _tuple_stand_in(value, name)
    if type(value) is functools.partial:
        function, args = refusing_stand_in(value.func, name), _tuple_stand_in(value.args, name)
        made = function is not None or args is not None
        return functools.partial(function or value.func, *(args or value.args), **value.keywords) if made else None
    return _iterator_stand_in(value, name)


def _iterator_stand_in(value: Any, name: str) -> _RefusedIterator | None:
    """A stand-in for an iterator of a library; None for anything else."""
    known = isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_user_class(type(value))
    return _RefusedIterator(value, name) if known else None


def _tuple_stand_in(value: tuple[Any, ...], name: str) -> tuple[Any, ...] | None:
    """A tuple with stand-ins for some of its items; None if none needs one."""
    made = [refusing_stand_in(item, f"{name}[{at}]") for at, item in enumerate(value)]
    if all(one is None for one in made):
        return None
    rebuild: Callable[[list[Any]], Any] = getattr(type(value), "_make", tuple)
    return rebuild([item if one is None else one for item, one in zip(value, made, strict=True)])  # type: ignore[no-any-return]


@contextlib.contextmanager
def refuse_nondeterminism(named: Collection[str] = ()) -> Iterator[None]:
    """A context in which user code that reads the time, files, threads or system randomness raises CaptureError.

    ``named`` are the names in its code: the classes of dates are replaced only if it may ask them for the time.
    """
    were = [(module, name, f) for module, some in _IN for name, f in vars(module).items() if any(f is g for g in some)]
    dates = date_stand_ins(_refusing_function) if any(name in named for name in ASKING_NOW) else {}
    try:
        for module, name, function in were:
            setattr(module, name, _refusing_function(function))
        for real, stand_in in dates.items():
            setattr(datetime, real.__name__, stand_in)
        yield
    finally:
        for module, name, function in were:
            setattr(module, name, function)
        for real in dates:
            setattr(datetime, real.__name__, real)


def _refusing_function(function: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()
    asking = False  # whether the check below is itself looking at files

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal asking
        if asking:
            return function(*args, **kwargs)
        if threading.get_ident() == thread and function in LOADS:
            _refuse("takes batches from a DataLoader", "iterate over it outside, and pass each batch as an argument")
        if function in FRESH and _seed(*args, **kwargs) is not None:
            return function(*args, **kwargs)
        if len(args) > CLOCKS_AT.get(function, len(args)):
            return function(*args, **kwargs)
        through = STDLIB if function in THREADS else _OF_FILES if function in FILES else _OF_RANDOM
        asking = threading.get_ident() == thread
        try:
            asked = asking and _asked_by_user(sys._getframe(1), through)
        finally:
            asking = False
        if asked:
            if function in READERS:
                if function is not torch.load and not isinstance(args[0] if args else "", str | os.PathLike):
                    return function(*args, **kwargs)  # an open file, or a buffer
                _refuse("looks at a file", "load it outside, and let the step use what was loaded")
            if function in FILES:
                if function in OPENS and not _reads(*args, **kwargs):
                    return function(*args, **kwargs)
                _refuse("looks at a file", "read it outside, and pass what it says as an argument")
            if function in THREADS:
                _refuse("has another thread work", "all of it on one thread: ops of a plan run side by side anyway")
            what = next((text for text, some in ASKS.items() if function in some), "asks for the time")
            _refuse(what, "do this outside, and pass it as an argument if the step needs it")
        return function(*args, **kwargs)

    return call


def _seed(generator: object, a: object = None, *_: object, **__: object) -> object:
    """The seed that ``random.Random.seed`` is given with these arguments."""
    return a


def _reads(file: object, mode: str = "r", *_: object, **__: object) -> bool:
    """Whether ``open`` with these arguments allows reading."""
    return "r" in mode or "+" in mode


def _asked_by_user(frame: FrameType | None, through: str | tuple[str, ...]) -> bool:
    """Whether user code is the caller, directly or ``through`` these folders and files of the standard library."""
    while through and frame is not None and frame.f_code.co_filename.startswith(through):
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
