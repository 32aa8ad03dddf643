"""A Python function's source and that of all it refers to, by which two processes tell whether it does the same."""

from __future__ import annotations

import builtins
import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

__all__ = ["function_source"]

_PURE = {  # packages whose functions do the same in each process that has the same versions
    "builtins", "collections", "functools", "itertools", "math", "numpy", "operator", "torch", "typing",
}  # fmt: skip
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEFINITIONS = (FunctionType, BuiltinFunctionType, type)


def function_source(function: Callable[..., Any]) -> str | None:
    """The source of a function, of the file that defines it, and of the functions that it calls, with plain values.

    None where it refers to anything of which that is not known: another module, an object, a variable that is
    no plain value.
    """
    parts = [*_parts(inspect.unwrap(function), set())]
    return None if None in parts else "\n".join(map(str, parts))


def _parts(function: Any, seen: set[int]) -> Iterator[str | None]:
    """The texts; None for what is not known."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if not isinstance(function, FunctionType):
        yield None
        return
    try:
        yield inspect.getsource(function)
        yield Path(inspect.getsourcefile(function) or "").read_text()
    except (OSError, TypeError, ValueError):
        yield None
    for cell in function.__closure__ or ():
        try:
            yield from _value(cell.cell_contents, seen)
        except ValueError:  # nothing is assigned to the variable yet
            yield None
    yield from _value((function.__defaults__, sorted((function.__kwdefaults__ or {}).items())), seen)
    for kind, name in sorted(set(_names(function.__code__))):
        if kind == "import":
            yield name if _is_pure(name) else None
        elif name in function.__globals__:
            yield name
            yield from _value(function.__globals__[name], seen)
        elif not hasattr(builtins, name):
            yield None


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """The modules that code imports and the global names that it reads, also in functions within."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield "import", str(step.argval)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield "global", str(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _value(value: Any, seen: set[int]) -> Iterator[str | None]:
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif type(value) in (tuple, list):
        for one in value:
            yield from _value(one, seen)
    elif isinstance(value, ModuleType):
        yield value.__name__ if _is_pure(value.__name__) else None
    elif _is_pure(str(getattr(value, "__module__", None))) and callable(value):
        yield f"{value.__module__}.{value.__qualname__}" if _is_known_by_name(value) else None
    else:
        yield from _parts(value, seen)


def _is_known_by_name(value: Any) -> bool:
    """Whether a callable of a known package is told by its name: no object of its classes that a script has made."""
    name = getattr(value, "__qualname__", None)
    if name is None or isinstance(value, _DEFINITIONS):
        return name is not None
    found: Any = sys.modules.get(value.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _is_pure(module: str) -> bool:
    return module.partition(".")[0] in _PURE
