"""Symbolic numbers: stand-ins for Python numbers of a script, traced like PyTorch's SymInt and SymFloat.

A symbolic number behaves like the number that it stands for.  While it only enters arithmetic, the graph reads it in
every call, so that one plan holds for other values, too.  Where it decides something (an ``if``, a size, an index, a
text), its value is recorded as a condition of the plan (a guard).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeGuard

import numpy as np
import torch
from torch import Tensor

from actorflow_compiler.core.expressions import (
    FUNCTIONS,
    Condition,
    Expression,
    NumberSource,
    Operand,
    of_python,
    sources,
)

__all__ = [
    "Milestones",
    "SymNumber",
    "NumberEnv",
    "as_float",
    "expression_of",
    "is_sym_number",
    "specialized",
    "current_value",
]

UFUNCS = {np.add: "add", np.subtract: "sub", np.multiply: "mul", np.true_divide: "truediv"} | {
    function: name for name, function in FUNCTIONS.items() if name.startswith("np.")
}
torch_function_handlers: list[Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]] = []
"""The function that calls functions of torch with symbolic numbers; ``ops.py`` appends the only one."""

MATH = tuple(name.removeprefix("math.") for name in FUNCTIONS if name.startswith("math."))


class NumberEnv:
    """The numbers of one run of a step: expressions that its graph reads, and conditions (guards) on their values."""

    def __init__(self) -> None:
        self.read: dict[str, Operand] = {}  # name of a scalar of the plan → its expression
        self.kinds: dict[NumberSource, str] = {}  # source of each symbolic number → "int" or "float"
        self.written: dict[NumberSource, Operand] = {}  # number in optimizer state → its new value
        self.ended = False  # whether the step has run: reads then add no conditions
        self.views: set[str] = set()  # lines where the plan is specialized to i, so that x[i] can be a view
        self.closed = False  # whether the capture is over: symbolic numbers then act as plain ones
        self._conditions: dict[str, Condition] = {}  # by text, since 1 == 1.0
        self._known: dict[str, str] = {}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions on numbers under which the plan holds."""
        return tuple(self._conditions.values())

    def begin(self) -> None:
        """Begin a run of the step."""
        self.ended = False
        self.read.clear()
        self.kinds.clear()
        self.written.clear()
        self._conditions.clear()
        self._known.clear()

    def end(self) -> None:
        """End the run of the step: reads of symbolic numbers from now on add no conditions."""
        self.ended = True

    def stand_in(self, source: NumberSource, value: Any) -> SymNumber:
        """A symbolic number for a number of the script."""
        self.kinds[source] = type(value).__name__
        return SymNumber(source, value, self)

    def name(self, expression: Operand) -> str:
        """The name by which the plan reads an expression."""
        exact = repr(expression)
        if exact not in self._known:
            name = f"number {len(self.read)}: {expression}"
            self.read[name], self._known[exact] = expression, name
        return self._known[exact]

    def is_specialized(self, source: NumberSource) -> bool:
        """Whether the plan is specialized to a number's value, not only to a branch or remainder that depends on it."""
        return any(
            type(condition.value) is not bool
            and getattr(condition.expression, "function", "") != "mod"
            and source in sources(condition.expression)
            for condition in self._conditions.values()
        )

    def specialize(self, expression: Operand, value: Any) -> Any:
        """Specialize the plan to the value of an expression: add this condition, and return the value."""
        if not self.ended:
            condition = Condition(expression, of_python(value))
            self._conditions.setdefault(repr(condition), condition)
        return value


class SymNumber:
    """A symbolic int or float: its current value, and its expression in terms of numbers of the script."""

    __slots__ = ("env", "expression", "value")

    def __init__(self, expression: Operand, value: Any, numbers: NumberEnv) -> None:
        self.expression, self.value, self.env = expression, value, numbers

    @property  # type: ignore[misc]  # so that isinstance(x, float) holds
    def __class__(self) -> type:
        return type(self.value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch_function_handlers[0](func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        sign = UFUNCS.get(ufunc)
        if sign and method == "__call__" and not kwargs and all(map(_is_number, inputs)):
            return self._apply(sign, *inputs)
        return getattr(ufunc, method)(
            *map(specialized, inputs), **{key: specialized(value) for key, value in kwargs.items()}
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.array(specialized(self), *args, **kwargs)

    # -- operations that stay symbolic -------------------------------------------------------------------------

    def _apply(self, function: str, *operands: Any) -> Any:
        """Apply a function to numbers, among them this one; the result is a symbolic number where possible."""
        try:
            value = FUNCTIONS[function](*map(current_value, operands))
        except (ArithmeticError, ValueError):  # no result for these values: specialized below, where Python raises
            value = None
        if isinstance(value, np.bool_):
            value = bool(value)
        mine = [o.value for o in operands if is_sym_number(o)]
        known = function.startswith("np.") or any(type(v) is np.float64 for v in mine)
        of_numpy = type(value) is np.float64 and known  # and so in each call
        if not (type(value) in (int, float, bool) or of_numpy) or self.env.ended:  # a complex number, say
            return FUNCTIONS[function](*map(specialized, operands))
        return SymNumber(Expression(function, tuple(map(expression_of, operands))), value, self.env)

    def _specialized(self, function: str, *operands: Any) -> Any:
        return specialized(self._apply(function, *operands))

    def __neg__(self) -> Any:
        return self._apply("neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self._apply("abs", self)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is not None or not _is_number(other):
            return (
                NotImplemented if modulus is None else pow(specialized(self), specialized(other), specialized(modulus))
            )
        return _power(self, other)

    def __rpow__(self, other: Any) -> Any:
        if isinstance(other, Tensor):
            return torch.pow(other, self)  # type: ignore[call-overload]
        return _power(other, self) if _is_number(other) else NotImplemented

    # -- operations that specialize -------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._specialized("truth", self))

    def __float__(self) -> float:
        return float(specialized(self))

    def __int__(self) -> int:
        return int(self._specialized("int", self))

    def __index__(self) -> int:
        return specialized(self).__index__()  # type: ignore[no-any-return]

    def __complex__(self) -> complex:
        return complex(specialized(self))

    def __hash__(self) -> int:
        return hash(specialized(self))

    def __repr__(self) -> str:
        return repr(specialized(self))

    def __str__(self) -> str:
        return str(specialized(self))

    def __format__(self, spec: str) -> str:
        return format(specialized(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return specialized(self).__reduce_ex__(protocol)

    def __copy__(self) -> SymNumber:
        return self

    def __deepcopy__(self, memo: Any) -> SymNumber:
        return self

    def __round__(self, digits: Any = None) -> Any:
        return self._apply("round", self, *(() if digits is None else (specialized(digits),)))

    def __floor__(self) -> Any:
        return self._apply("floor", self)

    def __ceil__(self) -> Any:
        return self._apply("ceil", self)

    def __trunc__(self) -> Any:
        return self._apply("trunc", self)

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other)

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # lookups by protocols: the class has those that it supports
            raise AttributeError(name)
        return getattr(specialized(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SymNumber.__slots__:
            object.__setattr__(self, name, value)
        else:
            self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self.value).__name__!r} object has no attribute {name!r}")


class Milestones(Counter[int]):
    """Milestones of a learning rate scheduler, looked up by comparison: a hash would specialize a symbolic number."""

    def __contains__(self, step: object) -> bool:
        return any(step == one for one in self)

    def __getitem__(self, step: int) -> int:
        return next((count for one, count in self.items() if step == one), 0)


def as_float(*args: Any) -> Any:
    """``float(…)`` that keeps a symbolic number symbolic."""
    one = args[0] if len(args) == 1 else None
    if not is_sym_number(one):
        return float(*args)
    return one if type(one.value) is float else one._apply("float", one)


def is_sym_number(value: object) -> TypeGuard[SymNumber]:
    """Whether a value is a symbolic number.  ``isinstance`` takes it for an int or a float."""
    return type(value) is SymNumber


def _is_number(value: object) -> bool:
    """Whether a value is a number that ``SymNumber`` computes with; symbolic numbers and NumPy's float64 are, too."""
    return isinstance(value, int | float) and not _is_unbacked(value)


def _is_unbacked(value: object) -> bool:
    """Whether a value is an ``UnbackedNumber``, whose own operators apply."""
    return hasattr(type(value), "apply_function")


def expression_of(value: Any) -> Operand:
    """The expression of a symbolic number; for other numbers, or once its capture is over, the plain number."""
    if type(value) is SymNumber:
        return of_python(value.value) if value.env.closed else value.expression
    return value if type(value) in (int, float, bool) else float(value) if isinstance(value, float) else int(value)


def current_value(value: Any) -> Any:
    """The current value of a symbolic number, without adding a condition; any other value unchanged."""
    return value.value if type(value) is SymNumber else value


def specialized(value: Any) -> Any:
    """The value of a symbolic number, to which this specializes the plan; any other value unchanged."""
    return value.env.specialize(value.expression, value.value) if type(value) is SymNumber else value


def _power(base: Any, exponent: Any) -> Any:
    """A power.  Its type depends on values (complex or float for some operands), so it decides the signs first."""
    one = base if type(base) is SymNumber else exponent
    if not (base > 0 and (exponent >= 0 or type(current_value(exponent)) is float)):
        return specialized(base) ** specialized(exponent)
    return one._apply("pow", base, exponent)


def _binary(name: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    function = FUNCTIONS[name]

    def forward(self: SymNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return REFLECTED[name](other, self) if name in REFLECTED else function(specialized(self), other)
        if not _is_number(other):
            return NotImplemented
        return self._apply(name, self, other)

    def backward(self: SymNumber, other: Any) -> Any:
        return self._apply(name, other, self) if _is_number(other) else NotImplemented

    return forward, backward


def _compared(name: str) -> Callable[[Any, Any], Any]:
    function = FUNCTIONS[name]
    mirrored = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(name, name)

    def compare(self: SymNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return FUNCTIONS[mirrored](other, self)
        if not _is_number(other):
            return NotImplemented
        return self._specialized(name, self, other)

    compare.__name__ = f"__{function.__name__}__"
    return compare


# a number on the left, a tensor on the right: as torch.Tensor.__radd__ and so on
REFLECTED: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, n: x + n,
    "mul": lambda x, n: x * n,
    "sub": lambda x, n: torch.rsub(x, n),
    "truediv": lambda x, n: x.reciprocal() * n,
}


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    _forward, _backward = _binary(_name)
    setattr(SymNumber, f"__{_name}__", _forward)
    setattr(SymNumber, f"__r{_name}__", _backward)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(SymNumber, f"__{_name}__", _compared(_name))
for _name in ("and", "or", "xor", "lshift", "rshift"):

    def _bits(self: SymNumber, other: Any, name: str = _name) -> Any:
        return getattr(specialized(self), f"__{name}__")(specialized(other))

    def _bits_of(self: SymNumber, other: Any, name: str = _name) -> Any:
        return getattr(specialized(other), f"__{name}__")(specialized(self))

    setattr(SymNumber, f"__{_name}__", _bits)
    setattr(SymNumber, f"__r{_name}__", _bits_of)


@contextmanager
def symbolic_math() -> Iterator[None]:
    """Let functions of ``math`` keep numbers symbolic."""
    before = {name: getattr(math, name) for name in MATH}

    def opened(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            later: Any = next(filter(_is_unbacked, args), None)
            if later is not None and hasattr(torch, name):
                return later.apply_function(getattr(torch, name), *args)
            one = next((a for a in args if type(a) is SymNumber), None)
            if one is None or not all(map(_is_number, args)):
                return function(*args)
            return one._apply(f"math.{name}", *args)

        return call

    for name, function in before.items():
        setattr(math, name, opened(name, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(math, name, function)
