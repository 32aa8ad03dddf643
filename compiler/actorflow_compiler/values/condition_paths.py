"""Paths through a condition that Python evaluates in several parts, such as ``if a and b: raise …``.

Python asks for the truth of one part after the other, and the step may go on after either answer to the first part.
Once each path through the condition has been tried, it is known which answers make it raise.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

__all__ = ["MAX_PARTS", "PathAnswers", "ConditionPart", "ConditionPaths", "condition_of"]

NAMES = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.comprehension)
MAX_PARTS = 6  # at most, of one condition
PathAnswers = tuple[bool, ...]
SourcePosition = tuple[int, int]  # line and column
Statement = ast.If | ast.Assert


@dataclass(frozen=True, slots=True)
class ConditionPart:
    """A condition of several parts (of an ``if`` or ``assert``), and the part that a frame evaluates."""

    frame: FrameType
    start: SourcePosition
    part: int  # the instruction that the frame is at


def condition_of(frame: FrameType | None) -> ConditionPart | None:
    """The condition with parts that a frame is evaluating; None if there is none."""
    if frame is None:
        return None
    positions = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    line, _, column, _ = positions
    if line is None or column is None:
        return None
    for statement in _statements("".join(linecache.getlines(frame.f_code.co_filename))):
        first, last = (statement.lineno, statement.col_offset), statement.test.end_lineno or 0
        if first <= (line, column) < (last, statement.test.end_col_offset or 0):  # perhaps the whole statement's
            return ConditionPart(frame, first, frame.f_lasti)
    return None


@functools.lru_cache(8)
def _statements(source: str) -> tuple[Statement, ...]:
    """Statements of a source whose conditions have parts and bind no names, innermost first."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, Statement)]
    return tuple(node for node in reversed(found) if _has_parts(node.test))


def _has_parts(test: ast.expr) -> bool:
    inside = [*ast.walk(test)]
    names = any(isinstance(n, NAMES) for n in inside)
    several = any(isinstance(n, ast.BoolOp) or (isinstance(n, ast.Compare) and len(n.ops) > 1) for n in inside)
    return several and not names


@dataclass(slots=True)
class ConditionPaths:
    """The paths through one condition: the answers to its parts, in order, and what is raised after them, if anything.

    They are explored one by one: ``next`` is the path to try.
    """

    place: Any  # where the condition is, see ``checks``
    start: SourcePosition
    part: dict[PathAnswers, int]  # the part that follows after some answers
    outcomes: dict[PathAnswers, Any] = field(default_factory=dict)  # by path: what is raised; None: the step goes on
    untried: list[PathAnswers] = field(default_factory=lambda: [(False,), (True,)])

    @property
    def next(self) -> PathAnswers | None:
        """The path to try; None once all are known."""
        return self.untried[-1] if self.untried else None

    def is_at(self, condition: ConditionPart | None, answers: PathAnswers) -> bool:
        """Whether a frame evaluates the part that follows after some answers, and not the condition once more."""
        if condition is None or condition.start != self.start:
            return False
        known = self.part.get(answers)
        return condition.part == known if known else condition.part > self.part[answers[:-1]]

    def add_part(self, answers: PathAnswers, part: int) -> bool:
        """Add the part that follows after some answers; returns False if there are more than ``MAX_PARTS``."""
        self.part[answers] = part
        self.untried.remove(answers)
        self.untried += [(*answers, False), (*answers, True)]
        return len(answers) < MAX_PARTS

    def record(self, answers: PathAnswers, behind: Any) -> None:
        """Record the outcome of a path."""
        self.untried.remove(answers)
        self.outcomes[answers] = behind

    @property
    def raising(self) -> list[PathAnswers]:
        """The paths that end the step."""
        return [way for way, behind in self.outcomes.items() if behind is not None]

    @property
    def continuing(self) -> PathAnswers | None:
        """A path on which the step goes on, with all parts that the raising paths evaluate; None if there is none."""
        needed = {self.part[way[:i]] for way in self.raising for i in range(len(way))}
        on = (way for way, behind in self.outcomes.items() if behind is None)
        return next((way for way in on if needed <= {self.part[way[:i]] for i in range(len(way))}), None)

    def questions(self, way: PathAnswers) -> Sequence[tuple[int, bool]]:
        """The parts of a path, with their answers."""
        return [(self.part[way[:i]], answer) for i, answer in enumerate(way)]
