"""Print an exception that ended a user's script, without the frames that say nothing of the script.

What is shown begins in the script and has the frames of the user's own code and of the libraries that it
uses.  Frames of actorflow and of torch between and below them say nothing of the script, and are counted.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException
from types import TracebackType
from typing import Any, TextIO

from actorflow_compiler.core.errors import ActorflowError

__all__ = ["FULL", "mute_repeated_tracebacks", "one_line", "print_script_error", "print_uncaught_errors"]

FULL = "ACTORFLOW_FULL_TRACEBACK"  # "1": nothing is left out
_OURS = ("actorflow", "actorflow_compiler", "actorflow_protos", "actorflow_scheduler")
_LIBRARY = str(Path(traceback.__file__).parent)
_ECHO = "torch._subclasses.fake_tensor"  # logs the traceback of what it is about to raise


class _FoldedStack(StackSummary):
    """The frames of a traceback, of which some are only counted."""

    hidden: frozenset[int] = frozenset()  # positions

    def format(self, **options: Any) -> list[str]:
        """The lines of those that are shown, and one for those that are not."""
        shown = StackSummary.from_list([frame for i, frame in enumerate(self) if i not in self.hidden])
        lines = shown.format(**options)
        count = len(self.hidden)
        if count:
            lines.append(f"  [{count} frame{'s' * (count > 1)} of actorflow and torch; {FULL}=1 shows them]\n")
        return lines


def print_script_error(error: BaseException, script: str, file: TextIO | None = None) -> None:
    """Print an exception as Python does, from the user's script on; see the top of this file for what is left out."""
    found = TracebackException.from_exception(error)
    own = _folders(_OURS)
    outer = [*own, *_folders(("torch", "functorch"))]
    _begin_in(script, found, error)
    if os.environ.get(FULL, "0") in ("", "0") and not _is_bug(error, found, own):
        _fold(found, error, outer)
    for line in found.format():
        print(line, file=file or sys.stderr, end="")


def print_uncaught_errors() -> None:
    """Have an exception that ends a script of plain ``python`` printed like this, if frames of ours are in it.

    A hook that the script, or what it runs in, has set for such exceptions stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught


def _print_uncaught(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    if _is_of_ours(error):
        print_script_error(error.with_traceback(at), str(getattr(sys.modules["__main__"], "__file__", "")))
    else:
        sys.__excepthook__(kind, error, at)


def _is_of_ours(error: BaseException) -> bool:
    """Whether a frame of an exception, or of those behind it, is ours."""
    own = tuple(_folders(_OURS))
    behind: BaseException | None = error
    seen: set[int] = set()
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        if any(frame.f_code.co_filename.startswith(own) for frame, _ in traceback.walk_tb(behind.__traceback__)):
            return True
        behind = behind.__cause__ or behind.__context__
    return False


def one_line(error: BaseException, script: str) -> str:
    """The exception, and the user's line that it came from: "ValueError: no (train.py:3: check(x))"."""
    if isinstance(error, SyntaxError):
        text, line = f"{type(error).__name__}: {error.msg}", (error.text or "").strip()
        return f"{text} ({Path(error.filename or script).name}:{error.lineno}: {line})"
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if frame.filename == script]
    if not mine:
        return text
    return f"{text} ({Path(script).name}:{mine[-1].lineno}: {mine[-1].line})"


def mute_repeated_tracebacks() -> None:
    """Keep torch from logging the traceback of an op that refuses its shapes, as the exception says the same."""
    if os.environ.get(FULL, "0") in ("", "0"):
        logging.getLogger(_ECHO).addFilter(_not_an_echo)


def _not_an_echo(record: logging.LogRecord) -> bool:
    return not (record.exc_info and str(record.msg).startswith("failed while attempting to run meta"))


def _folders(packages: Iterable[str]) -> list[str]:
    """The folders of those of the packages that are imported."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in packages]
    return [str(Path(file).parent) + os.sep for file in files if file]


def _begin_in(script: str, found: TracebackException, error: BaseException) -> None:
    """Drop the frames that ran the script; all of them for a syntax error in it."""
    starts = [i for i, frame in enumerate(found.stack) if frame.filename == script]
    if starts:
        del found.stack[: starts[0]]
    elif isinstance(error, SyntaxError):
        del found.stack[:]


def _is_bug(error: BaseException, found: TracebackException, own: list[str]) -> bool:
    """Whether the error is a bug of ours, so that our own frames matter."""
    inner = found.stack[-1].filename if found.stack else ""
    return not isinstance(error, ActorflowError) and inner.startswith(tuple(own))


def _fold(found: TracebackException, error: BaseException, outer: list[str]) -> None:
    """Hide frames, also those of the exception's causes; errors of ours include the cause."""
    frames = list(found.stack)
    cause, context = error.__cause__, error.__context__
    if isinstance(error, ActorflowError) and found.__cause__ is not None:  # it says itself what was raised
        behind: TracebackException | None = found.__cause__
        found.__cause__ = found.__context__ = None
        while behind is not None:
            frames += behind.stack
            behind = behind.__cause__
    elif found.__cause__ is not None and cause is not None:
        _fold(found.__cause__, cause, outer)
    elif found.__context__ is not None and context is not None:
        _fold(found.__context__, context, outer)
    for nested, one in zip(found.exceptions or (), getattr(error, "exceptions", ()), strict=False):
        _fold(nested, one, outer)
    stack = _FoldedStack(frames)
    stack.hidden = frozenset(_hidden(frames, outer))
    found.stack = stack


def _hidden(frames: Iterable[FrameSummary], outer: list[str]) -> Iterable[int]:
    """The positions of frames in these folders, and of frames of Python's library and generated code below them."""
    inside = False
    for i, frame in enumerate(frames):
        plain = frame.filename.startswith((_LIBRARY + os.sep, "<")) and "-packages" not in frame.filename
        inside = frame.filename.startswith(tuple(outer)) or (inside and plain)
        if inside:
            yield i
