"""Find data-dependent branches of which one side raises, by tracing the step along each side.

A branch one side of which ends the step with an exception is a *check*.  The plan has the other side and computes the
condition in every call.  Where the condition takes the raising side, the call changes nothing that the step would have
changed after the check.  Which side raises is found out by a trace that takes it.
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
from actorflow_compiler.core.user_code import OURS
from actorflow_compiler.values.condition_paths import ConditionPart, ConditionPaths, PathAnswers, condition_of
from actorflow_compiler.values.gradients import GradientEffects

__all__ = ["CHECKED", "UNKNOWN_TEXT", "Retrace", "Check", "BranchExplorer", "ExceptionRecord", "within_branch"]

CHECKED = "actorflow.checked.default"  # in a trace: a condition, and the variables as they are where it is asked for
MAX_EXPLORED = 8  # decisions at one place whose raising sides are each traced; others there are taken to be like those
UNKNOWN_TEXT = "…"  # in place of a value in a text
TRACING = tuple(f"/torch/{part}" for part in (
    "_subclasses", "_refs", "_prims", "_prims_common", "_meta_registrations", "_decomp", "_dynamo", "_higher_order_ops",
    "fx", "_library", "_ops", "_tensor_str", "functional.py", "utils/_python_dispatch",
))  # fmt: skip  # which raise what an op refuses, not what a script has found
RAISES_FOR_CALLER = ("/torch/__init__.py", "/torch/overrides.py")  # whose functions raise for those that call them
REPLACED_LAYERS = (
    "/actorflow_compiler/substitutes/adaptive_softmax.py"  # of ours, which finds what a layer of a script would
)
PLAIN = (type(None), bool, int, float, str)


@torch.library.custom_op("actorflow::checked", mutates_args=())
def checked(raises: Tensor, held: Sequence[Tensor], names: str) -> Tensor:
    """Whether a check raises; ``held`` are variables as they are then, and ``names`` theirs, a line each."""
    return raises.clone()


@checked.register_fake
def _(raises: Any, held: Any, names: str) -> Any:
    return torch.empty_like(raises)


_branches_taken: list[
    Tensor
] = []  # of the branches that a trace is in, of which both sides are computed: whether each is taken


@contextlib.contextmanager
def within_branch(taken: Tensor) -> Iterator[None]:
    """In which checks only raise where a branch is ``taken``, a bool without dims."""
    _branches_taken.append(taken.detach())
    try:
        yield
    finally:
        _branches_taken.pop()


class Retrace(BaseException):  # no error: nobody is to catch it on its way
    """The step is to be traced again: a side of a decision is known now, or to be tried."""


@dataclass(frozen=True, slots=True)
class ExceptionRecord:
    """An exception that a side of a branch ends the step with, and what it has printed before."""

    module: str
    name: str  # of its class
    args: tuple[Any, ...]  # plain values
    printed: tuple[tuple[str, str], ...] = ()  # ("stdout" or "stderr", text)
    left: Any = None  # what of Python the step has changed in the end, where the side changes more; see ``Check``

    @staticmethod
    def of(error: BaseException, printed: Sequence[tuple[str, str]]) -> ExceptionRecord:
        """What is known of an exception."""
        plain = all(isinstance(arg, PLAIN) for arg in error.args)
        args = tuple(error.args) if plain else (str(error),)
        args = tuple(arg.replace("FakeTensor", "Tensor") if isinstance(arg, str) else arg for arg in args)
        return ExceptionRecord(type(error).__module__, type(error).__qualname__, args, tuple(printed))

    @property
    def text(self) -> str:
        """What it says, for people: ``ValueError: no``."""
        said = ", ".join(map(str, self.args))
        return f"{self.name}: {said}" if said else self.name

    def error(self) -> BaseException:
        """The exception, as the script knows it; an ActorError where its class cannot be found here."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, BaseException)):
            return ActorError(f"{self.module}.{self.text}")
        try:
            made: BaseException = found(*self.args)
        except Exception:  # of a class that is made of other things than it says
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
    left: Any = ()  # what of Python the step has changed before, as ``BranchExplorer.changed`` says it
    lost: str = ""  # what of it no call can leave so, for people
    stepped: bool = False  # whether an optimizer has stepped before
    gradients: GradientEffects = field(default_factory=GradientEffects)  # what the step has made of them until then

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        found = asdict(replace(self, gradients=GradientEffects()))
        return found | {"gradients": [sorted(self.gradients.cleared), sorted(self.gradients.loses)]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Check:
        """What ``to_json`` made."""
        raised = data["raised"]
        printed = tuple((name, text) for name, text in raised["printed"])
        cleared, loses = map(frozenset, data["gradients"])
        error = ExceptionRecord(raised["module"], raised["name"], tuple(raised["args"]), printed)
        gradients = GradientEffects(cleared=cleared, loses=loses)
        return Check(data["where"], error, data["left"], data["lost"], data["stepped"], gradients)


@dataclass(frozen=True, slots=True)
class _Decision:
    place: tuple[Any, ...]
    side: bool | None  # the one that raises; None: neither does
    raised: ExceptionRecord | None = None
    paths: ConditionPaths | None = None  # through a condition that is asked for in parts


class BranchExplorer:
    """What is known of the decisions of one step, over the traces that find it out.

    ``changed`` says what the step that runs has changed in Python so far, as data that travel, and what of it cannot
    be told so, for people; ``standing`` how variables are, and which gradients of the step are there.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], tuple[Any, str]] = lambda: ((), "")
        self.standing: Callable[[], tuple[Any, frozenset[str]]] = lambda: ((), frozenset())
        self._at_decision = self._at_end = self._observed()  # the side that a trace tries
        self.found: list[tuple[Tensor, Check]] = []  # by the trace under way; a bool without dims: whether it raises
        self._decided: list[tuple[Tensor, int, bool]] = []  # what the trace has decided: tensors, their versions
        self._decisions: list[_Decision] = []  # in the order in which the step comes to them
        self._next_decision = 0
        self._side: bool | None = None  # that the trace under way is to try at the first decision that is not known
        self._tried: dict[bool, ExceptionRecord | None] = {}
        self._place: tuple[Any, ...] = ()
        self._condition_start: ConditionPaths | None = None  # of the condition that a side is tried of
        self._exploring: ConditionPaths | None = None  # of the condition that is being found out about
        self._answers: PathAnswers = ()  # that the trace has given to its questions, or to those of one that is known
        self._current: _Decision | None = None  # the one that is known, which the trace is in the middle of
        self._part_values: dict[Any, Tensor] = {}  # its questions, by where they are
        self._inside = False  # whether the trace is on a side that it tries
        self._printed = _Printed()
        self._shown = 0  # characters that traces have let through

    @property
    def inside(self) -> bool:
        """Whether the trace under way tries a side, and shows nothing to anybody."""
        return self._inside

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Around one trace.  Raises Again where it was one that tried a side, and where it is to try one."""
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
        """Around the step, where what it has changed is still there."""
        try:
            yield
        finally:
            if self._inside:
                self._at_end = self._observed()

    def _observed(self) -> tuple[tuple[Any, str], tuple[Any, frozenset[str]]]:
        return self.changed(), self.standing()

    def _with_changes(self, raised: ExceptionRecord) -> ExceptionRecord | None:
        """An exception, with what its side leaves in Python; None where it leaves what only a branch could: tensors
        that were written since the decision, or gradients.
        """
        (changes, lost), (variables, gradients) = self._at_decision
        (changes_after, lost_after), (variables_after, gradients_after) = self._at_end
        if variables_after != variables or not gradients_after <= gradients or lost_after != lost:
            return None
        return raised if changes_after == changes else replace(raised, left=changes_after)

    def decide(
        self, tensor: Tensor, frame: FrameType | None, found: Callable[[Tensor, ExceptionRecord], None]
    ) -> bool | None:
        """The side of a branch that the trace takes; None where neither ends the step by raising.

        ``found`` is told of a check: whether it raises, and what.
        """
        for asked, version, answer in self._decided:
            if asked is tensor and version == tensor._version:
                return answer
        if self._inside:
            told = None if self._exploring is None else self._next_answer(self._exploring, frame)
            if told is not None:
                return told
            raise self._trace_ended(
                None
            )  # what follows is of no interest: the side does not raise before it decides again
        way = None if self._current is None else self._current.paths
        if way is not None and way.is_at(_condition(frame), self._answers):
            return self._continue_condition(tensor, found)
        place = _place(frame)
        if any("/torch/jit/" in code.co_filename for code, _ in place):  # it compares what it has traced
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
        """A side is tried from now on."""
        self._at_decision = self._at_end = self._observed()
        logging.disable(logging.CRITICAL)
        self._printed.begin()

    def _next_answer(self, paths: ConditionPaths, frame: FrameType | None) -> bool | None:
        """The answer of the way that is tried to another question of its condition; None where that is no such one."""
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
        """The answer with which the step goes on; where all is asked, what is checked is whether it would not."""
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
        """A trace has tried a side."""
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
    """A standard stream while a step is traced: what is printed goes through it, or is kept."""

    def __init__(self, name: str, real: Any, printed: _Printed) -> None:
        self._name, self._real, self._printed = name, real, printed

    def write(self, text: str) -> int:
        self._printed.take(self._name, text, self._real)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Printed:
    """What a trace prints: each character once, however often the step is traced, and none of a side that is tried."""

    def __init__(self) -> None:
        self.since: list[tuple[str, str]] = []  # on the side that is tried
        self.passed = 0  # characters before it
        self._before = 0  # characters that earlier traces have let through
        self._inside = False
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def kept(self, before: int) -> Iterator[None]:
        """While the step is traced; ``before`` characters were shown by traces of it before."""
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
        """A side is tried from now on."""
        self._inside = True

    def take(self, name: str, text: str, real: Any) -> None:
        """Something is printed."""
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
    """Whether code of the script, or of a library, has raised an exception on purpose, or ended the program."""
    if isinstance(error, SystemExit):
        return True
    if isinstance(error, ActorflowError | GeneratorExit):
        return False
    at: TracebackType | None = error.__traceback__
    asks = ""  # who has raised it, or has called what raises it for others
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
    """Where a decision is made: the code of all that runs, and how far each is."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and not frame.f_code.co_filename.endswith("actorflow_compiler/capture/capture.py"):
        found.append((frame.f_code, _instruction(frame)))
        frame = frame.f_back
    return tuple(found)


def _instruction(frame: FrameType) -> int:
    """How far a frame is; Python 3.11 stops one instruction earlier at a call that it has made often."""
    at = frame.f_lasti
    early = at >= 0 and dis.opname[frame.f_code.co_code[at]] == "PRECALL"
    return at + 4 if early else at  # the instruction, and its cache


def _condition(frame: FrameType | None) -> ConditionPart | None:
    """The condition that is asked for in parts, by whoever has asked us."""
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return condition_of(frame)


def _caller_place(place: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where what asks was called."""
    inside = next((i for i, (code, _) in enumerate(place) if not _is_ours(code.co_filename)), 0)
    return place[inside + 1 :]


def _truth(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dtype == torch.bool else tensor != 0).detach().reshape(())


def _likely_raising_side(frame: FrameType | None) -> bool:
    """The side that is likely to raise, by what is written there."""
    if frame is None:
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return not (line.startswith("assert") or " not " in line)


def _merged_records(raised: Sequence[ExceptionRecord]) -> ExceptionRecord | None:
    """What several exceptions have in common, as one: they are raised at one place.  None where they leave other
    things behind.
    """
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
