"""``flow.math`` of OneFlow's first generation, implemented by torch's functions.

The argument ``name`` of a function, the name of the op in OneFlow, has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from actorflow.functions.elementary import gelu, relu, sigmoid, tanh
from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "add_n",
    "argmax",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "clip_by_value",
    "cos",
    "cosh",
    "divide",
    "equal",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "floordiv",
    "gelu",
    "greater",
    "greater_equal",
    "l2_normalize",
    "less",
    "less_equal",
    "lgamma",
    "log",
    "log1p",
    "logical_and",
    "logical_not",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "negative",
    "not_equal",
    "pow",
    "reciprocal",
    "reduce_all",
    "reduce_any",
    "reduce_euclidean_norm",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_std",
    "reduce_sum",
    "reduce_variance",
    "relu",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "softplus",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "top_k",
]

Axis = int | Sequence[int] | None


class _UnaryFunction(Protocol):
    def __call__(self, x: Tensor, name: str | None = None) -> Tensor:
        """An op on each element."""


class _BinaryFunction(Protocol):
    def __call__(self, x: Any, y: Any, name: str | None = None) -> Tensor:
        """An op on each pair of elements, with broadcasting; one operand may be a number."""


def _wrap_unary(run: Any) -> _UnaryFunction:
    def function(x: Tensor, name: str | None = None) -> Tensor:
        found: Tensor = run(x)
        return found

    function.__doc__ = f"Torch's ``{run.__name__}``."
    return function


def _wrap_binary(run: Any) -> _BinaryFunction:
    def function(x: Any, y: Any, name: str | None = None) -> Tensor:
        device = next((t.device for t in (x, y) if isinstance(t, Tensor)), None)
        found: Tensor = run(*(t if isinstance(t, Tensor) else torch.full((), t, device=device) for t in (x, y)))
        return found

    function.__doc__ = f"Torch's ``{run.__name__}``; one of both may be a number."
    return function


abs = _wrap_unary(torch.abs)
acos = _wrap_unary(torch.acos)
acosh = _wrap_unary(torch.acosh)
asin = _wrap_unary(torch.asin)
asinh = _wrap_unary(torch.asinh)
atan = _wrap_unary(torch.atan)
atanh = _wrap_unary(torch.atanh)
ceil = _wrap_unary(torch.ceil)
cos = _wrap_unary(torch.cos)
cosh = _wrap_unary(torch.cosh)
erf = _wrap_unary(torch.erf)
erfc = _wrap_unary(torch.erfc)
exp = _wrap_unary(torch.exp)
expm1 = _wrap_unary(torch.expm1)
floor = _wrap_unary(torch.floor)
lgamma = _wrap_unary(torch.lgamma)
log = _wrap_unary(torch.log)
log1p = _wrap_unary(torch.log1p)
logical_not = _wrap_unary(torch.logical_not)
negative = _wrap_unary(torch.neg)
reciprocal = _wrap_unary(torch.reciprocal)
round = _wrap_unary(torch.round)
rsqrt = _wrap_unary(torch.rsqrt)
sign = _wrap_unary(torch.sign)
sin = _wrap_unary(torch.sin)
sinh = _wrap_unary(torch.sinh)
softplus = _wrap_unary(torch.nn.functional.softplus)
sqrt = _wrap_unary(torch.sqrt)
square = _wrap_unary(torch.square)
tan = _wrap_unary(torch.tan)

add = _wrap_binary(torch.add)
atan2 = _wrap_binary(torch.atan2)
divide = _wrap_binary(torch.true_divide)
equal = _wrap_binary(torch.eq)
floordiv = _wrap_binary(torch.floor_divide)
greater = _wrap_binary(torch.gt)
greater_equal = _wrap_binary(torch.ge)
less = _wrap_binary(torch.lt)
less_equal = _wrap_binary(torch.le)
logical_and = _wrap_binary(torch.logical_and)
maximum = _wrap_binary(torch.maximum)
minimum = _wrap_binary(torch.minimum)
mod = _wrap_binary(torch.fmod)
multiply = _wrap_binary(torch.mul)
not_equal = _wrap_binary(torch.ne)
pow = _wrap_binary(torch.pow)
subtract = _wrap_binary(torch.sub)


def add_n(inputs: Sequence[Tensor], name: str | None = None) -> Tensor:
    """The sum of tensors of the same shape."""
    first, *others = inputs
    for tensor in others:
        first = first + tensor
    return first


def reduce_sum(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """The sum over ``axis``; None means all dims."""
    return torch.sum(input_tensor, _dims(input_tensor, axis), keepdim=keepdims)


def reduce_mean(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """The mean over ``axis``; None means all dims."""
    return torch.mean(input_tensor, _dims(input_tensor, axis), keepdim=keepdims)


def reduce_max(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """The maximum over ``axis``; None means all dims."""
    return torch.amax(input_tensor, _dims(input_tensor, axis), keepdim=keepdims)


def reduce_min(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """The minimum over ``axis``; None means all dims."""
    return torch.amin(input_tensor, _dims(input_tensor, axis), keepdim=keepdims)


def reduce_prod(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """The product over ``axis``; None means all dims."""
    found = input_tensor
    for dim in sorted(_dims(input_tensor, axis), reverse=True):
        found = torch.prod(found, dim, keepdim=keepdims)
    return found


def reduce_std(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """The standard deviation over ``axis``, of all elements (divided by n, not n - 1); None means all dims."""
    return torch.std(input_tensor, _dims(input_tensor, axis), correction=0, keepdim=keepdims)


def reduce_variance(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """The variance over ``axis``, the square of ``reduce_std``; None means all dims."""
    return torch.var(input_tensor, _dims(input_tensor, axis), correction=0, keepdim=keepdims)


def reduce_euclidean_norm(
    input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """The square root of the sum of squares over ``axis``; None means all dims."""
    found: Tensor = torch.linalg.vector_norm(input_tensor, 2, _dims(input_tensor, axis), keepdim=keepdims)
    return found


def reduce_logsumexp(
    input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """The logarithm of the sum of exponentials over ``axis``; None means all dims."""
    return torch.logsumexp(input_tensor, _dims(input_tensor, axis), keepdim=keepdims)


def reduce_any(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """Whether any element over ``axis`` is not 0; None means all dims."""
    return torch.any(input_tensor, _dims(input_tensor, axis), keepdim=keepdims)


def reduce_all(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """Whether no element over ``axis`` is 0; None means all dims."""
    return torch.all(input_tensor, _dims(input_tensor, axis), keepdim=keepdims)


def argmax(input: Tensor, axis: int = -1, name: str | None = None) -> Tensor:
    """The index of the largest element along ``axis``."""
    return torch.argmax(input, axis)


def top_k(input: Tensor, axis: int = -1, k: int = 1, sorted: bool = True, name: str | None = None) -> Tensor:
    """The indices of the ``k`` largest elements along ``axis``."""
    return torch.topk(input, k, axis, sorted=sorted).indices


def clip_by_value(
    values: Tensor, min_value: float | None = None, max_value: float | None = None, name: str | None = None
) -> Tensor:
    """The elements, limited to the range from ``min_value`` to ``max_value``."""
    return torch.clamp(values, min_value, max_value)


def l2_normalize(input: Tensor, axis: int | None = None, epsilon: float = 1e-12, name: str | None = None) -> Tensor:
    """The input divided by its norm along ``axis`` (dim 0 for None); a norm below √epsilon counts as √epsilon."""
    squares = torch.sum(input * input, 0 if axis is None else axis, keepdim=True)
    return input * torch.clamp(squares, min=epsilon).rsqrt()


def _dims(tensor: Tensor, axis: Axis) -> list[int]:
    given = range(tensor.dim()) if axis is None else (axis,) if isinstance(axis, int) else axis
    return [d % max(tensor.dim(), 1) for d in given]


answer_with_nearest(__name__)
