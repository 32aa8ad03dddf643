"""Unbacked numbers: results of ``x.item()`` in a captured step, whose values are known only when a call runs.

While such a number only enters arithmetic, also with tensors, the graph computes what Python would compute, in Python's
precision: float64 and int64.  Code that needs the value itself (an ``if``, a text) is refused with the line of the
``item()``.  ``UnbackedNumber`` is to ``SymNumber`` as PyTorch's unbacked SymInts are to backed ones.
"""

from __future__ import annotations

import builtins
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import count
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.expressions import FUNCTIONS, Expression, NumberSource, Operand, SourceKind, number_of
from actorflow_compiler.core.torch_internals import items_from
from actorflow_compiler.numbers.symbolic import SymNumber, current_value, expression_of, torch_function_handlers
from actorflow_compiler.numbers.symbolic import as_float as stand_in_as_float
from actorflow_compiler.values.reads import LOOKS_AT_A_VALUE, place_of

__all__ = ["UnbackedNumber", "as_float", "as_int", "is_unbacked", "unbacked_items"]

_names = count()


class UnbackedNumber:
    """The number that a tensor without dims will hold when a call runs."""

    __slots__ = ("expression", "refusal", "resolve", "tensor", "text")

    def __init__(self, tensor: Tensor, refusal: Callable[[], CaptureError], expression: Operand | None = None) -> None:
        self.tensor, self.refusal = tensor, refusal
        # its expression in terms of unbacked whole numbers; a new one has a name of its own
        self.expression = NumberSource(SourceKind.LATER, str(next(_names))) if expression is None else expression
        self.resolve: Callable[[Tensor], Any] = lambda _: None  # the value if it is known, else None
        self.text: Callable[[], str] = str  # its text while a branch is only tried

    @property  # type: ignore[misc]  # for isinstance(x, float)
    def __class__(self) -> type:
        return float if self.tensor.dtype.is_floating_point else int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch_function_handlers[0](func, args, kwargs or {})

    def known_value(self) -> Any:
        """The value itself.  Raises CaptureError where it is not known during capture."""
        found = self.resolve(self.tensor)
        if found is None:
            raise self.refusal()
        return found

    def apply_function(self, function: Callable[..., Any], *operands: Any) -> UnbackedNumber:
        """Apply a function to numbers, among them this one, by computing with tensors."""
        whole = function in WHOLE and not any(isinstance(o, float) for o in operands)
        with torch.no_grad():
            tensor = function(*(_operand(o, whole) for o in operands))
        made = [o.expression if type(o) is UnbackedNumber else expression_of(o) for o in operands] if whole else []
        name = SUMS.get(function) if whole else None
        found = UnbackedNumber(_widest(tensor), self.refusal, None if name is None else Expression(name, tuple(made)))
        found.resolve, found.text = self.resolve, self.text
        return found

    def __bool__(self) -> bool:
        return bool(self.tensor != 0)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc in (np.isfinite, np.isinf, np.isnan) and method == "__call__" and not kwargs:
            return _of_kind(ufunc.__name__, self)
        plain = (value.known_value() if type(value) is UnbackedNumber else value for value in inputs)
        return getattr(ufunc, method)(*plain, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.array(self.known_value(), *args, **kwargs)

    def __neg__(self) -> UnbackedNumber:
        return self.apply_function(torch.neg, self)

    def __pos__(self) -> UnbackedNumber:
        return self

    def __abs__(self) -> UnbackedNumber:
        return self.apply_function(torch.abs, self)

    def __mod__(self, other: Any) -> Any:
        return self._integer_division(torch.remainder, "__mod__", other)

    def __floordiv__(self, other: Any) -> Any:
        return self._integer_division(torch.floor_divide, "__floordiv__", other)

    def _integer_division(self, function: Callable[..., Any], name: str, other: Any) -> Any:
        """Division of whole numbers as in Python; any other operand needs the value itself."""
        if isinstance(self, int) and type(other) is int and other:
            return self.apply_function(function, self, other)
        return getattr(self.known_value(), name)(other)

    def __pow__(self, other: Any) -> Any:
        return self.apply_function(torch.pow, self, other) if _is_number(other) else NotImplemented

    def __rpow__(self, other: Any) -> Any:
        return self.apply_function(torch.pow, other, self) if _is_number(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.known_value())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.known_value(), name)

    def __copy__(self) -> UnbackedNumber:
        return self

    def __deepcopy__(self, memo: Any) -> UnbackedNumber:
        return self


def is_unbacked(value: object) -> TypeGuard[UnbackedNumber]:
    """Whether a value is an unbacked number.  ``isinstance`` takes it for an int or a float."""
    return type(value) is UnbackedNumber


def as_int(*args: Any) -> Any:
    """``int(…)`` that keeps whole numbers in tensors unbacked, and symbolic numbers symbolic."""
    one = args[0] if len(args) == 1 else None
    if isinstance(one, Tensor) and one.numel() == 1 and not (one.is_floating_point() or one.is_complex()):
        one = one.item() if one.dtype != torch.bool else one
    if type(one) is SymNumber:
        return one if isinstance(one, int) else one._apply("int", one)
    return one if type(one) is UnbackedNumber and isinstance(one, int) else int(*args)


def as_float(*args: Any) -> Any:
    """``float(…)`` that keeps numbers in tensors unbacked, and symbolic numbers symbolic."""
    one = args[0] if len(args) == 1 else None
    if isinstance(one, Tensor) and one.numel() == 1 and not one.is_complex():
        one = one.item() if one.dtype != torch.bool else one
    if type(one) is UnbackedNumber:
        return one if isinstance(one, float) else one.apply_function(torch.mul, one, 1.0)
    return stand_in_as_float(one) if type(one) is SymNumber else float(*args)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _operand(value: Any, whole: bool) -> Any:
    """An operand as a tensor or number; with ``whole``, whole numbers are not converted to float64."""
    if type(value) is not UnbackedNumber:
        return value
    return value.tensor if whole else value.tensor.to(torch.float64)


def _widest(tensor: Tensor) -> Tensor:
    """The tensor in the precision of Python's numbers: float64 or int64."""
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64)
    return tensor.to(torch.int64)


def _binary(name: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    function = FUNCTIONS[name]

    def forward(self: UnbackedNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return REFLECTED[name](other, self)
        return self.apply_function(function, self, other) if _is_number(other) else NotImplemented

    def backward(self: UnbackedNumber, other: Any) -> Any:
        return self.apply_function(function, other, self) if _is_number(other) else NotImplemented

    return forward, backward


PREDICATES = ("isfinite", "isinf", "isnan")  # functions of ``math``
SUMS = {FUNCTIONS["add"]: "add", FUNCTIONS["sub"]: "sub", FUNCTIONS["mul"]: "mul", torch.neg: "neg"}
WHOLE = (*SUMS, torch.abs, torch.remainder, torch.floor_divide)
REFLECTED: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, n: x + n,
    "mul": lambda x, n: x * n,
    "sub": lambda x, n: torch.rsub(x, n),
    "truediv": lambda x, n: x.reciprocal() * n,
}
for _name in REFLECTED:
    _forward, _backward = _binary(_name)
    setattr(UnbackedNumber, f"__{_name}__", _forward)
    setattr(UnbackedNumber, f"__r{_name}__", _backward)


def _compared(name: str) -> Callable[..., Any]:
    def compare(self: UnbackedNumber, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return bool(FUNCTIONS[name](self.tensor, _operand(other, whole=True)))  # answered if known, else refused

    return compare


def _known_value_method(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.known_value(), name)(*args)


def _text_method(name: str) -> Callable[..., str]:
    def say(self: UnbackedNumber, *args: Any) -> str:
        return self.text() or str(getattr(self.known_value(), name)(*args))

    return say


for _name in ("repr", "str", "format"):
    setattr(UnbackedNumber, f"__{_name}__", _text_method(f"__{_name}__"))
for _name in (
    "float", "int", "index", "complex", "reduce_ex", "round", "floor", "ceil", "trunc", "rfloordiv", "rmod", "divmod",
    "rdivmod",
):  # fmt: skip
    setattr(UnbackedNumber, f"__{_name}__", _known_value_method(f"__{_name}__"))


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(UnbackedNumber, f"__{_name}__", _compared(_name))


@contextmanager
def unbacked_items() -> Iterator[None]:
    """Let ``x.item()`` return unbacked numbers, and let ``min``, ``max`` and ``math.isfinite`` accept these."""

    def late(tensor: Tensor) -> Any:
        place = place_of(traceback.extract_stack())
        value = tensor.detach().reshape(()).clone()  # the tensor may change later; a number does not
        return UnbackedNumber(_widest(value), lambda: CaptureError(f"{place}\n  {LOOKS_AT_A_VALUE}"))

    before = {"min": builtins.min, "max": builtins.max}
    builtins.min = _replaced_min_or_max(before["min"], torch.lt)
    builtins.max = _replaced_min_or_max(before["max"], torch.gt)
    asking = {name: getattr(math, name) for name in PREDICATES}
    for name, function in asking.items():
        setattr(math, name, _replaced_predicate(name, function))
    try:
        with items_from(late):
            yield
    finally:
        for name, function in before.items():
            setattr(builtins, name, function)
        for name, function in asking.items():
            setattr(math, name, function)


def _replaced_predicate(name: str, plain: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A predicate of ``math`` (``isfinite`` …) that also takes unbacked numbers."""

    def ask(value: Any) -> bool:
        if _is_later(value):
            return _of_kind(name, value)
        return plain(value)

    return ask


def _of_kind(name: str, value: Any) -> bool:
    """Whether an unbacked number is finite, infinite or NaN.  Refused, as a branch is, where that is not known."""
    return bool(getattr(torch, name)(value.tensor if type(value) is UnbackedNumber else value))


def _replaced_min_or_max(plain: Any, better: Callable[[Any, Any], Any]) -> Any:
    """``min`` or ``max`` that also takes unbacked numbers and tensors without dims: the first best argument."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or kwargs or not all(map(_has_no_dims, args)) or not any(map(_is_later, args)):
            return plain(*args, **kwargs)
        one = next((a for a in args if type(a) is UnbackedNumber), None)
        like = next(a.tensor if type(a) is UnbackedNumber else a for a in args if _is_later(a))
        chosen = reduce(lambda a, b: torch.where(better(b, a), b, a), [_as_tensor(a, like) for a in args])
        return chosen if one is None else UnbackedNumber(_widest(chosen.detach()), one.refusal)

    return choose


def _is_later(value: object) -> bool:
    return type(value) is UnbackedNumber or isinstance(value, Tensor)


def _has_no_dims(value: Any) -> bool:
    return (
        type(value) is UnbackedNumber
        or type(value) is SymNumber
        or (isinstance(value, Tensor) and not value.ndim)
        or (number_of(value))
    )


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    """A number as a tensor, of the dtype to which torch promotes it beside the tensor ``like``."""
    if type(value) is UnbackedNumber:
        return value.tensor
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.result_type(like, current_value(value)), device=like.device)
