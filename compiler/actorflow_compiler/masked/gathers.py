"""Functions that take or put elements by indices (gather, scatter, index_add …), for selected rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.masked.rules import bound, op_name, rule
from actorflow_compiler.masked.selecting import BROADCAST, masked_select
from actorflow_compiler.masked.tensor import (
    MaskedRows,
    common_selection,
    filled,
    normalized_dim,
    refuse,
    same_rows,
    tensors_in,
    wrap,
)

__all__: list[str] = []


@rule("gather", "take_along_dim")
def gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take elements of each row by indices of that row."""
    first = ("input", "dim", "index") if op_name(func) == "gather" else ("input", "index", "dim")
    given = bound(first, args, {("index" if k == "indices" else k): a for k, a in kwargs.items()})
    v, index = given["input"], given["index"]
    rows = tensors_in(given)
    if not (isinstance(v, MaskedRows) and isinstance(index, MaskedRows)) or v._row_dim != index._row_dim:
        refuse(rows[0], f"{op_name(func)} takes indices for all rows and", "both have to be selected by the same mask")
    selection = common_selection(rows)
    if given.get("dim") is None or normalized_dim(given["dim"], v._whole.dim()) == v._row_dim:
        refuse(v, f"{op_name(func)} goes along", "which is where depends on values")
    found = [v._whole, filled(index, 0), given["dim"]]
    return wrap(func(*(found if op_name(func) != "gather" else [found[0], found[2], found[1]])), v._row_dim, selection)


@rule("index_select")
def index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a table by selected indices, or some columns of selected rows."""
    given = bound(("input", "dim", "index"), args, kwargs)
    v, dim, index = given["input"], given["dim"], given["index"]
    if isinstance(v, MaskedRows):
        if normalized_dim(dim, v._whole.dim()) == v._row_dim or isinstance(index, MaskedRows):
            refuse(v, "index_select takes some of", "which is where depends on values")
        return wrap(func(v._whole, dim, index), v._row_dim, v._selection)
    dim = normalized_dim(dim, v.dim())
    return v[(*[slice(None)] * dim, index)]


@rule("index_add", "index_add_", "scatter_add", "scatter_add_")
def sums_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add selected rows to rows of a whole tensor; rows that are not selected add zeros to its first row."""
    given = bound(
        ("input", "dim", "index", "source"), args, {("source" if k == "src" else k): a for k, a in kwargs.items()}
    )
    v, dim, index, source = (given[k] for k in ("input", "dim", "index", "source"))
    rows = tensors_in(given)
    both = isinstance(index, MaskedRows) and isinstance(source, MaskedRows)
    if isinstance(v, MaskedRows) or not both or given.get("alpha", 1) != 1:
        refuse(rows[0], f"{op_name(func)} takes, beside others,", "indices and rows have to be selected alike")
    common_selection(rows)
    d = normalized_dim(dim, v.dim())
    if index._row_dim != (0 if index._whole.dim() == 1 else d) or source._row_dim != d:
        refuse(rows[0], f"{op_name(func)} adds along another dim than that of", "rows are added to rows")
    return func(v, dim, filled(index, 0), filled(source, 0))


@rule("masked_scatter")
def masked_scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Scatter selected rows into a whole tensor by the mask that has selected them."""
    given = bound(("input", "mask", "source"), args, kwargs)
    x, mask, source = given["input"], given["mask"], given["source"]
    if isinstance(x, MaskedRows) or isinstance(mask, MaskedRows):
        refuse(tensors_in(given)[0], "masked_scatter writes among", "which is where depends on values")
    x, mask = BROADCAST(x, mask)
    flat, found = source.reshape(-1), masked_select(x, mask)
    if not same_rows(flat._selection, found._selection):
        refuse(source, "masked_scatter writes", "they are not sure to be as many as its mask has",
               instead="x.masked_scatter(mask, y[mask]), with one mask")  # fmt: skip
    return torch.where(mask, flat._whole.view(x.shape), x)


@rule("scatter", "scatter_")
def scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Scatter into columns of each row."""
    rows = tensors_in((args, kwargs))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    aligned = all(r._row_dim == rows[0]._row_dim and r._whole.dim() == rows[0]._whole.dim() for r in rows)
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if (
        len(tensors) != len(rows)
        or not aligned
        or dim is None
        or normalized_dim(dim, rows[0]._whole.dim()) == rows[0]._row_dim
    ):
        refuse(rows[0], "scatter writes, beside others,", "all have to be selected by the same mask")
    selection, index = common_selection(rows), kwargs["index"] if "index" in kwargs else args[2]
    plain, named_plain = pytree.tree_map(
        lambda a: a if not isinstance(a, MaskedRows) else filled(a, 0) if a is index else a._whole, (args, kwargs)
    )
    out = func(*plain, **named_plain)
    return args[0] if op_name(func).endswith("_") else wrap(out, rows[0]._row_dim, selection)
