"""Find data-dependent branches of which one side raises, by tracing the step along each side.

A branch one side of which ends the step with an exception is a *check*.  The plan has the other side and computes the
condition in every call.  Where the condition takes the raising side, the call changes nothing that the step would have
changed after the check.  A trace that takes a side shows whether it raises.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import linecache
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.errors import ActorError, ActorflowError
from actorflow_compiler.core.torch_internals import plain_message
from actorflow_compiler.core.user_code import OURS
from actorflow_compiler.values.condition_paths import ConditionPart, ConditionPaths, PathAnswers, condition_of
from actorflow_compiler.values.gradients import GradientEffects

__all__ = ["CHECKED", "UNKNOWN_TEXT", "Retrace", "Check", "BranchExplorer", "ExceptionRecord", "within_branch"]

CHECKED = "actorflow.checked.default"  # op in a trace: a check's condition, and the variables as they are there
MAX_EXPLORED = 8  # decisions at one place of which each side is traced; later ones there are assumed to be like these
UNKNOWN_TEXT = "…"  # stands for a value in the text of an exception
TRACING = tuple(f"/torch/{part}" for part in (
    "_subclasses", "_refs", "_prims", "_prims_common", "_meta_registrations", "_decomp", "_dynamo", "_higher_order_ops",
    "fx", "_library", "_ops", "_tensor_str", "functional.py", "utils/_python_dispatch",
))  # fmt: skip  # exceptions raised in these files refuse an op; they are no checks of a script
RAISES_FOR_CALLER = ("/torch/__init__.py", "/torch/overrides.py")  # whose functions raise on behalf of their callers
REPLACED_LAYERS = (
    "/actorflow_compiler/substitutes/adaptive_softmax.py"  # our code, which raises what a layer of torch would raise
)
PLAIN = (type(None), bool, int, float, str)


@torch.library.custom_op("actorflow::checked", mutates_args=())
def checked(raises: Tensor, held: Sequence[Tensor], names: str) -> Tensor:
    """Whether a check raises; ``held`` are the variables as they are then, ``names`` their names, one a line."""
    return raises.clone()


@checked.register_fake
def _(raises: Any, held: Any, names: str) -> Any:
    return torch.empty_like(raises)


_branches_taken: list[
    Tensor
] = []  # for each enclosing branch of which both sides are computed: whether the side being traced is taken


@contextlib.contextmanager
def within_branch(taken: Tensor) -> Iterator[None]:
    """Let checks raise only where ``taken``, a bool without dims, is true; use around the trace of one side."""
    _branches_taken.append(taken.detach())
    try:
        yield
    finally:
        _branches_taken.pop()


class Retrace(BaseException):  # not an Exception, so that no code of the step catches it
    """The step has to be traced again, because a side of a decision became known or is to be tried."""


@dataclass(frozen=True, slots=True)
class ExceptionRecord:
    """An exception that ends the step on a side of a branch, and what that side prints before it."""

    module: str
    name: str  # of its class
    args: tuple[Any, ...]  # plain values
    printed: tuple[tuple[str, str], ...] = ()  # ("stdout" or "stderr", text)
    left: Any = None  # what the step has changed in Python at the end of the side; None: as at its beginning

    @staticmethod
    def of(error: BaseException, printed: Sequence[tuple[str, str]]) -> ExceptionRecord:
        """The record of an exception."""
        plain = all(isinstance(arg, PLAIN) for arg in error.args)
        args = tuple(error.args) if plain else (str(error),)
        args = tuple(plain_message(arg) if isinstance(arg, str) else arg for arg in args)
        return ExceptionRecord(type(error).__module__, type(error).__qualname__, args, tuple(printed))

    @property
    def text(self) -> str:
        """The exception as a message: ``ValueError: no``."""
        said = ", ".join(map(str, self.args))
        return f"{self.name}: {said}" if said else self.name

    def error(self) -> BaseException:
        """The exception as the script raised it; an ActorError if its class is not loaded in this process."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, BaseException)):
            return ActorError(f"{self.module}.{self.text}")
        try:
            made: BaseException = found(*self.args)
        except Exception:  # of a class whose __init__ takes other arguments
            made = found.__new__(found, *self.args)
        if made.args != self.args and not isinstance(made, SystemExit):
            made = found.__new__(found, *self.args)
            made.args = self.args
        return made


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a step, in the order of the program."""

    where: str  # the line
    raised: ExceptionRecord
    left: Any = ()  # what the step has changed in Python before, as ``BranchExplorer.changed`` returns it
    lost: str = ""  # names those of these changes that no call can repeat; else empty
    stepped: bool = False  # whether an optimizer has stepped before
    gradients: GradientEffects = field(default_factory=GradientEffects)  # what the step has done to them before

    def to_json(self) -> dict[str, Any]:
        """The check as JSON data."""
        found = asdict(replace(self, gradients=GradientEffects()))
        return found | {"gradients": [sorted(self.gradients.cleared), sorted(self.gradients.loses)]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Check:
        """The check of data that ``to_json`` made."""
        raised = data["raised"]
        printed = tuple((name, text) for name, text in raised["printed"])
        cleared, loses = map(frozenset, data["gradients"])
        error = ExceptionRecord(raised["module"], raised["name"], tuple(raised["args"]), printed)
        gradients = GradientEffects(cleared=cleared, loses=loses)
        return Check(data["where"], error, data["left"], data["lost"], data["stepped"], gradients)


@dataclass(frozen=True, slots=True)
class _Decision:
    place: tuple[Any, ...]
    side: bool | None  # the side that raises; None: neither side does, or see ``paths``
    raised: ExceptionRecord | None = None
    paths: ConditionPaths | None = None  # through a condition that Python evaluates in parts


class BranchExplorer:
    """Explores the data-dependent branches of one step, with as many traces as it needs.

    The caller sets ``changed`` and ``standing``.  ``changed`` returns the changes that the running step has made in
    Python so far, as JSON data, and a text that names changes that JSON cannot express.  ``standing`` returns the state
    of variables (comparable), and the names of the parameters with gradients that this step has made.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], tuple[Any, str]] = lambda: ((), "")
        self.standing: Callable[[], tuple[Any, frozenset[str]]] = lambda: ((), frozenset())
        self._at_decision = self._at_end = self._observed()  # of the side that a trace tries
        self.found: list[tuple[Tensor, Check]] = []  # of the current trace; a bool without dims: whether it raises
        self._decided: list[tuple[Tensor, int, bool]] = []  # tensor, its version, answer
        self._decisions: list[_Decision] = []  # in the order of the step
        self._next_decision = 0
        self._side: bool | None = None  # to try at the first unknown decision
        self._tried: dict[bool, ExceptionRecord | None] = {}
        self._place: tuple[Any, ...] = ()
        self._condition_start: ConditionPaths | None = None  # of the tried decision, if it has parts
        self._exploring: ConditionPaths | None = None  # the condition whose paths are explored
        self._answers: PathAnswers = ()  # answers to its parts so far, or to those of ``_current``
        self._current: _Decision | None = None  # the known decision that the trace is in the middle of
        self._part_values: dict[Any, Tensor] = {}  # values of its parts, by where they are
        self._inside = False  # whether the trace is on a side that is only tried
        self._printed = _Printed()
        self._shown = 0  # characters that traces have printed

    @property
    def inside(self) -> bool:
        """Whether the current trace only tries a side, so that nothing it prints or logs is shown."""
        return self._inside

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Use around one trace.  Raises Retrace after a trace that only tried a side."""
        self._next_decision, self._inside = 0, False
        self.found, self._decided = [], []
        self._current = None
        before = logging.root.manager.disable
        self._printed = _Printed()
        with self._printed.kept(self._shown):
            try:
                yield
                if self._inside:
                    raise self._trace_ended(None)
            except BaseException as error:
                if not self._inside or isinstance(error, Retrace | KeyboardInterrupt | MemoryError):
                    raise
                raised = ExceptionRecord.of(error, self._printed.since) if _is_raised(error) else None
                raise self._trace_ended(raised and self._with_changes(raised)) from None
            finally:
                self._inside = False
                logging.disable(before)
                self._shown = max(self._shown, self._printed.passed)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Use around the step, before its changes are undone: at the end of a tried side, it compares them."""
        try:
            yield
        finally:
            if self._inside:
                self._at_end = self._observed()

    def _observed(self) -> tuple[tuple[Any, str], tuple[Any, frozenset[str]]]:
        return self.changed(), self.standing()

    def _with_changes(self, raised: ExceptionRecord) -> ExceptionRecord | None:
        """The record of an exception, with what its side changed in Python.

        None where the side also wrote tensors or made gradients, which a check cannot do: the branch is refused.
        """
        (changes, lost), (variables, gradients) = self._at_decision
        (changes_after, lost_after), (variables_after, gradients_after) = self._at_end
        if variables_after != variables or not gradients_after <= gradients or lost_after != lost:
            return None
        return raised if changes_after == changes else replace(raised, left=changes_after)

    def decide(
        self, tensor: Tensor, frame: FrameType | None, found: Callable[[Tensor, ExceptionRecord], None]
    ) -> bool | None:
        """The side of a branch that the trace takes; None where neither side ends the step by raising.

        For a check, it calls ``found`` with whether the check raises (a bool tensor) and the record of the exception.
        """
        for asked, version, answer in self._decided:
            if asked is tensor and version == tensor._version:
                return answer
        if self._inside:
            told = None if self._exploring is None else self._next_answer(self._exploring, frame)
            if told is not None:
                return told
            raise self._trace_ended(None)  # the side does not raise before its next decision: it is no check
        way = None if self._current is None else self._current.paths
        if way is not None and way.is_at(_condition(frame), self._answers):
            return self._continue_condition(tensor, found)
        place = _place(frame)
        if any("/torch/jit/" in code.co_filename for code, _ in place):  # torch.jit.trace compares its results
            return None
        if self._next_decision < len(self._decisions):
            decision = self._decisions[self._next_decision]
            self._next_decision += 1
            if decision.raised is None or decision.place != place:
                return None
            if decision.paths is not None:
                self._current, self._answers = decision, ()
                self._part_values.clear()
                return self._continue_condition(tensor, found)
            with torch.no_grad():
                condition = _truth(tensor)
                raises = condition if decision.side else condition.logical_not()
                for taken in _branches_taken:
                    raises = raises & taken
                found(raises, decision.raised)
            self._decided.append((tensor, tensor._version, not decision.side))
            return not decision.side
        several = [d for d in self._decisions if d.place == place and d.paths is not None]
        if len(several) >= MAX_EXPLORED // 2:
            self._decisions.append(
                replace(several[-1], raised=_merged_records([d.raised for d in several if d.raised]))
            )
            return self.decide(tensor, frame, found)
        if self._exploring is not None and self._exploring.next is not None:
            self._answers, self._inside = self._exploring.next[:1], True
            self._begin_side()
            return self._answers[0]
        alike = [d for d in self._decisions if d.place == place and d.side is not None]
        if len(alike) >= MAX_EXPLORED:
            self._decisions.append(
                _Decision(place, alike[-1].side, _merged_records([d.raised for d in alike if d.raised]))
            )
            return self.decide(tensor, frame, found)
        hint = alike[-1].side if alike else _likely_raising_side(frame)
        side = hint if self._side is None else self._side
        assert side is not None
        self._side, self._place, self._inside = side, place, True
        whole = _condition(frame)
        self._condition_start = None if whole is None else ConditionPaths(place, whole.start, {(): whole.part})
        self._decided.append((tensor, tensor._version, side))
        self._begin_side()
        return side

    def _begin_side(self) -> None:
        """From here on, a side is only tried: hide what it logs and prints."""
        self._at_decision = self._at_end = self._observed()
        logging.disable(logging.CRITICAL)
        self._printed.begin()

    def _next_answer(self, paths: ConditionPaths, frame: FrameType | None) -> bool | None:
        """The tried path's answer to the next part of its condition; None if the frame evaluates no part of it."""
        condition, tried = _condition(frame), paths.next
        if condition is None or tried is None or _place(condition.frame.f_back) != _caller_place(paths.place):
            return None
        if not paths.is_at(condition, self._answers):
            return None
        if len(self._answers) < len(tried):
            self._answers = tried[: len(self._answers) + 1]
            return self._answers[-1]
        if paths.add_part(tried, condition.part):
            raise Retrace
        return None

    def _continue_condition(self, tensor: Tensor, found: Callable[[Tensor, ExceptionRecord], None]) -> bool | None:
        """The continuing path's answer to the next part of a known condition; adds the check after the last part."""
        decision = self._current
        assert decision is not None
        assert decision.paths is not None
        assert decision.raised is not None
        paths, way = decision.paths, decision.paths.continuing
        assert way is not None
        with torch.no_grad():
            self._part_values[paths.part[self._answers]] = _truth(tensor)
            self._answers = way[: len(self._answers) + 1]
            if self._answers == way:
                self._current = None
                raises = None
                for one in paths.raising:
                    asked = [
                        self._part_values[p] if yes else self._part_values[p].logical_not()
                        for p, yes in paths.questions(one)
                    ]
                    both = functools.reduce(torch.logical_and, asked)
                    raises = both if raises is None else raises | both
                assert raises is not None
                for taken in _branches_taken:
                    raises = raises & taken
                found(raises, decision.raised)
        return self._answers[-1]

    def _trace_ended(self, raised: ExceptionRecord | None) -> Retrace:
        """Record what a trace has found on the side that it tried; returns the Retrace to raise."""
        if self._exploring is not None:
            paths, tried = self._exploring, self._exploring.next
            assert tried is not None
            paths.record(tried, raised)
            if paths.next is None:
                self._exploring = None
                all_raised = [paths.outcomes[way] for way in paths.raising]
                known = bool(all_raised) and paths.continuing is not None and len({r.name for r in all_raised}) == 1
                common = _merged_records(all_raised) if known else None
                self._decisions.append(_Decision(paths.place, None, common, paths if common else None))
            return Retrace()
        assert self._side is not None
        self._tried[self._side] = raised
        if raised is not None:
            self._decisions.append(_Decision(self._place, self._side, raised))
        elif len(self._tried) == 2 and self._condition_start is not None:
            self._exploring = self._condition_start
        elif len(self._tried) == 2:
            self._decisions.append(_Decision(self._place, None))
        else:
            self._side = not self._side
            return Retrace()
        self._side = None
        self._tried.clear()
        return Retrace()


class _Stream:
    """A standard stream while a step is traced."""

    def __init__(self, name: str, real: Any, printed: _Printed) -> None:
        self._name, self._real, self._printed = name, real, printed

    def write(self, text: str) -> int:
        self._printed.take(self._name, text, self._real)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Printed:
    """Shows the prints of a step once, however often it is traced; holds back those of a side that is only tried."""

    def __init__(self) -> None:
        self.since: list[tuple[str, str]] = []  # (stream, text) of the side that is tried
        self.passed = 0  # characters printed before it, in this trace
        self._before = 0  # characters that earlier traces have already shown
        self._inside = False
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def kept(self, before: int) -> Iterator[None]:
        """Use while the step is traced; earlier traces of it have shown ``before`` characters."""
        self._before = before
        real = {"stdout": sys.stdout, "stderr": sys.stderr}
        ours = {name: _Stream(name, stream, self) for name, stream in real.items()}
        for name, stream in ours.items():
            setattr(sys, name, stream)
        try:
            yield
        finally:
            for name, plain in real.items():
                if getattr(sys, name) is ours[name]:
                    setattr(sys, name, plain)

    def begin(self) -> None:
        """From here on, a side is only tried."""
        self._inside = True

    def take(self, name: str, text: str, real: Any) -> None:
        """Print a text, or hold it back."""
        if threading.get_ident() != self._thread:
            real.write(text)
            return
        if self._inside:
            self.since.append((name, text))
            return
        new = text[max(0, self._before - self.passed) :]
        self.passed += len(text)
        if new:
            real.write(new)


def _is_raised(error: BaseException) -> bool:
    """Whether code of the script or of a library raised the exception by ``raise``, or ended the program."""
    if isinstance(error, SystemExit):
        return True
    if isinstance(error, ActorflowError | GeneratorExit):
        return False
    at: TracebackType | None = error.__traceback__
    asks = ""  # the file that raises, or that called a function which raises on behalf of its caller
    while at is not None:
        code, last = at.tb_frame.f_code, at.tb_lasti
        passes_on = code.co_name == "__torch_function__" or code.co_filename.endswith(RAISES_FOR_CALLER)
        ours = _is_ours(code.co_filename) and not code.co_filename.endswith(REPLACED_LAYERS)
        asks = asks if passes_on or ours else code.co_filename
        at = at.tb_next
    if not asks or _is_ours(code.co_filename) or any(part in asks for part in TRACING):
        return False
    return dis.opname[code.co_code[last]] in ("RAISE_VARARGS", "RERAISE")


def _is_ours(file: str) -> bool:
    return any(part in file for part in ("/actorflow_compiler/", f"{OURS}/actorflow/", "-packages/actorflow/"))


def _place(frame: FrameType | None) -> tuple[Any, ...]:
    """Where a decision is made: the code of each frame on the stack, and its instruction."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and not frame.f_code.co_filename.endswith("actorflow_compiler/capture/capture.py"):
        found.append((frame.f_code, _instruction(frame)))
        frame = frame.f_back
    return tuple(found)


def _instruction(frame: FrameType) -> int:
    """The offset of a frame's instruction.  Python 3.11 reports one earlier at calls that it has specialized."""
    at = frame.f_lasti
    early = at >= 0 and dis.opname[frame.f_code.co_code[at]] == "PRECALL"
    return at + 4 if early else at  # the size of the instruction, with its cache


def _condition(frame: FrameType | None) -> ConditionPart | None:
    """The part of a condition that the innermost frame outside our code evaluates; None if it has no parts."""
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return condition_of(frame)


def _caller_place(place: tuple[Any, ...]) -> tuple[Any, ...]:
    """The outer part of a place, from the caller of the innermost frame outside our code on."""
    inside = next((i for i, (code, _) in enumerate(place) if not _is_ours(code.co_filename)), 0)
    return place[inside + 1 :]


def _truth(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dtype == torch.bool else tensor != 0).detach().reshape(())


def _likely_raising_side(frame: FrameType | None) -> bool:
    """The side that is likely to raise, by the text of the line; it is tried first."""
    if frame is None:
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return not (line.startswith("assert") or " not " in line)


def _merged_records(raised: Sequence[ExceptionRecord]) -> ExceptionRecord | None:
    """One record for several exceptions that are raised at one place; None where their changes differ."""
    last = raised[-1]
    if all(one == last for one in raised):
        return last
    if any(one.left is not None for one in raised):
        return None
    texts = [" ".join(map(str, one.args)) for one in raised]
    return replace(last, args=(_common_text(texts),), printed=())


def _common_text(texts: Sequence[str]) -> str:
    """The beginning and the end that texts have in common."""
    shortest = min(texts, key=len)
    head = next((i for i, c in enumerate(shortest) if any(t[i] != c for t in texts)), len(shortest))
    rest = shortest[head:]
    tail = next((i for i, c in enumerate(reversed(rest)) if any(t[-1 - i] != c for t in texts)), len(rest))
    return f"{shortest[:head]}{UNKNOWN_TEXT}{shortest[len(shortest) - tail :]}"
