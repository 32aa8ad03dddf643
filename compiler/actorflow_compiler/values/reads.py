"""Answer or refuse reads of tensor values in a step that is being captured, with the user's line in the error.

While a step is captured, tensors have no values.  A read of one (as a number, an array or a text) is refused at its
line.  If the step catches that error, it is raised again at the end of the capture: otherwise the plan would contain
the branch that the step happened to take.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import DATA_DEPENDENT, constant_of, watching_reads
from actorflow_compiler.core.user_code import STDLIB, is_users
from actorflow_compiler.values.checks import UNKNOWN_TEXT, BranchExplorer, ExceptionRecord
from actorflow_compiler.values.library_code import irrelevant_condition, remedy
from actorflow_compiler.values.where_suggestions import suggested_rewrite

__all__ = ["ADDRESS", "DEPENDS_ON_VALUES", "LOOKS_AT_A_VALUE", "ValueReadHandler", "place_of"]

LOOKS_AT_A_VALUE = (
    "the step looks at the value of a tensor here (an if, a loop, .item() or float()), but it is captured once for all "
    "inputs; expected: the same ops in every call. Use torch.where, a count as it is, without .item() (where it "
    "may be 0: count.clamp(min=1)), or move this line out of the job"
)
DEPENDS_ON_VALUES = (
    "how large a tensor is depends on values here (x[mask], nonzero, unique, one_hot without num_classes), but a plan "
    "has fixed sizes; expected: the whole tensor, with a mask: torch.where(mask, x, 0) or x * mask, and for a mean the "
    "sum divided by mask.sum(); or do this outside, and pass what comes out as an argument"
)
SHOWS = (
    "the step shows a tensor here (print, an f-string, a log), but it runs once, when it is captured, and no tensor "
    "has values then; expected: return the tensor, and show what the call returns"
)
SAVES = (
    "the step pickles a tensor here (torch.save, pickle), which would be done once, when the step is captured, and not "
    "in every call; expected: do this after the call; state_dict() works between calls"
)
ADDRESS = (
    "the step asks for the memory of a tensor here, but it is captured without; expected: what needs it as an op of "
    "its own (torch.library.custom_op), or outside of the job"
)
CLASS = (
    "the step makes a tensor of another class here, which a plan cannot hold; expected: plain tensors in the step, and "
    "the class around what it returns"
)
TEXTS = {
    "__format__": SHOWS, "__repr__": SHOWS, "__str__": SHOWS, "__reduce_ex__": SAVES, "data_ptr": ADDRESS,
    "storage": ADDRESS, "untyped_storage": ADDRESS, "as_subclass": CLASS,
}  # fmt: skip
FOR_USERS = (SHOWS, ADDRESS)  # reads that torch and our code make, too; only those of the user's code are refused
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
OURSELVES = (  # warnings of torch about how a step is captured, which users need not see
    "Accessing the data pointer of FakeTensor",
    "Using `torch.compile\\(module\\)` when there are global hooks",
    "Converting a tensor with requires_grad=True to a scalar",
)


Decide = Callable[[Callable[[], tuple[str, str]], str, torch.Tensor], Any]


class ValueReadHandler:
    """Answers or refuses reads of values while a step runs; ``check`` raises refusals that the step has caught again.

    ``decide(place, name, tensor)`` returns a value that is known although a step is captured, else None; ``place()``
    returns the user's line, and what to do instead.  With ``late``, ``item`` may return an unbacked number.  ``checks``
    explores branches of which one side raises; ``found(raises, line, exception)`` is called for each of these.
    """

    def __init__(
        self, decide: Decide = lambda *_: None, late: bool = False, checks: BranchExplorer | None = None,
        found: Callable[[torch.Tensor, str, ExceptionRecord], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._refused: list[CaptureError] = []
        self._decide, self._late = decide, late
        self._checks, self._found = checks, found

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Handle reads of values, and hide torch's warnings about how a step is captured."""
        with watching_reads(self._on_read), warnings.catch_warnings():
            for message in OURSELVES:
                warnings.filterwarnings("ignore", message)
            yield

    def check(self) -> None:
        """Raise the first refusal again, if there was one."""
        if self._refused:
            raise self._refused[0]

    def refusal(self, text: str) -> CaptureError:
        """The error that refuses what the user's line does; ``check`` raises it again if the step catches it."""
        frames = traceback.extract_stack(sys._getframe(1))
        more = remedy(frames) or (suggested_rewrite(frames) if text == LOOKS_AT_A_VALUE else "")
        return self._refused_at(place_of(frames), text + more)

    def _refused_at(self, place: str, text: str) -> CaptureError:
        error = CaptureError(f"{place}\n  {text}")
        self._refused.append(error)
        return error

    def _on_read(self, name: str, tensor: torch.Tensor, read: Callable[[], Any]) -> Any:
        frame = sys._getframe(2)

        def place() -> tuple[str, str]:
            frames = traceback.extract_stack(frame)
            return place_of(frames), remedy(frames) or suggested_rewrite(frames)

        if self._late and name == "item" and tensor.dtype != torch.bool:  # arithmetic may go on with it
            later = read()
            if hasattr(type(later), "known_value"):
                where, instead = place()
                later.resolve = lambda known: self._decide(lambda: (where, instead), name, known)
                later.text = self._text
                later.refusal = lambda: self._refused_at(where, LOOKS_AT_A_VALUE + instead)
            return later
        decided = self._decide(place, name, tensor)
        if decided is None and tensor.dtype == torch.bool and name in ("__bool__", "item"):
            decided = irrelevant_condition(frame)
        asks = name == "__bool__" or (name == "item" and tensor.dtype == torch.bool)
        if decided is None and asks and self._checks is not None and tensor.numel() == 1 and _is_open(tensor):
            decided = self._checks.decide(tensor, frame, lambda raises, what: self._found(raises, place()[0], what))
        if decided is not None:
            return decided
        text = TEXTS.get(name, LOOKS_AT_A_VALUE)
        asking = sys._getframe(2)
        if text is SHOWS and (shown := self._text()):
            return shown
        if text in FOR_USERS:
            if not _asked_by_user(asking):
                return read()
            refusal = self.refusal(text)
            if _is_in(asking, logging.__file__):  # logging prints exceptions of handlers, and goes on
                return "a tensor without values"
            raise refusal
        if text is SAVES and not _is_in(asking, copy.__file__, depth=1):
            raise self.refusal(text)
        found: Any = None
        with contextlib.suppress(*DATA_DEPENDENT, RuntimeError, TypeError):
            found = read()
        if found is None or any(isinstance(leaf, SYMBOLS) for leaf in pytree.tree_leaves(found)):
            raise self.refusal(text)
        return found

    def _text(self) -> str:
        """The placeholder for a value in a text while a side is only tried; else empty."""
        return UNKNOWN_TEXT if self._checks is not None and self._checks.inside else ""


def _is_open(tensor: torch.Tensor) -> bool:
    """Whether the value of a tensor is not known before a call."""
    return constant_of(tensor) is None


def place_of(frames: Iterable[FrameSummary]) -> str:
    """The innermost line of the user's own code, as ``file:line: code``, and below it that of a library it calls."""
    inside = ""
    torchs = str(Path(torch.__file__).parent)
    for frame in reversed([*frames]):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}{inside}"
        if not inside and not frame.filename.startswith(torchs):
            inside = _library_line(frame)
    return f"in the step{inside}"


def warn(text: str) -> None:
    """Issue a warning at the innermost line of the user's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def _library_line(frame: FrameSummary) -> str:
    """Where a frame is in a library other than ours, as a line of text; else empty."""
    for folder in ("site-packages", "dist-packages"):
        _, found, path = frame.filename.rpartition(f"/{folder}/")
        if found and not path.startswith("actorflow"):
            return f"\n  inside {path}:{frame.lineno}: {frame.line}"
    return ""


def _is_in(frame: FrameType | None, file: str, depth: int = 8) -> bool:
    """Whether one of the innermost ``depth`` frames runs code of a file."""
    for _ in range(depth):
        if frame is None:
            return False
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the innermost code that is not Python's own is the user's."""
    while frame is not None:
        path = frame.f_code.co_filename
        plain = path.startswith((STDLIB, "<")) and "-packages" not in path
        if not plain:
            return is_users(path)
        frame = frame.f_back
    return False
