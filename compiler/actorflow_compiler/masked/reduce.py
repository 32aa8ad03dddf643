"""Reductions of selected rows: computed over whole tensors, in which the other rows contribute nothing.

Over no rows, a sum is 0, and a mean, a variance and a maximum are NaN; for a maximum, torch would raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.masked.pointwise import pointwise
from actorflow_compiler.masked.rules import bound, op_name, rule
from actorflow_compiler.masked.tensor import MaskedRows, filled, normalized_dim, refuse, tensors_in, wrap
from actorflow_compiler.substitutes.decomposition_table import widened

__all__ = ["mean", "total"]

FILLS = {
    "sum": 0.0,
    "nansum": 0.0,
    "count_nonzero": 0.0,
    "any": False,
    "all": True,
    "prod": 1.0,
    "logsumexp": -math.inf,
}
EXTREMES = {"amax": -math.inf, "amin": math.inf, "max": -math.inf, "min": math.inf}
WITHIN = ("argmax", "argmin", "median", "nanmedian", "mode", "kthvalue", "quantile", "nanquantile", "aminmax")
NAMES = ("input", "dim", "keepdim")
AGAINST = {"max": "float('-inf')", "argmax": "float('-inf')", "min": "float('inf')", "argmin": "float('inf')"}


class ReductionDims:
    """The dims that a call reduces over."""

    def __init__(self, v: MaskedRows, dim: int | Sequence[int] | None) -> None:
        dims = v._whole.dim()
        several = range(dims) if dim is None or dim == () or dim == [] else [dim] if isinstance(dim, int) else dim
        self.dims = sorted(normalized_dim(d, dims) for d in several)
        self.rows = v._row_dim in self.dims

    def at(self, v: MaskedRows, keepdim: bool) -> int:
        """The dim of the rows in the result."""
        return v._row_dim if keepdim else v._row_dim - sum(d < v._row_dim for d in self.dims)

    def count(self, v: MaskedRows) -> Tensor:
        """The number of selected elements that each reduction over rows combines."""
        each = math.prod(v._whole.shape[d] for d in self.dims if d != v._row_dim)
        return v._selection.count if each == 1 else v._selection.count * each


def _first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Arguments by name.  Raises CaptureError if any other argument than the first has selected rows."""
    given = bound(names, args, kwargs)
    rows = tensors_in(given)
    if given.get("input") is not rows[0] or len(rows) > 1:
        refuse(rows[0], f"{op_name(func)} takes, beside others,", "only its first argument may be selected rows")
    return given


def _several(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """``x.sum(0, 1)`` as ``x.sum((0, 1))``."""
    more = args[1:]
    plain = op_name(func) in ("sum", "mean", "amax", "amin") and len(more) > 1
    return (args[0], more) if plain and all(isinstance(d, int) and not isinstance(d, bool) for d in more) else args


def _rowwise(
    func: Any, over: ReductionDims, v: MaskedRows, keepdim: bool, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Reduce within each row."""
    at = over.at(v, keepdim)
    return pytree.tree_map_only(Tensor, lambda out: wrap(out, at, v._selection), func(v._whole, *args, **kwargs))


@rule(*FILLS)
def summed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reductions with a neutral element, which fills rows that are not selected."""
    args = _several(func, args, kwargs)
    given = _first(func, args, kwargs)
    v = given["input"]
    over = ReductionDims(v, given.get("dim"))
    if not over.rows:
        return _rowwise(func, over, v, bool(given.get("keepdim")), args[1:], _rest(kwargs))
    if op_name(func) == "logsumexp" and not v._whole.is_floating_point():
        v = v.to(torch.get_default_dtype())
    return func(filled(v, FILLS[op_name(func)]), *args[1:], **_rest(kwargs))


def _rest(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k != "input"}


@rule(*EXTREMES)
def extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or the smallest element; NaN over no rows."""
    name = op_name(func)
    args = _several(func, args, kwargs)
    if (len(args) > 1 and isinstance(args[1], Tensor)) or isinstance(kwargs.get("other"), Tensor):
        return pointwise(torch.maximum if name == "max" else torch.minimum, (*args, *kwargs.values()), {})
    given = _first(func, args, kwargs)
    v, dim = given["input"], given.get("dim")
    over = ReductionDims(v, dim)
    if not over.rows:
        return _rowwise(func, over, v, bool(given.get("keepdim")), args[1:], _rest(kwargs))
    if dim is not None and name in ("max", "min"):
        refuse(v, f"{name} along a dim says which of", "its number among them depends on values",
               instead=f"the value alone: a{name}(dim)")  # fmt: skip
    if not v._whole.is_floating_point():
        refuse(v, f"{name} is taken, as a whole number, of", "of no rows torch would raise, and there is no number to "
               "say so", instead=f"floating point, which is NaN then: .double().{name}()")  # fmt: skip
    out = func(filled(v, EXTREMES[name]), *args[1:], **_rest(kwargs))
    return torch.where(v._selection.count > 0, out, math.nan)


@rule("mean", "nanmean")
def averaged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean: the sum of the selected elements divided by their count."""
    args = _several(func, args, kwargs)
    given = _first(func, args, kwargs)
    v, dtype = given["input"], given.get("dtype")
    over = ReductionDims(v, given.get("dim"))
    if not over.rows:
        return _rowwise(func, over, v, bool(given.get("keepdim")), args[1:], _rest(kwargs))
    if op_name(func) == "nanmean":
        refuse(
            v,
            "nanmean counts those that are numbers of",
            "that is not known here",
            instead="x[mask & ~x.isnan()].mean()",
        )
    if not (v._whole.is_floating_point() or v._whole.is_complex() or dtype is not None):
        return func(v._whole)  # torch raises, as it takes no mean of whole numbers
    return mean(v, over, bool(given.get("keepdim")), dtype)


def mean(
    v: MaskedRows, over: ReductionDims | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """The mean of all selected elements, or over some dims, among them the dim of the rows."""
    over = over or ReductionDims(v, None)
    whole = filled(v, 0) if dtype is None else filled(v, 0).to(dtype)
    return (widened(whole).sum(over.dims, keepdim) / over.count(v)).to(dtype or v._whole.dtype)


def total(v: MaskedRows) -> Tensor:
    """The sum of all selected elements."""
    return widened(filled(v, 0)).sum().to(v._whole.dtype)


def _variance(v: MaskedRows, over: ReductionDims, correction: float, keepdim: bool) -> Tensor:
    n = over.count(v)
    wide = filled(v, 0)
    wide = widened(wide)
    away = wide - wide.sum(over.dims, True) / n
    away = filled(MaskedRows(away, v._row_dim, v._selection), 0)
    return away.square().sum(over.dims, keepdim) / (n - correction).clamp(min=0)


@rule("var", "std", "var_mean", "std_mean")
def spread(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Variances and standard deviations, in two passes as in torch."""
    name = op_name(func)
    plain = len(args) > 1 and isinstance(args[1], bool)  # x.var(False)
    given = _first(func, args, kwargs, ("input", "unbiased") if plain else ("input", "dim", "unbiased", "keepdim"))
    v, keepdim = given["input"], bool(given.get("keepdim"))
    over = ReductionDims(v, given.get("dim"))
    if not over.rows:
        return _rowwise(func, over, v, keepdim, args[1:], _rest(kwargs))
    if v._whole.is_complex() or not v._whole.is_floating_point():
        refuse(v, f"{name} is taken of", "they are no real numbers in floating point", instead="x.double() before")
    correction = given.get("correction", int(given.get("unbiased", True)))
    found = _variance(v, over, 1 if correction is None else correction, keepdim)
    if name.startswith("std"):
        none = found == 0  # where the root's derivative is infinite
        found = torch.where(none, 0.0, torch.where(none, 1.0, found).sqrt())
    found = found.to(v._whole.dtype)
    return (found, mean(v, over, keepdim)) if name.endswith("mean") else found


@rule("norm", "vector_norm")
def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms of vectors, to which zeros add nothing."""
    given = _first(func, args, kwargs, ("input", "ord", "dim", "keepdim", "dtype"))
    v, dim = given["input"], given.get("dim")
    order = given.get("ord", given.get("p", None))
    linear = func is torch.linalg.norm
    matrix = linear and order is not None and (v._whole.dim() == 2 if dim is None else not isinstance(dim, int))
    over = ReductionDims(v, dim)
    if not over.rows and not (matrix and order == "nuc"):
        return _rowwise(func, over, v, bool(given.get("keepdim")), args[1:], _rest(kwargs))
    usual = order in (None, "fro") or (isinstance(order, int | float) and order >= 1)
    if not usual or (matrix and order != "fro"):
        taken = f"{op_name(func)} of order {order} is taken of"
        refuse(v, taken, "only norms of vectors of order 1 and more are known")
    out = func(filled(v, 0), *args[1:], **_rest(kwargs))
    if order == math.inf:
        return torch.where(v._selection.count > 0, out, math.nan)
    return out


@rule(*WITHIN)
def within(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions that sort elements or return their positions; supported within each row only."""
    name = op_name(func)
    second = ("input", "q", "dim", "keepdim") if "quantile" in name else ("input", "k", "dim", "keepdim")
    given = _first(func, args, kwargs, second if name not in (*WITHIN[:5], "aminmax") else NAMES)
    v, dim = given["input"], given.get("dim", -1 if name in ("mode", "kthvalue") else None)
    over = ReductionDims(v, dim)
    if over.rows or "quantile" in name:
        line = v._selection.origin.rewritten("float('nan')")  # which nanmedian and nanquantile leave out
        instead = line.replace(f".{name}(", f".nan{name}(")
        skips = "quantile" in name or name == "median"
        refuse(
            v, f"{name} sorts, or numbers,", "their order and their number depend on values", AGAINST.get(name, "0"),
            "" if not skips else instead if instead != line else f"nan{name}, and {line}",
        )  # fmt: skip
    return _rowwise(func, over, v, bool(given.get("keepdim")), args[1:], _rest(kwargs))
