"""Functions that call ``float`` go in; while a step is captured, what they call leaves stand-ins for numbers open.

``float(step) / float(warmup)`` is how schedules are written; Python would have ``float`` give a plain number.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from actorflow.find import Found
from actorflow.looked import Named, Scheduler
from actorflow_compiler.numbers import as_float

__all__ = ["open_floats"]

NAME = "float"


@contextlib.contextmanager
def open_floats(found: Found) -> Iterator[None]:
    """In which the script's functions, and those of schedulers, have a ``float`` of their own.

    Not where some of them name it otherwise than to call it: as a type it has to be what it is.
    """
    opened = []
    for scope in [*_of_script(found), *_of_schedulers(found)]:
        if NAME not in scope:
            scope[NAME] = as_float
            opened.append(scope)
    try:
        yield
    finally:
        for scope in opened:
            del scope[NAME]


def _of_script(found: Found) -> Iterable[dict[str, Any]]:
    """The globals of functions of the script that call it."""
    if not all(map(_only_calls, found.codes)):
        return []
    return [one.holder for one in found.looked if type(one) is Named and NAME in one.names]


def _of_schedulers(found: Found) -> Iterable[dict[str, Any]]:
    """The globals of functions that schedulers ask for factors."""
    for one in found.looked:
        for function in one.holder.get("lr_lambdas", ()) if isinstance(one, Scheduler) else ():
            while isinstance(function, functools.partial):
                function = function.func
            if isinstance(function, FunctionType) and _only_calls(function.__code__):
                yield function.__globals__


def _only_calls(code: CodeType) -> bool:
    """Whether a function that names it calls it, in each place: it is loaded together with the place of a callee."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    loads = (i for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL" and i.argval == NAME)
    return all(i.arg is not None and i.arg & 1 for i in loads) and all(map(_only_calls, inner))
