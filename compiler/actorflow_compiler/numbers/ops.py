"""Functions of torch that are called with symbolic numbers, as ops that read the numbers when they run.

A number that is a factor, a summand, a bound or a fill value becomes a tensor without dims, of the dtype in which torch
would compute.  In any other place, the plan is specialized to the number's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from actorflow_compiler.numbers.symbolic import (
    SymNumber,
    current_value,
    expression_of,
    specialized,
    symbolic_math,
    torch_function_handlers,
)
from actorflow_compiler.numbers.unbacked import UnbackedNumber, is_unbacked, unbacked_items

__all__ = [
    "TAKES_PLAIN_NUMBER",
    "NUMBER",
    "OPS",
    "RATES_MARK",
    "SymbolicNumberMode",
    "apply",
    "number_tensor",
    "symbolic_numbers",
]

RATES_MARK = "rates"  # key of the marks of a fused optimizer's step: the expressions of its rates
FUSED = frozenset((torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_))
NUMBER = "actorflow.number.default"  # op in a trace: a number that the plan reads by its name
TAKES_PLAIN_NUMBER = frozenset({
    "aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.div.Tensor", "actorflow.add_scaled",
    "actorflow.addcmul_scaled", "actorflow.addcdiv_scaled", "actorflow.lerp_to",
})  # fmt: skip
"""Ops that take a plain number beside 16-bit tensors: torch computes with it in more than 16 bits."""

BOUNDING = frozenset((
    "clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max", "clamp_min_", "clamp_max_",
))  # fmt: skip

torch.library.define("actorflow::number", "(str name, *, ScalarType dtype, Device device) -> Tensor")


def _shape_of_number(name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)


torch.library.register_fake("actorflow::number", _shape_of_number)


def number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor without dims."""
    return torch.full((), value, dtype=dtype, device=device)


# -- ops of optimizers, without gradients: they scale a summand by a number --------------------------


@torch.library.custom_op("actorflow::add_scaled", mutates_args=())
def add_scaled(x: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    """X + alpha·y."""
    return torch.add(x, y, alpha=_value(alpha))


@torch.library.custom_op("actorflow::addcmul_scaled", mutates_args=())
def addcmul_scaled(x: Tensor, a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """X + value·a·b."""
    return torch.addcmul(x, a, b, value=_value(value))


@torch.library.custom_op("actorflow::addcdiv_scaled", mutates_args=())
def addcdiv_scaled(x: Tensor, a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """X + value·a / b."""
    return torch.addcdiv(x, a, b, value=_value(value))


@torch.library.custom_op("actorflow::lerp_to", mutates_args=())
def lerp_to(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """X + weight·(y - x)."""
    return torch.lerp(x, y, _value(weight))


def _value(number: Any) -> Any:
    """A scalar operand as a number: plans give numbers, tests of ops tensors."""
    return number.item() if isinstance(number, Tensor) else number


@add_scaled.register_fake
def _(x: Any, y: Any, alpha: Any) -> Any:
    return torch.add(x, y)


@addcmul_scaled.register_fake
def _(x: Any, a: Any, b: Any, value: Any) -> Any:
    return torch.addcmul(x, a, b)


@addcdiv_scaled.register_fake
def _(x: Any, a: Any, b: Any, value: Any) -> Any:
    return torch.addcdiv(x, a, b)


@lerp_to.register_fake
def _(x: Any, y: Any, weight: Any) -> Any:
    return torch.lerp(x, y, 0.5)


OPS: dict[str, Callable[..., Any]] = {
    "number": number,
    "add_scaled": lambda x, y, alpha: torch.add(x, y, alpha=_value(alpha)),
    "addcmul_scaled": lambda x, a, b, value: torch.addcmul(x, a, b, value=_value(value)),
    "addcdiv_scaled": lambda x, a, b, value: torch.addcdiv(x, a, b, value=_value(value)),
    "lerp_to": lambda x, y, weight: torch.lerp(x, y, _value(weight)),
}

# -- functions of torch that take symbolic numbers ---------------------------------------------------


class SymbolicNumberMode(TorchFunctionMode):
    """The mode that also finds symbolic numbers inside lists and dictionaries among the arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUSED:
            return _step(func, args, kwargs)
        if any(map(_contains_number, args)) or (
            kwargs and (any(map(_contains_number, kwargs.values())) or _scales_by_tensor(kwargs))
        ):
            return apply(func, args, kwargs)
        if getattr(func, "__name__", "") in BOUNDING and _has_mixed_bounds(func, args, kwargs):
            return apply(func, args, kwargs)
        return func(*args, **kwargs)


def _step(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A step of a fused optimizer, marked with the expressions of its rates."""
    rates = {key: kwargs[key] for key in ("lr", "weight_decay", "momentum", "beta1", "beta2") if key in kwargs}
    before = fx_traceback.current_meta.get("custom") or {}
    fx_traceback.current_meta["custom"] = before | {
        RATES_MARK: {key: expression_of(rate) for key, rate in rates.items()}
    }
    try:
        settled = {key: current_value(value) if key in rates else specialized(value) for key, value in kwargs.items()}
        return func(*args, **settled)
    finally:
        fx_traceback.current_meta["custom"] = before


@contextmanager
def symbolic_numbers() -> Iterator[None]:
    """Let ``math`` and ``item()`` keep numbers symbolic where they can; torch does so in a ``SymbolicNumberMode``."""
    with symbolic_math(), unbacked_items():
        yield


def _scales_by_tensor(kwargs: Mapping[str, Any]) -> bool:
    """Whether ``alpha`` or ``value`` is a tensor, whose value torch would read."""
    return isinstance(kwargs.get("alpha"), Tensor) or isinstance(kwargs.get("value"), Tensor)


def _has_mixed_bounds(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether one bound is a number and the other a tensor, whose value torch would read."""
    bounds = _bounds_of(func, args, kwargs).values()
    return any(map(_is_read_as_number, bounds)) and any(not isinstance(b, Tensor) and b is not None for b in bounds)


def _is_read_as_number(value: Any) -> bool:
    """Whether torch reads a tensor as a number where it expects one."""
    return isinstance(value, Tensor) and not value.ndim and not value.requires_grad


def _contains_number(value: Any) -> bool:
    """Whether a symbolic or unbacked number is in an argument."""
    kind = type(value)
    if kind is SymNumber or kind is UnbackedNumber:
        return True
    if kind in (list, tuple):
        return any(map(_contains_number, value))
    return kind is dict and any(map(_contains_number, value.values()))


def apply(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch that is given symbolic or unbacked numbers."""
    handler = HANDLERS.get(getattr(func, "__name__", ""))
    if handler is not None and not any(map(_is_taken_as_is, (*args, *kwargs.values()))):
        made = handler(func, args, dict(kwargs))
        if made is not NotImplemented:
            return made
    return func(*pytree.tree_map(_specialized, tuple(args)), **pytree.tree_map(_specialized, dict(kwargs)))


torch_function_handlers.append(apply)


def _is_taken_as_is(value: Any) -> bool:
    """Whether an argument rules handlers out: a container of symbolic numbers, or a number whose step has ended."""
    if type(value) in (list, tuple, dict):
        return _contains_number(value)
    return type(value) is SymNumber and value.env.ended


def _specialized(value: Any) -> Any:
    """The value of a number.  Raises CaptureError for an unbacked one that is not known."""
    return value.known_value() if is_unbacked(value) else specialized(value)


def _is_open(value: Any) -> bool:
    """Whether a value is a symbolic or an unbacked number."""
    return type(value) is SymNumber or type(value) is UnbackedNumber


def _sample(value: Any) -> Any:
    """A plain number of the same Python type, for type promotion."""
    return current_value(value) if not is_unbacked(value) else 1.0 if value.tensor.dtype.is_floating_point else 1


def number_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A symbolic or unbacked number as a tensor of the graph; any other value unchanged."""
    if is_unbacked(value):
        return value.tensor.to(dtype)
    if type(value) is not SymNumber:
        return value
    name = value.env.name(value.expression)
    return torch.ops.actorflow.number(name, dtype=dtype, device=device)


def _promoted(values: Sequence[Any]) -> list[Any]:
    """Operands of one op, with numbers as tensors of the dtype that torch computes in."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    like = tensors[0]
    for v in values:
        dtype = like.dtype if v is None else torch.result_type(like, _sample(v))
        like = like if like.dtype == dtype else torch.empty_like(like, dtype=dtype)
    # unbacked numbers keep their precision beside tensors of these dtypes
    exact = like.ndim > 0 and like.dtype in (torch.bfloat16, torch.float16)
    return [v.tensor if exact and is_unbacked(v) else number_tensor(v, like.dtype, like.device) for v in values]


def _binary_op(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``add(x, 2)`` and the like, and ``add(x, y, alpha=2)``."""
    alpha = kwargs.pop("alpha", 1)
    if len(args) != 2 or kwargs or not any(isinstance(a, Tensor) for a in args):
        return NotImplemented
    if _is_open(alpha) or isinstance(alpha, Tensor):
        x, y = args
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or func.__name__ not in ("add", "add_", "sub", "sub_"):
            return NotImplemented
        alpha = -alpha if func.__name__.startswith("sub") else alpha
        return _scaled(func, torch.ops.actorflow.add_scaled, x, (y,), alpha, lambda n: x + torch.mul(y, n))
    return func(*_promoted(args), **({} if alpha == 1 else {"alpha": alpha}))


def _scaled(
    func: Any, op: Callable[..., Tensor], x: Tensor, others: Sequence[Tensor], value: Any,
    written_out: Callable[[Any], Tensor],
) -> Any:  # fmt: skip
    """``op(x, *others, value)``, in place if ``func`` is; written out in plain ops where a gradient is needed."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *others)):
        made = written_out(value)
    elif not all(t.dtype == x.dtype for t in others):
        return NotImplemented
    else:
        made = op(
            x, *others, number_tensor(value, x.dtype, x.device) if type(value) is SymNumber else _as_tensor(value)
        )
    return x.copy_(made) if func.__name__.endswith("_") else made


def _as_tensor(value: Any) -> Tensor:
    """The tensor of an unbacked number; a tensor unchanged."""
    found = value.tensor if is_unbacked(value) else value
    assert isinstance(found, Tensor)
    return found


def _added_product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``addcmul(x, a, b, value=2)`` and ``addcdiv``."""
    if len(args) != 3 or kwargs.keys() != {"value"} or not all(isinstance(a, Tensor) for a in args):
        return NotImplemented
    x, a, b = args
    value, ops = kwargs["value"], torch.ops.actorflow
    if func.__name__.startswith("addcmul"):
        return _scaled(func, ops.addcmul_scaled, x, (a, b), value, lambda n: x + torch.mul(a, n) * b)
    return _scaled(func, ops.addcdiv_scaled, x, (a, b), value, lambda n: x + torch.mul(a / b, n))


def _lerp(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``lerp(x, y, weight)``."""
    weight = kwargs.pop("weight", args[-1])
    x, y = args[:2]
    if kwargs or not _is_open(weight) or not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return NotImplemented

    def written_out(n: SymNumber) -> Tensor:
        return torch.lerp(x, y, number_tensor(n, x.dtype, x.device))

    return _scaled(func, torch.ops.actorflow.lerp_to, x, (y,), weight, written_out)


def _clamp(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``clamp(x, low, high)``."""
    x = args[0] if args else kwargs["input"]
    bounds = _bounds_of(func, args, kwargs)
    if not bounds.keys() <= {"min", "max"}:
        return NotImplemented
    bounds = {name: b.item() if _is_read_as_number(b) else b for name, b in bounds.items()}
    if any(isinstance(b, Tensor) for b in bounds.values()) or not any(map(_is_open, bounds.values())):
        return NotImplemented
    one = next((b for b in bounds.values() if type(b) is SymNumber), None)
    both = [b if _is_open(b) or b is None or one is None else SymNumber(b, b, one.env) for b in bounds.values()]
    found = _promoted([x, *both])[1:]
    dtype, device = next((b.dtype, b.device) for b in found if isinstance(b, Tensor))
    found = [b if b is None or isinstance(b, Tensor) else torch.full((), b, dtype=dtype, device=device) for b in found]
    return func(x, **dict(zip(bounds, found, strict=True)))


def _bounds_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of a clamp, by name."""
    names = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(func.__name__.rstrip("_"), ("min", "max"))
    given = dict(zip(("input", *names), args, strict=False)) | dict(kwargs)
    given.pop("input", None)
    return given


def _pow(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``pow(2, x)``; the exponent of a tensor stays a constant, as kernels depend on its value."""
    if len(args) != 2 or kwargs or not isinstance(args[1], Tensor):
        return NotImplemented
    return torch.pow(*_promoted(args))


def _rpow(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.__rpow__(2)``."""
    return _pow(func, (args[1], args[0]), kwargs) if len(args) == 2 else NotImplemented


def _rsub(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``rsub(x, 2)``."""
    if len(args) != 2 or kwargs or not isinstance(args[0], Tensor):
        return NotImplemented
    x, n = _promoted(args)
    return n - x


def _where(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``where(condition, x, 2)``."""
    if func is torch.Tensor.where:
        args = (args[1], args[0], *args[2:])
    if len(args) != 3 or kwargs or not any(isinstance(a, Tensor) for a in args[1:]):
        return NotImplemented
    return torch.where(args[0], *_promoted(args[1:]))


def _fill(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``masked_fill(x, mask, 2)`` and ``x.fill_(2)``."""
    *before, value = args
    x = args[0]
    if kwargs or not _is_open(value) or not isinstance(x, Tensor):
        return NotImplemented
    if torch.result_type(x, _sample(value)) != x.dtype:  # torch decides about such a change of dtype
        return NotImplemented
    return func(*before, number_tensor(value, x.dtype, x.device))


def _full(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``full(size, 2)``, ``full_like(x, 2)`` and ``x.new_full(size, 2)``."""
    value = kwargs.pop("fill_value", args[-1])
    before = args if args[-1] is not value else args[:-1]
    if not _is_open(value):
        return NotImplemented
    like = func.__name__ in ("full_like", "new_full")
    dtype = kwargs.get("dtype") or (before[0].dtype if like else _dtype_of(value))
    if dtype == torch.bool or (isinstance(_sample(value), float) and not (dtype.is_floating_point or dtype.is_complex)):
        return NotImplemented
    made = func(*before, 0, **kwargs | {"dtype": dtype})
    with torch.no_grad():
        return made.detach().fill_(number_tensor(value, dtype, made.device)).requires_grad_(made.requires_grad)


def _tensor_of_number(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``tensor(2)``."""
    if len(args) != 1 or not _is_open(args[0]):
        return NotImplemented
    return _full(torch.full, ((), args[0]), kwargs)


def _dtype_of(value: Any) -> torch.dtype:
    """The dtype of the tensor into which torch converts a number."""
    return torch.get_default_dtype() if isinstance(_sample(value), float) else torch.int64


HANDLERS: dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys((
        "add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "eq", "ne", "lt", "le", "gt", "ge",
        "not_equal", "less", "less_equal", "greater", "greater_equal", "__eq__", "__ne__", "__lt__", "__le__", "__gt__",
        "__ge__", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "__div__", "__iadd__",
        "__isub__", "__imul__", "__itruediv__", "__idiv__", "add_", "sub_", "mul_", "div_", "true_divide_", "multiply_",
        "divide_", "subtract_", "floor_divide", "remainder", "fmod", "__floordiv__", "__mod__",
    ), _binary_op),
    **dict.fromkeys(("addcmul", "addcmul_", "addcdiv", "addcdiv_"), _added_product),
    **dict.fromkeys(("lerp", "lerp_"), _lerp),
    **dict.fromkeys(BOUNDING, _clamp),
    "pow": _pow, "__rpow__": _rpow, "rsub": _rsub, "__rsub__": _rsub,
    "where": _where,
    **dict.fromkeys(("masked_fill", "masked_fill_", "fill_"), _fill),
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
    **dict.fromkeys(("tensor", "as_tensor", "scalar_tensor"), _tensor_of_number),
}  # fmt: skip
