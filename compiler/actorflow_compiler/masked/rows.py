"""Functions that work on each row by itself go in, with what they are called with; their rows come out.

A function that is not finite everywhere is called on whole tensors that hold a harmless number in rows that do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.masked.rules import RULES, bound, called, named, rule
from actorflow_compiler.masked.selecting import _of_rows, position
from actorflow_compiler.masked.tensor import Masked, Selection, common, filled, normal, refuse, tensors_in, wrap

__all__ = ["pointwise"]

FINITE = (  # of finite numbers, with finite slopes
    "add", "sub", "subtract", "rsub", "mul", "multiply", "neg", "negative", "positive", "abs", "absolute", "square",
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "softshrink",
    "hardshrink", "hardtanh", "hardswish", "hardsigmoid", "tanhshrink", "threshold", "logsigmoid", "sigmoid", "expit",
    "tanh", "sin", "cos", "atan", "arctan", "asinh", "arcsinh", "erf", "erfc", "sign", "sgn", "signbit", "floor",
    "ceil", "round", "trunc", "frac", "heaviside", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum",
    "fmax", "fmin", "where", "lerp", "addcmul", "nan_to_num", "masked_fill", "logaddexp", "isnan", "isinf", "isfinite",
    "isclose", "eq", "ne", "lt", "le", "gt", "ge", "greater", "less", "greater_equal", "less_equal", "not_equal",
    "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_not", "detach", "clone", "contiguous", "to", "type", "float", "double", "half", "bfloat16", "long", "int",
    "short", "bool", "cpu", "cuda", "type_as", "zeros_like", "ones_like", "full_like", "real", "imag", "conj",
    "view_as_real", "requires_grad_", "nan_to_num", "__and__", "__or__", "__xor__", "__invert__", "__rsub__", "__rmul__",
    "__radd__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "bucketize", "dropout", "alpha_dropout", "feature_dropout",
)  # fmt: skip
SAFE: dict[str, float] = {  # by name: a number at which a function and its slope are finite
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow", "float_power", "lgamma", "digamma",
                     "xlogy", "atan2", "arctan2", "hypot", "fmod", "remainder", "addcdiv", "div", "divide",
                     "true_divide", "floor_divide", "__rdiv__", "__rtruediv__", "__rpow__", "__rfloordiv__", "__pow__",
                     "__floordiv__", "__rmod__"), 1.0),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh", "tan", "acos", "arccos", "asin", "arcsin", "atanh",
                     "arctanh", "log1p", "erfinv", "sinc"), 0.0),
    "acosh": 2.0, "arccosh": 2.0, "logit": 0.5,
}  # fmt: skip
DIVIDE = ("div", "divide", "true_divide")  # only what they divide by has to be safe
DROPS = ("dropout", "alpha_dropout", "feature_dropout")
ALONG = {  # functions of one dim, and of what that is where nothing is said: position, default
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "cumsum": (1, None), "cumprod": (1, None),
    "logcumsumexp": (1, None), "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "flip": (1, None),
    "roll": (2, None), "normalize": (2, 1), "glu": (1, -1), "cummax": (1, None), "cummin": (1, None), "diff": (2, -1),
}  # fmt: skip
OVER_ROWS = {"cumsum": 0.0, "cumprod": 1.0, "logcumsumexp": -math.inf, "softmax": -math.inf, "log_softmax": -math.inf}
BATCHED = {  # functions of a batch in dim 0, and how many dims say that there is one
    "conv1d": 3, "conv2d": 4, "conv3d": 5, "max_pool1d": 3, "max_pool2d": 4, "avg_pool1d": 3, "avg_pool2d": 4,
    "adaptive_avg_pool1d": 3, "adaptive_avg_pool2d": 4, "adaptive_max_pool1d": 3, "adaptive_max_pool2d": 4,
    "pixel_shuffle": 4, "interpolate": None, "group_norm": None,
}  # fmt: skip
MOVES = ("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint")


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of elements, whose operands broadcast."""
    name = called(func)
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
    chosen, behind = common(rows), {r._at - r._whole.dim() for r in rows}
    (at, *others) = behind
    if others:
        refuse(rows[0], f"{name} pairs other dims with", "rows can be paired with rows alone", instead="unsqueeze(1)")
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and not isinstance(leaf, Masked) and leaf.dim() >= -at and leaf.shape[at] != 1:
            mask = chosen.told.mask
            refuse(
                rows[0], f"{name} pairs a tensor of shape {list(leaf.shape)} with", "it has a row for each, also for "
                "those that the mask leaves out", instead=f"the same rows of it: y[{mask}], with {mask} as it is there",
            )  # fmt: skip
    safe = SAFE.get(name)
    divides = name in DIVIDE

    def operand(leaf: Any, number: int) -> Any:
        if not isinstance(leaf, Masked):
            return leaf
        return leaf._whole if safe is None or (divides and number == 0) else filled(leaf, safe)

    plain = [pytree.tree_map(lambda leaf, i=i: operand(leaf, i), a) for i, a in enumerate(args)]
    named_plain = {k: pytree.tree_map(lambda leaf: operand(leaf, 1), v) for k, v in kwargs.items()}
    return pytree.tree_map_only(
        Tensor, lambda out: wrap(out, out.dim() + at, chosen), func(*plain, **named_plain)
    )


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.exp_()``: as out of place, and into the memory of x."""
    first = args[0]
    if not isinstance(first, Masked):
        refuse(tensors_in((args, kwargs))[0], f"{called(func)} changes a whole tensor by", "they are fewer than its rows")
    plain = getattr(Tensor, called(func).removesuffix("_"))
    before = wrap(first._whole.clone(), first._at, first._chosen)  # which a gradient may need
    made = RULES[plain](plain, (before, *args[1:]), kwargs)
    if made._whole.shape != first._whole.shape or not torch.can_cast(made.dtype, first.dtype):
        refuse(first, f"{called(func)} changes", f"it would make {made.dtype} of {first.dtype}, or another shape")
    first._whole.copy_(made._whole)
    return first


def fill_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.zero_()``, ``x.fill_(1)``."""
    func(args[0]._whole, *args[1:], **kwargs)
    return args[0]


for _name in (*FINITE, *SAFE):
    for _function in named(_name):
        RULES[_function] = pointwise
    _changes = getattr(Tensor, f"{_name}_", None)
    if _changes is not None and hasattr(Tensor, _name) and not _name.startswith("_") and _name not in DROPS:
        RULES[_changes] = in_place
RULES[Tensor.requires_grad_] = pointwise
RULES[Tensor.zero_] = RULES[Tensor.fill_] = fill_in_place


# along other dims


@rule(*ALONG)
def along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function along one dim, or some, that keeps them all."""
    name = called(func)
    v, at = _alone(func, args, kwargs)
    where, default = ALONG[name]
    key = "dims" if name in ("flip", "roll") else "dim"
    given = kwargs.get(key, args[where] if len(args) > where else default)
    if name == "flip" and isinstance(given, int):
        given = args[1:]
    if given is None:
        refuse(v, f"{name} without a dim is taken of", "which dim it is depends on how many there are", instead="dim=-1")
    dims = [normal(d, v._whole.dim()) for d in ([given] if isinstance(given, int) else given)]
    if at not in dims:
        rest = args[1:]
        return pytree.tree_map_only(Tensor, lambda out: wrap(out, at, v._chosen), func(v._whole, *rest, **kwargs))
    if name not in OVER_ROWS:
        most = {"topk": "float('-inf')", "sort": "float('inf')", "argsort": "float('inf')"}
        refuse(v, f"{name} goes along", "their order and their number depend on values", most.get(name, "0"))
    out = func(filled(v, OVER_ROWS[name]), *args[1:], **kwargs)
    return _of_rows(out, at, v._chosen)


def _alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Masked, int]:
    """The first argument, which alone may be selected."""
    rows = tensors_in((args, kwargs))
    if not args or args[0] is not rows[0] or len(rows) > 1:
        refuse(rows[0], f"{called(func)} takes, beside others,", "only its first argument may be selected rows")
    return rows[0], rows[0]._at


@rule("layer_norm", "rms_norm")
def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A norm over the last dims."""
    v, at = _alone(func, args, kwargs)
    shape = kwargs["normalized_shape"] if "normalized_shape" in kwargs else args[1]
    if at >= v._whole.dim() - len(shape):
        refuse(v, f"{called(func)} normalises over", "their number depends on values", "0")
    return wrap(func(v._whole, *args[1:], **kwargs), at, v._chosen)


@rule("linear")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear map of the last dim."""
    v, at = _alone(func, args, kwargs)
    if at == v._whole.dim() - 1:
        refuse(v, "linear sums over", "its weight has a column for each", "0")
    return wrap(func(v._whole, *args[1:], **kwargs), at, v._chosen)


@rule(*BATCHED)
def batched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of a batch, that does the same to each."""
    v, at = _alone(func, args, kwargs)
    dims = BATCHED[called(func)]
    if at or (dims is not None and v._whole.dim() != dims):
        refuse(v, f"{called(func)} mixes", "they are not its batch")
    return pytree.tree_map_only(Tensor, lambda out: wrap(out, 0, v._chosen), func(v._whole, *args[1:], **kwargs))


@rule("scaled_dot_product_attention")
def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention within each row."""
    given = bound(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, kwargs)
    rows = tensors_in(given)
    three = [given[k] for k in ("query", "key", "value")]
    if any(not isinstance(v, Masked) or v._at or v._whole.dim() < 3 for v in three) or given.get("dropout_p"):
        refuse(rows[0], "attention looks among", "each of them has to look within itself, without dropout", "0")
    extra = given.get("attn_mask")
    if extra is not None and not isinstance(extra, Masked) and extra.dim() == three[0]._whole.dim() and len(extra) > 1:
        refuse(rows[0], "attention's mask has a row for each of", "also for those that were left out")
    chosen = common(rows)
    return wrap(func(**{k: v._whole if isinstance(v, Masked) else v for k, v in given.items()}), 0, chosen)


@rule("batch_norm")
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With running statistics each row by itself."""
    v, at = _alone(func, args, kwargs)
    given = bound(("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"), args, kwargs)
    if given.get("training") or at == 1:
        refuse(v, "batch norm takes the mean and the variance of", "its statistics would count all rows",
               instead="the norm over the whole tensor, before it is selected, or LayerNorm")  # fmt: skip
    return wrap(func(v._whole, *args[1:], **kwargs), at, v._chosen)


@rule("embedding")
def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a table."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = bound(names, args, kwargs)
    v = given["input"]
    if not isinstance(v, Masked) or len(tensors_in(given)) > 1 or given.get("max_norm") or given.get("scale_grad_by_freq"):
        refuse(tensors_in(given)[0], "embedding is called with", "only plain ones are known: no max_norm, no counts")
    given["input"] = filled(v, 0)
    return wrap(func(**given), v._at, v._chosen)


@rule("one_hot")
def one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With the number of classes."""
    given = bound(("tensor", "num_classes"), args, {("tensor" if k == "input" else k): a for k, a in kwargs.items()})
    v = given["tensor"]
    if given.get("num_classes", -1) < 0:
        refuse(v, "one_hot looks at the largest of", "that depends on values", instead="F.one_hot(y, num_classes)")
    return wrap(func(filled(v, 0), given["num_classes"]), v._at, v._chosen)


@rule("gather", "take_along_dim")
def gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of each row what its indices say."""
    first = ("input", "dim", "index") if called(func) == "gather" else ("input", "index", "dim")
    given = bound(first, args, {("index" if k == "indices" else k): a for k, a in kwargs.items()})
    v, index = given["input"], given["index"]
    rows = tensors_in(given)
    if not (isinstance(v, Masked) and isinstance(index, Masked)) or v._at != index._at:
        refuse(rows[0], f"{called(func)} takes indices for all rows and", "both have to be selected by the same mask")
    chosen = common(rows)
    if given.get("dim") is None or normal(given["dim"], v._whole.dim()) == v._at:
        refuse(v, f"{called(func)} goes along", "which is where depends on values")
    found = [v._whole, filled(index, 0), given["dim"]]
    return wrap(func(*(found if called(func) != "gather" else [found[0], found[2], found[1]])), v._at, chosen)


@rule("index_select")
def index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a table the rows that are selected, or some columns of selected rows."""
    given = bound(("input", "dim", "index"), args, kwargs)
    v, dim, index = given["input"], given["dim"], given["index"]
    if isinstance(v, Masked):
        if normal(dim, v._whole.dim()) == v._at or isinstance(index, Masked):
            refuse(v, "index_select takes some of", "which is where depends on values")
        return wrap(func(v._whole, dim, index), v._at, v._chosen)
    dim = normal(dim, v.dim())
    return v[(*[slice(None)] * dim, index)]


@rule("index_add", "index_add_", "scatter_add", "scatter_add_")
def sums_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows that are added to those of a whole tensor: the ones that do not count add zeros to its first."""
    given = bound(("input", "dim", "index", "source"), args, {("source" if k == "src" else k): a for k, a in kwargs.items()})
    v, dim, index, source = (given[k] for k in ("input", "dim", "index", "source"))
    rows = tensors_in(given)
    both = isinstance(index, Masked) and isinstance(source, Masked)
    if isinstance(v, Masked) or not both or given.get("alpha", 1) != 1:
        refuse(rows[0], f"{called(func)} takes, beside others,", "indices and rows have to be selected alike")
    common(rows)
    d = normal(dim, v.dim())
    if index._at != (0 if index._whole.dim() == 1 else d) or source._at != d:
        refuse(rows[0], f"{called(func)} adds along another dim than that of", "rows are added to rows")
    return func(v, dim, filled(index, 0), filled(source, 0))


@rule("scatter", "scatter_")
def scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Into columns of each row."""
    rows = tensors_in((args, kwargs))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    aligned = all(r._at == rows[0]._at and r._whole.dim() == rows[0]._whole.dim() for r in rows)
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if len(tensors) != len(rows) or not aligned or dim is None or normal(dim, rows[0]._whole.dim()) == rows[0]._at:
        refuse(rows[0], "scatter writes, beside others,", "all have to be selected by the same mask")
    chosen, index = common(rows), kwargs.get("index", args[2] if len(args) > 2 else None)
    plain, named_plain = pytree.tree_map(
        lambda a: a if not isinstance(a, Masked) else filled(a, 0) if a is index else a._whole, (args, kwargs)
    )
    out = func(*plain, **named_plain)
    return args[0] if called(func).endswith("_") else wrap(out, rows[0]._at, chosen)


# products


@rule(
    "matmul", "mm", "bmm", "mv", "dot", "__matmul__", "__rmatmul__"
)
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Products of matrices: rows by a whole matrix, or sums over rows."""
    first = ("input", "mat2") if called(func) in ("mm", "bmm") else ("input", "other")
    given = bound(first, args, {("other" if k in ("vec", "tensor") and first[1] == "other" else k): a for k, a in kwargs.items()})
    a, b = given[first[0]], given[first[1]]
    if called(func) == "__rmatmul__":
        a, b = b, a
    rows = tensors_in((a, b))
    chosen = common(rows)

    def role(x: Any, second: bool) -> str:
        if not isinstance(x, Masked):
            return ""
        dims = x._whole.dim()
        inner = dims - 2 if second and dims > 1 else dims - 1
        outer = dims - 1 if second else dims - 2
        return "inner" if x._at == inner else "outer" if x._at == outer else "batch"

    roles = role(a, False), role(b, True)
    plain = [x._whole if isinstance(x, Masked) else x for x in (a, b)]
    if roles == ("inner", "inner"):
        return torch.matmul(filled(a, 0), filled(b, 0))
    out_dims = max(plain[0].dim(), plain[1].dim()) - (plain[0].dim() == 1) - (plain[1].dim() == 1) * (plain[0].dim() > 1)
    if "inner" in roles or roles == ("outer", "outer"):
        refuse(
            rows[0], "a product of matrices pairs", "each meets each, or a whole tensor: there is no row of one for one "
            "of the other", "0",
        )  # fmt: skip
    one, other, x = (a, b, plain[1]) if isinstance(a, Masked) else (b, a, plain[0])
    if "batch" in roles:
        back = one._at - one._whole.dim()
        if isinstance(other, Masked):
            if other._at - other._whole.dim() != back:
                refuse(one, "a product of matrices pairs other dims with", "rows can be paired with rows alone")
        elif x.dim() >= -back and x.shape[back] != 1:
            refuse(one, f"a product pairs a tensor of shape {list(x.shape)} with", "it has one for each row, also for others")
        vector = (plain[0].dim() == 1) or (plain[1].dim() == 1)
        out = torch.matmul(*plain)
        return wrap(out, out.dim() + back + vector, chosen)
    out = torch.matmul(*plain)
    assert out_dims >= 0
    vector = plain[1].dim() == 1 if roles[0] else plain[0].dim() == 1
    at = out.dim() - 1 if roles[1] or vector else out.dim() - 2
    return wrap(out, at, chosen)


@rule("einsum")
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums of products, written in letters: over rows, or row by row."""
    equation, *rest = args
    operands = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    rows = tensors_in(operands)
    chosen = common(rows)
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        refuse(rows[0], "einsum sums over", "only equations with an arrow and without dots are known")
    ins, out = equation.replace(" ", "").split("->")
    terms = ins.split(",")
    letters = {term[o._at] for term, o in zip(terms, operands, strict=True) if isinstance(o, Masked)}
    (letter, *others) = letters
    plain_has = any(letter in t for t, o in zip(terms, operands, strict=True) if not isinstance(o, Masked))
    if others or plain_has or any(t.count(letter) > 1 for t in terms):
        refuse(rows[0], "einsum pairs", "rows can be paired with rows of the same mask alone")
    found = func(equation, *(filled(o, 0) if isinstance(o, Masked) else o for o in operands))
    return wrap(found, out.index(letter), chosen) if letter in out else found


def repeated(chosen: Selection, times: int) -> Selection:
    """Each row as so many rows."""
    if times == 1:
        return chosen
    mask = chosen.mask[:, None].expand(-1, times).reshape(-1)
    return Selection(mask, ("each", chosen.key, times), chosen.told, (*chosen.shape, times))


def _ints(sizes: Sequence[Any]) -> bool:
    return all(isinstance(s, int) for s in sizes)


@rule("view", "reshape", "flatten", "ravel", "unflatten", "view_as", "reshape_as")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Other sizes of each row; or rows taken apart."""
    name = called(func)
    v = args[0] if args else kwargs["input"]
    shape, at, dims = v._whole.shape, v._at, v._whole.dim()
    if name in ("view_as", "reshape_as"):
        like = args[1]
        sizes = [-1 if isinstance(like, Masked) and d == like._at else n for d, n in enumerate(_shape(like))]
    elif name == "unflatten":
        given = bound(("input", "dim", "sizes"), args, kwargs)
        d = normal(given["dim"], dims)
        if d == at:
            refuse(v, "unflatten groups", "which are side by side depends on values")
        return wrap(v._whole.unflatten(d, given["sizes"]), at + (len(given["sizes"]) - 1 if d < at else 0), v._chosen)
    elif name in ("flatten", "ravel"):
        given = bound(("input", "start_dim", "end_dim"), args, kwargs)
        start, end = (normal(given.get(k, other), dims) for k, other in (("start_dim", 0), ("end_dim", -1)))
        if not start <= at <= end:
            return wrap(v._whole.flatten(start, end), at if at < start else at - (end - start), v._chosen)
        if at != start:
            refuse(v, "flatten mixes", "they are not its first dim")
        if end == start:
            return v
        if v._position == -1 and shape[1] == 1:
            return position(v, 0)
        times = math.prod(shape[start + 1 : end + 1])
        return wrap(v._whole.flatten(start, end), start, repeated(v._chosen, times))
    else:
        given_sizes = args[1:] or tuple(kwargs.values())
        if len(given_sizes) == 1 and isinstance(given_sizes[0], torch.dtype):
            refuse(v, "view as another dtype looks at", "it is not known here")
        sizes = list(given_sizes[0] if isinstance(given_sizes[0], list | tuple) else given_sizes)
    sizes = [-1 if s is v._chosen._count else s for s in sizes]
    if not _ints(sizes) or sizes.count(-1) != 1:
        if _ints(sizes) and -1 not in sizes and v._raw is not None:
            return v._raw().view(sizes)  # as many as are said, whatever the mask: checked where it runs
        refuse(v, f"{name} has other sizes than those of", "the number of rows is no number of the capture; write -1 there")
    j = sizes.index(-1)
    before, after = math.prod(sizes[:j]), math.prod(sizes[j + 1 :])
    rows, inside = math.prod(shape[:at]), math.prod(shape[at + 1 :])
    if before == rows and after == inside:
        if v._position == -1 and dims == 2 and inside == 1 and len(sizes) == 1:
            return position(v, 0)
        return wrap(v._whole.reshape([*sizes[:j], shape[at], *sizes[j + 1 :]]), j, v._chosen)
    if before == rows and after and inside % after == 0:
        times = inside // after
        whole = v._whole.reshape([*sizes[:j], shape[at] * times, *sizes[j + 1 :]])
        return wrap(whole, j, repeated(v._chosen, times))
    if before and rows == 1 and before != 1 and inside % (before * after) == 0:
        refuse(v, f"{name} cuts", "which are in which part depends on values")
    refuse(v, f"{name} groups", "which are side by side depends on values")


def _shape(x: Tensor) -> Sequence[int]:
    return x._whole.shape if isinstance(x, Masked) else x.shape


@rule("unsqueeze")
def unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One more dim."""
    given = bound(("input", "dim"), args, kwargs)
    v = given["input"]
    d = normal(given["dim"], v._whole.dim() + 1)
    return wrap(v._whole.unsqueeze(d), v._at + (d <= v._at), v._chosen)


@rule("squeeze")
def squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without a dim of one element that is said."""
    given = bound(("input", "dim"), args, kwargs)
    v, dim = given["input"], given.get("dim")
    if dim is None:
        refuse(v, "squeeze() without a dim looks at the number of", "one row alone would have no dim",
               instead="the dim that is meant: squeeze(-1)")  # fmt: skip
    dims = sorted(normal(d, v._whole.dim()) for d in ([dim] if isinstance(dim, int) else dim))
    if v._at in dims:
        refuse(v, "squeeze looks at the number of", "one row alone would have no dim")
    if v._position == -1 and dims == [1] and v._whole.shape[1] == 1:
        return position(v, 0)
    gone = [d for d in dims if v._whole.shape[d] == 1]
    return wrap(v._whole.squeeze(gone), v._at - sum(d < v._at for d in gone), v._chosen)


@rule(*MOVES)
def moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims in another order."""
    v, at = _alone(func, args, kwargs)
    return wrap(func(v._whole, *args[1:], **kwargs), _where_to(v, lambda x: func(x, *args[1:], **kwargs)), v._chosen)


def _where_to(v: Masked, move: Any) -> int:
    """Where the rows' dim goes."""
    marks = torch.empty_strided([2 + d for d in range(v._whole.dim())], [0] * v._whole.dim(), device="meta")
    return [*move(marks).shape].index(2 + v._at)


for _name in ("T", "mT", "H", "mH"):
    RULES[getattr(Tensor, _name).__get__] = moved


@rule("expand", "expand_as")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """More of dims of one element."""
    v = args[0]
    if called(func) == "expand_as":
        like = args[1]
        if not isinstance(v, Masked) or not isinstance(like, Masked) or v._at - v._whole.dim() != like._at - like._whole.dim():
            refuse(tensors_in(args)[0], "expand_as repeats something for", "both have to be selected by the same mask")
        return wrap(v._whole.expand_as(like._whole), like._at, common([v, like]))
    sizes = list(args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:])
    back = v._at - v._whole.dim()
    if len(sizes) < v._whole.dim() or not (sizes[back] is v._chosen._count or sizes[back] == -1):
        refuse(v, "expand says the number of", "it is no number of the capture; write -1 there")
    sizes[back] = -1
    return wrap(v._whole.expand(sizes), len(sizes) + back, v._chosen)


@rule("select", "narrow")
def narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A part of another dim."""
    v, at = _alone(func, args, kwargs)
    d = normal(kwargs.get("dim", args[1] if len(args) > 1 else 0), v._whole.dim())
    if d == at:
        refuse(v, f"{called(func)} takes some of", "which ones depends on values")
    return wrap(func(v._whole, *args[1:], **kwargs), at - (called(func) == "select" and d < at), v._chosen)


@rule("chunk", "split", "unbind", "tensor_split")
def parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Parts of another dim."""
    v, at = _alone(func, args, kwargs)
    where = 1 if called(func) == "unbind" else 2
    d = normal(kwargs.get("dim", args[where] if len(args) > where else 0), v._whole.dim())
    if d == at:
        refuse(v, f"{called(func)} cuts", "which are in which part depends on values")
    if v._position == -1 and called(func) == "unbind":
        return tuple(position(v, i) for i in range(v._whole.shape[1]))
    removed = called(func) == "unbind" and d < at
    return type(found := func(v._whole, *args[1:], **kwargs))(wrap(x, at - removed, v._chosen) for x in found)


@rule("cat", "concat", "concatenate", "hstack", "vstack", "stack")
def cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Selections behind each other, or side by side."""
    name = called(func)
    given = bound(("tensors", "dim"), args, kwargs)
    tensors, rows = list(given["tensors"]), tensors_in(given["tensors"])
    dims = rows[0]._whole.dim()
    dim = {"hstack": 0 if dims == 1 else 1, "vstack": 0}.get(name, given.get("dim", 0))
    if name == "vstack" and dims == 1:
        refuse(rows[0], "vstack needs the number of", "it depends on values")
    d = normal(dim, dims + (name == "stack"))
    if name == "stack" or d != rows[0]._at:
        if len(rows) != len(tensors) or any(r._at != rows[0]._at for r in rows):
            refuse(rows[0], f"{name} puts others beside", "all have to be selected by the same mask")
        chosen = common(rows)
        whole = torch.stack if name == "stack" else torch.cat
        return wrap(whole([r._whole for r in rows], d), rows[0]._at + (name == "stack" and d <= rows[0]._at), chosen)
    if any(r._at != d for r in rows):
        refuse(rows[0], f"{name} puts others behind", "rows can be behind rows alone")
    masks, keys = [], []
    for t in tensors:
        if isinstance(t, Masked):
            masks.append(t._chosen.mask)
            keys.append(t._chosen.key)
        else:
            masks.append(torch.ones(t.shape[d], dtype=torch.bool, device=t.device))
            keys.append(t.shape[d])
    mask = torch.cat(masks)
    chosen = Selection(mask, ("cat", *keys), rows[0]._chosen.told, mask.shape)
    return wrap(torch.cat([t._whole if isinstance(t, Masked) else t for t in tensors], d), d, chosen)
