"""Refuse sources of values that differ each time (clocks, files, iterators, system randomness) during a capture.

A plan would keep the value that was read once.  The functions are replaced during the capture.  Other threads, and code
that is not the user's, can still use them.
"""

from __future__ import annotations

import builtins
import contextlib
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

from actorflow.script_state.dates import ASKING_NOW, NOW, watching_dates
from actorflow.script_state.user_code import is_user_class, is_user_file
from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.user_code import STDLIB

__all__ = ["StandIns", "refuse_nondeterminism"]

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
RANDOM = tuple(f for f in (os.urandom, getattr(os, "getrandom", None), torch.seed) if f)  # from the system
FRESH = (random.Random.seed,)  # … if it is given no seed
SEEDS = (torch.initial_seed,)  # during a capture the seed is actorflow's, not the script's
THREADS = (threading.Thread.start, ThreadPoolExecutor.submit)  # ops of other threads are no part of the trace
LOADS = (DataLoader.__iter__,)
OPENS = (builtins.open,)
ASKS = {"asks the system for random numbers": (*RANDOM, *FRESH), "asks for torch's seed": SEEDS}
TIME, OUTSIDE = "asks for the time", "do this outside, and pass it as an argument if the step needs it"
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


class StandIns:
    """What a capture sees in place of values that refuse: one stand-in for each value, so that ``is`` says the same."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # id of a value, which is kept alive → the value, its stand-in

    def of(self, value: Any, name: str) -> Any:
        """One that raises CaptureError, for the value called ``name``; None for a value that does not change."""
        if isinstance(value, (*PLAIN, type)):
            return None
        if id(value) not in self._made:
            if (made := self._make(value, name)) is None:
                return None
            self._made[id(value)] = value, made
        return self._made[id(value)][1]

    def _make(self, value: Any, name: str) -> Any:
        if any(value is function for function in (*TIMES, *CLOCKS_AT, *RANDOM, *READERS)):
            return _refusing_function(value)
        if isinstance(value, BUILTIN_METHODS):
            if any(value == function for function in NOW):
                return _refusing_function(value)
            stand_in = self.of(value.__self__, name) if _is_iterator(value.__self__) else None
            return None if stand_in is None else getattr(stand_in, value.__name__)
        if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            return self._tuple(value, name)
        if type(value) is functools.partial:
            return self._partial(value, name)
        return _RefusedIterator(value, name) if _is_iterator(value) else None

    def _partial(self, value: functools.partial[Any], name: str) -> functools.partial[Any] | None:
        function, args = self.of(value.func, name), self._tuple(value.args, name)
        if function is None and args is None:
            return None
        made = functools.partial(function or value.func, *(args or value.args), **value.keywords)
        vars(made).update(vars(value))
        return made

    def _tuple(self, value: tuple[Any, ...], name: str) -> tuple[Any, ...] | None:
        """A tuple with stand-ins for some of its items; None if none needs one."""
        made = [self.of(item, f"{name}[{at}]") for at, item in enumerate(value)]
        if all(one is None for one in made):
            return None
        rebuild: Callable[[list[Any]], Any] = getattr(type(value), "_make", tuple)
        items = [item if one is None else one for item, one in zip(value, made, strict=True)]
        return rebuild(items)  # type: ignore[no-any-return]


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of a library."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_user_class(type(value))


@contextlib.contextmanager
def refuse_nondeterminism(named: Collection[str] = ()) -> Iterator[None]:
    """A context in which user code that reads the time, files, threads or system randomness raises CaptureError.

    ``named`` are the names in its code: calls are watched only if it may ask dates for the time.
    """
    were = [(module, name, f) for module, some in _IN for name, f in vars(module).items() if any(f is g for g in some)]
    try:
        for module, name, function in were:
            setattr(module, name, _refusing_function(function))
        with contextlib.nullcontext() if ASKING_NOW.isdisjoint(named) else watching_dates(_refuse_time):
            yield
    finally:
        for module, name, function in were:
            setattr(module, name, function)


def _refusing_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """What refuses on this thread in place of a function: the same at each call, so that ``is`` says the same."""
    return _refusing_on(threading.get_ident(), function)


@functools.lru_cache(maxsize=1000)
def _refusing_on(thread: int, function: Callable[..., Any]) -> Callable[..., Any]:
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
            what = next((text for text, some in ASKS.items() if function in some), TIME)
            _refuse(what, OUTSIDE)
        return function(*args, **kwargs)

    return call


def _refuse_time(frame: FrameType) -> None:
    """Refuse that the code of this frame asks for the time, if it is the user's."""
    if _asked_by_user(frame, _OF_RANDOM):
        _refuse(TIME, OUTSIDE)


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
