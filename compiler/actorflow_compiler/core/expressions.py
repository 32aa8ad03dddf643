"""Expressions over Python numbers of the script that a step reads; they are evaluated anew in each call."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from actorflow_compiler.core.errors import CallError

__all__ = [
    "Condition", "Expression", "Known", "NumberSource", "Operand", "SourceKind", "Value", "apart", "evaluate",
    "from_json", "has_numbers", "number_of", "of_python", "sources", "to_json",
]  # fmt: skip

Value = int | float | bool
Known = Callable[["NumberSource"], Value]  # the current value of a number of the script

SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in SIGNS},
    "neg": operator.neg, "pos": operator.pos, "abs": operator.abs, "truth": operator.truth,
    "round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "float": float, "int": int,
    **{f"math.{name}": getattr(math, name) for name in (
        "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "exp", "expm1", "log", "log2",
        "log10", "log1p", "sqrt", "pow", "fabs", "fmod", "floor", "ceil", "trunc", "erf", "degrees", "radians", "hypot",
    )},
    **{f"np.{name}": getattr(np, name) for name in (
        "sin", "cos", "tan", "tanh", "exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "square", "power",
        "maximum", "minimum",
    )},
}  # fmt: skip


class SourceKind(StrEnum):
    """What holds a number that a step reads."""

    ARGUMENT = "argument"  # of the call
    SETTING = "setting"  # of an optimizer's parameter group
    STATE = "state"  # of an optimizer, for one parameter
    PLACE = "place"  # an attribute, item or variable of the script
    LATER = "later"  # the step itself: the value is known only after a part of it has run


@dataclass(frozen=True, slots=True)
class NumberSource:
    """Where a number comes from: an argument of the call, an optimizer, or a place of the script."""

    kind: SourceKind
    name: str  # of the argument or of the optimizer; for people, of the place
    at: str = ""  # the index of the optimizer's group; the parameter's name; the number of the object with the place
    key: str = ""  # in the group or state, or the attribute's name
    index: int = -1  # in the tuple or list there, -1 for the number itself

    def __str__(self) -> str:
        if self.kind == SourceKind.PLACE:
            return self.name
        parts = [self.name, *([self.at, self.key] if self.key else [])]
        return ".".join(parts) + (f"[{self.index}]" if self.index >= 0 else "")


@dataclass(frozen=True, slots=True)
class Expression:
    """A function of numbers."""

    function: str  # of ``FUNCTIONS``
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        texts = [f"({o})" if isinstance(o, Expression) and o.function in SIGNS else str(o) for o in self.operands]
        sign = SIGNS.get(self.function)
        return f"{texts[0]} {sign} {texts[1]}" if sign else f"{self.function}({', '.join(texts)})"


Operand = NumberSource | Expression | int | float | bool


@dataclass(frozen=True, slots=True)
class Condition:
    """The value of an expression that a capture took for a constant; it must be the same in every later call."""

    expression: Operand
    value: Value

    def holds(self, known: Known) -> bool:
        """Whether the expression has that value for the numbers as they are now."""
        try:
            now = evaluate(self.expression, known)
        except CallError:
            return False
        now = of_python(now)
        return type(now) is type(self.value) and repr(now) == repr(self.value)  # 0.0 is not -0.0, and nan is nan


def evaluate(expression: Operand, known: Known) -> Any:
    """The value of an expression; raises CallError where Python's arithmetic fails, as in a division by zero."""
    if isinstance(expression, NumberSource):
        return known(expression)
    if not isinstance(expression, Expression):
        return expression
    operands = [evaluate(o, known) for o in expression.operands]
    try:
        return FUNCTIONS[expression.function](*operands)
    except (ArithmeticError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CallError(f"the step computes {expression}, which gives for {operands} {said}") from error


def sources(expression: Operand) -> Iterable[NumberSource]:
    """The sources of the numbers that an expression reads."""
    if isinstance(expression, NumberSource):
        yield expression
    elif isinstance(expression, Expression):
        for operand in expression.operands:
            yield from sources(operand)


def apart(later: Operand, earlier: Operand) -> int | None:
    """The constant difference ``later - earlier``; None where it depends on the numbers in them.

    Both have to be functions of whole numbers.
    """
    terms = _terms(later, 1)
    for atom, factor in _terms(earlier, -1).items():
        terms[atom] = terms.get(atom, 0) + factor
    constant = terms.pop(None, 0)
    return None if any(terms.values()) else constant


def _terms(expression: Operand, factor: int) -> dict[Operand | None, int]:
    """A whole number as a linear combination: term → factor; None stands for the constant 1."""
    if not isinstance(expression, NumberSource | Expression):
        return {None: factor * int(expression)}
    if isinstance(expression, Expression):
        signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,), "pos": (1,)}.get(expression.function)
        operands = expression.operands
        if expression.function == "mul":
            constants = [o for o in operands if type(o) is int]
            if constants:
                others = [o for o in operands if o is not constants[0]]
                return _terms(others[0] if others else 1, factor * constants[0])
        elif signs is not None:
            found: dict[Operand | None, int] = {}
            for operand, sign in zip(operands, signs, strict=True):
                for atom, count in _terms(operand, factor * sign).items():
                    found[atom] = found.get(atom, 0) + count
            return found
    return {expression: factor}


def number_of(value: object) -> bool:
    """Whether a value is a number that may differ from call to call: an int or float (no bool), or NumPy's float64.

    Of NumPy's types only float64 counts: it is a subclass of Python's float, and ``np.random`` and schedules return it.
    """
    return type(value) in (int, float, np.float64)


def of_python(value: Any) -> Any:
    """A NumPy scalar as Python's own int, float or bool, as it is sent to other ranks; any other value itself."""
    if isinstance(value, np.float64):
        return float(value)
    return bool(value) if isinstance(value, np.bool_) else value


def has_numbers(value: object) -> bool:
    """Whether a value is a number that may differ from call to call (``number_of``), or a tuple or list of these."""
    several = isinstance(value, tuple | list) and bool(value)
    return all(map(number_of, value)) if several else number_of(value)  # type: ignore[call-overload]


def to_json(expression: Operand) -> Any:
    """An expression as plain data for JSON."""
    if isinstance(expression, NumberSource):
        return {"source": [expression.kind, expression.name, expression.at, expression.key, expression.index]}
    if isinstance(expression, Expression):
        return {"function": expression.function, "operands": [to_json(o) for o in expression.operands]}
    return expression


def from_json(data: Any) -> Operand:
    """The expression that ``to_json`` encoded; raises CallError for an unknown function."""
    if not isinstance(data, dict):
        assert isinstance(data, int | float)
        return data
    if "source" in data:
        kind, *where = data["source"]
        return NumberSource(SourceKind(kind), *where)
    if data["function"] not in FUNCTIONS:
        raise CallError(f"a plan computes {data['function']!r} of numbers; one of {', '.join(FUNCTIONS)} was expected")
    return Expression(data["function"], tuple(from_json(o) for o in data["operands"]))
