"""Keep stand-ins for numbers symbolic when a step that is captured calls ``float`` or ``int`` on them.

Schedules are written as ``float(step) / float(warmup)``, and queues as ``ptr = int(self.queue_ptr)``; Python's own
functions would turn these into plain numbers.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.sources import GlobalsSource, SchedulerSource
from actorflow_compiler.numbers.unbacked import as_float, as_int

__all__ = ["symbolic_casts"]

CASTS: Mapping[str, Callable[..., Any]] = {"float": as_float, "int": as_int}


@contextlib.contextmanager
def symbolic_casts(found: SearchResult) -> Iterator[None]:
    """A context in which functions of the script and of schedulers have a ``float`` and ``int`` that keep stand-ins.

    If a function of the script uses one of the names other than in calls, all of them keep Python's own: it may be used
    as a type.
    """
    opened = []
    for name, function in CASTS.items():
        for scope in [*_of_script(found, name), *_of_schedulers(found, name)]:
            if name not in scope:
                scope[name] = function
                opened.append((scope, name))
    try:
        yield
    finally:
        for scope, name in opened:
            del scope[name]


def _of_script(found: SearchResult, name: str) -> Iterable[dict[str, Any]]:
    """The globals of the script's functions that name it; none if a function uses the name other than in calls."""
    if not all(_only_calls(code, name) for code in found.codes):
        return []
    return [one.holder for one in found.sources if type(one) is GlobalsSource and name in one.names]


def _of_schedulers(found: SearchResult, name: str) -> Iterable[dict[str, Any]]:
    """The globals of the functions (``lr_lambdas``) that schedulers call for factors."""
    for one in found.sources:
        for function in one.holder.get("lr_lambdas", ()) if isinstance(one, SchedulerSource) else ():
            while isinstance(function, functools.partial):
                function = function.func
            if isinstance(function, FunctionType) and _only_calls(function.__code__, name):
                yield function.__globals__


def _only_calls(code: CodeType, name: str) -> bool:
    """Whether code uses the name only in calls: then each load also pushes NULL, as CPython does for callees."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    loads = (i for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL" and i.argval == name)
    return all(i.arg is not None and i.arg & 1 for i in loads) and all(_only_calls(one, name) for one in inner)
