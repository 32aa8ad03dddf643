"""Element-wise functions of selected rows.

Some functions are not finite everywhere, or their derivatives are not.  Before a call of these, rows that are not
selected are filled with a number at which both are finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.masked.rules import RULES, bound, named, op_name, rule
from actorflow_compiler.masked.selecting import BROADCAST
from actorflow_compiler.masked.tensor import (
    MaskedRows,
    common_selection,
    filled,
    refuse,
    refuse_pairs,
    selection_of_count,
    tensors_in,
    wrap,
)

__all__ = ["of_count", "pointwise"]

FINITE = (  # functions that are finite for finite numbers, with finite derivatives
    "add", "sub", "subtract", "rsub", "mul", "multiply", "neg", "negative", "positive", "abs", "absolute", "square",
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "softshrink",
    "hardshrink", "hardtanh", "hardswish", "hardsigmoid", "tanhshrink", "threshold", "logsigmoid", "sigmoid", "expit",
    "tanh", "sin", "cos", "atan", "arctan", "asinh", "arcsinh", "erf", "erfc", "sign", "sgn", "signbit", "floor",
    "ceil", "round", "trunc", "frac", "heaviside", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum",
    "fmax", "fmin", "where", "lerp", "addcmul", "nan_to_num", "masked_fill", "logaddexp", "isnan", "isinf", "isfinite",
    "isclose", "eq", "ne", "lt", "le", "gt", "ge", "greater", "less", "greater_equal", "less_equal", "not_equal",
    "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_not", "detach", "clone", "contiguous", "float", "double", "half", "bfloat16", "long", "int",
    "short", "bool", "cpu", "cuda", "zeros_like", "ones_like", "full_like", "real", "imag", "conj",
    "view_as_real", "requires_grad_", "nan_to_num", "__and__", "__or__", "__xor__", "__invert__", "__rsub__",
    "__rmul__", "__radd__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "dropout", "alpha_dropout",
    "feature_dropout",
)  # fmt: skip
SAFE: dict[str, float] = {  # function → a number at which it and its derivative are finite
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow", "float_power", "lgamma", "digamma",
                     "xlogy", "atan2", "arctan2", "hypot", "fmod", "remainder", "addcdiv", "div", "divide",
                     "true_divide", "floor_divide", "__rdiv__", "__rtruediv__", "__rpow__", "__rfloordiv__", "__pow__",
                     "__floordiv__", "__rmod__"), 1.0),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh", "tan", "acos", "arccos", "asin", "arcsin", "atanh",
                     "arctanh", "log1p", "erfinv", "sinc"), 0.0),
    "acosh": 2.0, "arccosh": 2.0, "logit": 0.5,
}  # fmt: skip
DIVIDE = ("div", "divide", "true_divide")  # only the divisor has to be safe
DROPS = ("dropout", "alpha_dropout", "feature_dropout")
RANDOM = ("rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal_", "uniform_", "bernoulli_")


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An element-wise function, whose operands broadcast."""
    name = op_name(func)
    rows = tensors_in((args, kwargs))
    if name in DROPS:
        given = bound(("input", "p", "training", "inplace"), args, kwargs)
        if given.get("training", True) and given.get("p", 0.5):
            refuse(
                rows[0], "dropout draws numbers for", "which number an element gets depends on how many are before it",
                instead="dropout over the whole tensor, before it is selected: drop(x)[mask]",
            )  # fmt: skip
        return rows[0]
    if kwargs.get("out") is not None:
        refuse(rows[0], "out= is written with", "their size is not known", "0")
    selection, behind = common_selection(rows), {r._row_dim - r._whole.dim() for r in rows}
    (at, *others) = behind
    if others:
        refuse_pairs(rows[0], f"{name} pairs")
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and not isinstance(leaf, MaskedRows) and leaf.dim() >= -at and leaf.shape[at] != 1:
            mask = selection.origin.mask
            refuse(
                rows[0], f"{name} pairs a tensor of shape {list(leaf.shape)} with", "it has a row for each, also for "
                "those that the mask leaves out", instead=f"the same rows of it: y[{mask}]",
            )  # fmt: skip
    safe = SAFE.get(name)
    divides = name in DIVIDE

    def operand(leaf: Any, number: int) -> Any:
        if not isinstance(leaf, MaskedRows):
            return leaf
        return leaf._whole if safe is None or (divides and number == 0) else filled(leaf, safe)

    plain = [pytree.tree_map(lambda leaf, i=i: operand(leaf, i), a) for i, a in enumerate(args)]
    named_plain = {k: pytree.tree_map(lambda leaf: operand(leaf, 1), v) for k, v in kwargs.items()}
    return pytree.tree_map_only(Tensor, lambda out: wrap(out, out.dim() + at, selection), func(*plain, **named_plain))


@rule("to", "type", "type_as")
def cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert to another dtype or device."""
    v, *others = args
    if not isinstance(v, MaskedRows):
        return func(v, *(o._whole if isinstance(o, MaskedRows) else o for o in others), **kwargs)
    out = func(v._whole, *(o._whole if isinstance(o, MaskedRows) else o for o in others), **kwargs)
    return wrap(out, v._row_dim, v._selection) if isinstance(out, Tensor) else out


@rule("broadcast_tensors")
def broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``broadcast_tensors``; plain tensors are repeated for each row."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    zero = pointwise(torch.add, (tensors[0], 0), {})
    for t in tensors[1:]:
        zero = pointwise(torch.logical_or, (zero, t), {})  # raises for shapes that do not fit
    whole = BROADCAST(*(t._whole if isinstance(t, MaskedRows) else t for t in tensors))
    return tuple(wrap(t, zero._row_dim, zero._selection) for t in whole)


@rule(*RANDOM)
def drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse random numbers: drawn for all rows, they differ from numbers drawn for the selected rows alone."""
    (first, *_) = tensors_in((args, kwargs))
    name, origin = op_name(func), first._selection.origin
    refuse(
        first, f"{name} draws numbers for", "which number a row gets depends on how many are before it",
        instead=f"numbers for the whole tensor, which are selected then: {name}({origin.source})[{origin.mask}]",
    )  # fmt: skip


@rule("new_zeros", "new_ones", "new_full")
def new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor with a row for each selected row."""
    v, *rest = args
    name = op_name(func)
    sizes, fill = (rest[0], rest[1:]) if name == "new_full" or isinstance(rest[0], list | tuple) else (rest, ())
    made = of_count(lambda shape: func(v._whole, shape, *fill, **kwargs), sizes)
    return func(v._whole, *rest, **kwargs) if made is None else made


def of_count(make: Any, sizes: Any) -> MaskedRows | None:
    """A new tensor with the rows of a selection, if one of the sizes is the selection's count; else None."""
    counts = [selection_of_count(s) for s in sizes]
    found = [(at, selection) for at, selection in enumerate(counts) if selection is not None]
    if len(found) != 1:
        return None
    ((at, selection),) = found
    shape = [selection.mask.shape[0] if d == at else n for d, n in enumerate(sizes)]
    return wrap(make(shape), at, selection)


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.exp_()`` and others: computed out of place, and copied into the memory of ``x``."""
    first = args[0]
    if not isinstance(first, MaskedRows):
        refuse(
            tensors_in((args, kwargs))[0], f"{op_name(func)} changes a whole tensor by", "they are fewer than its rows"
        )
    plain = getattr(Tensor, op_name(func).removesuffix("_"))
    before = wrap(first._whole.clone(), first._row_dim, first._selection)  # which a gradient may need
    made = RULES[plain](plain, (before, *args[1:]), kwargs)
    if made._whole.shape != first._whole.shape or not torch.can_cast(made.dtype, first.dtype):
        refuse(first, f"{op_name(func)} changes", f"it would make {made.dtype} of {first.dtype}, or another shape")
    first._whole.copy_(made._whole)
    return first


def fill_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.zero_()`` and ``x.fill_(1)``, on all rows."""
    func(args[0]._whole, *args[1:], **kwargs)
    return args[0]


for _name in (*FINITE, *SAFE):
    RULES.add(named(_name), pointwise)
    _changes = getattr(Tensor, f"{_name}_", None)
    if _changes is not None and hasattr(Tensor, _name) and not _name.startswith("_") and _name not in DROPS:
        RULES.add((_changes,), in_place)
RULES.add((Tensor.requires_grad_,), pointwise)
RULES.add((Tensor.zero_, Tensor.fill_), fill_in_place)
