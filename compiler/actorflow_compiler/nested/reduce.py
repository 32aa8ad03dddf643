"""Reductions of nested tensors, and their softmax along a dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.masked.rules import bound, op_name
from actorflow_compiler.nested.tensor import NestedRows, dim_of_rows, nested_in, refuse, rule

__all__ = ["along"]


@rule("sum", "mean", "amax", "amin", "any", "all")
def reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce over all elements, over dims other than the ragged one, or over each sequence."""
    given = bound(("input", "dim", "keepdim"), args, kwargs)
    x, dim, keep = given.pop("input"), given.pop("dim", None), given.pop("keepdim", False)
    if dim is None or dim == () or dim == []:
        return func(x._rows, **given)
    name = op_name(func)
    given_dims = [dim] if isinstance(dim, int) else [*dim]
    every = {d % (x._rows.dim() + 1) for d in given_dims}
    if every >= {0, x._ragged_dim + 1}:
        dims = sorted(d - 1 for d in every if d)
        out = func(x._rows, dims, keep, **given)
        return out.unsqueeze(0) if keep else out
    dims = [dim_of_rows(x, d, name) for d in given_dims]
    if x._ragged_dim in dims:
        return torch.stack([func(rows, dims, keep, **given) for rows in x.each])
    out = func(x._rows, dims if len(dims) > 1 else dims[0], keep, **given)
    return x.like(out, x._ragged_dim if keep else x._ragged_dim - sum(d < x._ragged_dim for d in dims))


@rule("max", "min")
def extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or smallest of all elements; refused along a dim."""
    if len(args) > 1 or kwargs or not isinstance(args[0], NestedRows):
        name = op_name(func)
        refuse(nested_in((args, kwargs))[0], f"{name} along a dim", instead=f"expected: nt.a{name}(dim)")
    return func(args[0]._rows)


@rule("softmax", "log_softmax")
def along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Softmax along the ragged dim within each sequence, or along another dim within each row."""
    names = ("input", "dim", "_stacklevel", "dtype") if getattr(func, "__module__", "") == "torch.nn.functional" else (
        "input", "dim", "dtype")  # fmt: skip
    given = bound(names, args, kwargs)
    x, dim = given.pop("input"), given.pop("dim")
    given.pop("_stacklevel", None)
    d = dim_of_rows(x, dim, op_name(func))
    function: Callable[..., Tensor] = getattr(torch, op_name(func))
    if d != x._ragged_dim:
        return x.like(function(x._rows, d, **given))
    if torch.is_grad_enabled() and x._rows.requires_grad:
        refuse(x, f"{op_name(func)} along the ragged dim", "PyTorch's gradient of it is wrong",
               "expected: torch.cat([t.softmax(0) for t in nt.unbind()])")  # fmt: skip
    return x.like(torch.cat([function(rows, d, **given) for rows in x.each], x._ragged_dim))
