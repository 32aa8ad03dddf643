"""Distinguish the user's own files and classes from those of libraries, and find the line of user code that runs."""

from __future__ import annotations

import faulthandler
import functools
import linecache
import re
import site
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["HEAP_TYPE", "has_user_class", "is_installed", "is_user_class", "is_user_file", "line_of", "user_line"]

HEAP_TYPE = 1 << 9  # of a class that Python code has made (Py_TPFLAGS_HEAPTYPE)
OURS = ("actorflow", "actorflow_compiler", "actorflow_scheduler", "actorflow_protos")
INSTALLED = ("site-packages", "dist-packages")  # folders of libraries, also of those that PYTHONPATH names
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)  # as faulthandler writes it


@functools.cache
def _library_folders() -> Sequence[str]:
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(torch.__file__).parent)]
    ours = [str(Path(file).parent) for name in OURS if (file := getattr(sys.modules.get(name), "__file__", None))]
    return tuple({str(Path(f).resolve()) + "/" for f in folders + ours})


@functools.cache
def is_user_file(filename: str | None) -> bool:
    """Whether a source file is the user's own, and neither a library's nor actorflow's."""
    if filename is None or filename.startswith("<frozen"):
        return False
    if filename.startswith("<"):
        return True
    path = Path(filename).resolve()
    return not any(part in INSTALLED for part in path.parts) and not str(path).startswith(tuple(_library_folders()))


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module belongs to a library that somebody has installed: not Python's, torch's, NumPy's or ours."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package not in ("torch", "numpy", *OURS) and any(part in INSTALLED for part in Path(file).parts)


_user_classes: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # a script may make ever new ones


def is_user_class(owner: Any) -> bool:
    """Whether a class comes from the user's own code."""
    known = _user_classes.get(owner)
    if known is None:
        known = _user_classes[owner] = _is_of_user(owner)
    return known


def _is_of_user(owner: Any) -> bool:
    if owner.__module__ == "__main__":
        return True
    module = sys.modules.get(owner.__module__)
    return module is not None and is_user_file(getattr(module, "__file__", None))


def has_user_class(value: Any) -> bool:
    """Whether the class of an object comes from the user's own code."""
    return is_user_class(type(value))


def user_line() -> str:
    """``file:line: code`` of the innermost line of the user's own code on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            return f"{name}:{frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "in the script"


def line_of(thread: int) -> str:
    """``file:line`` of the innermost line of the user's own code on the stack of a thread; empty if there is none.

    ``thread`` is its identifier (``threading.get_ident``).  The stack is dumped in one call, during which no other
    thread runs, because frames of a running thread must not be held.
    """
    with tempfile.TemporaryFile() as dump:
        faulthandler.dump_traceback(dump, all_threads=True)
        dump.seek(0)
        text = dump.read().decode(errors="replace")
    for stack in text.split("\n\n"):
        head, _, frames = stack.partition("\n")
        if f"thread 0x{thread:016x} " not in head.lower():
            continue
        for name, line in _FRAME.findall(frames):
            if is_user_file(name):
                return f"{name}:{line}"
    return ""
