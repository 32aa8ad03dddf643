"""Find the innermost line of the user's own code on the stack, and tell its files from those of libraries."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

OURS = Path(__file__).resolve().parents[3]
OUTSIDE = ("site-packages", "dist-packages", "<string>", "<frozen", "<eval")
F = TypeVar("F", bound=Callable[..., Any])
STDLIB = str(Path(traceback.__file__).parent)


def is_users(path: str) -> bool:
    """Whether a file is the user's own: not a library's, Python's or actorflow's."""
    ours = any(part in path for part in ("actorflow_compiler", f"{OURS}/actorflow/", "actorflow_scheduler"))
    return not ours and not any(part in path for part in OUTSIDE) and not path.startswith(STDLIB)


def with_code(line: str) -> str:
    """``file:line`` with the text of that line: ``train.py:31: loss = f(x)``."""
    path, _, number = line.rpartition(":")
    code = linecache.getline(path, int(number)).strip() if number.isdecimal() else ""
    return f"{line}{f': {code}' if code else ''}"


def traced_line(meta: Mapping[str, Any]) -> str:
    """The user's line that a node of a trace comes from, by the node's ``meta``."""
    line = (meta.get("custom") or {}).get("line", "")
    return with_code(line) if line else "in the step"


_outermost: dict[int, CodeType] = {}  # of functions that call a user's step, by id, as hashes of code take long


def calls_the_step(function: F) -> F:
    """Mark a function that calls a user's step: lines are looked for inside of it, and not where the step is called.

    So a plan is the same, wherever in the script its job is called.
    """
    code: CodeType = function.__code__
    _outermost[id(code)] = code
    return function


class UserLines:
    """Finds the user's line again and again, and remembers for each code object whether it is the user's."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # by id, as hashes of code take long: its file, if it is the user's, else ""
        self._codes: list[CodeType] = []  # keeps the ids
        self._folder = os.getcwd()

    def here(self) -> str:
        """The innermost line of the user's own code that is running, as ``file:line``; "" if there is none.

        While a step runs, only its own code counts.  The path of a file below the working directory is relative to it.
        """
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            path = self._paths.get(id(code))
            if path is None:
                path = self._paths[id(code)] = self._written(code.co_filename)
                self._codes.append(code)
            if path:
                return f"{path}:{frame.f_lineno}"
            if id(code) in _outermost:
                return ""
            frame = frame.f_back  # type: ignore[assignment]  # None ends it
        return ""

    def _written(self, path: str) -> str:
        if not is_users(path):
            return ""
        inside = path.startswith(self._folder + os.sep)
        return os.path.relpath(path, self._folder) if inside else path


def asks_for_types(codes: Iterable[CodeType]) -> bool:
    """Whether code of the user compares the type of something with number types, as ``type(x) is float`` does."""
    return any("type" in c.co_names and {"int", "float"} & {*c.co_names} and is_users(c.co_filename) for c in codes)
