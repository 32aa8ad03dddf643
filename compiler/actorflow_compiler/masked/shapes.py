"""Functions that change the shape or the order of dims, for selected rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.masked.rules import RULES, bound, op_name, rule
from actorflow_compiler.masked.selecting import index_column
from actorflow_compiler.masked.tensor import (
    MaskedRows,
    Selection,
    common_selection,
    normalized_dim,
    only_first,
    refuse,
    repeated_rows,
    tensors_in,
    wrap,
)

__all__: list[str] = []

MOVES = ("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint")


def _ints(sizes: Sequence[Any]) -> bool:
    return all(isinstance(s, int) for s in sizes)


@rule("unflatten")
def unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split a dim other than the dim of the rows."""
    given = bound(("input", "dim", "sizes"), args, kwargs)
    v, sizes = given["input"], given["sizes"]
    d = normalized_dim(given["dim"], v._whole.dim())
    if d == v._row_dim:
        refuse(v, "unflatten groups", "which are side by side depends on values")
    return wrap(v._whole.unflatten(d, sizes), v._row_dim + (len(sizes) - 1 if d < v._row_dim else 0), v._selection)


@rule("flatten", "ravel")
def flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Merge dims: within each row, or the rows with dims behind them, which splits each row into several."""
    given = bound(("input", "start_dim", "end_dim"), args, kwargs)
    v = given["input"]
    shape, at = v._whole.shape, v._row_dim
    start, end = (normalized_dim(given.get(k, other), len(shape)) for k, other in (("start_dim", 0), ("end_dim", -1)))
    if not start <= at <= end:
        return wrap(v._whole.flatten(start, end), at if at < start else at - (end - start), v._selection)
    if at != start:
        refuse(v, "flatten mixes", "they are not its first dim")
    if end == start:
        return v
    if v._index_dim == -1 and shape[1] == 1:
        return index_column(v, 0)
    times = math.prod(shape[start + 1 : end + 1])
    return wrap(v._whole.flatten(start, end), start, repeated_rows(v._selection, times))


@rule("view", "reshape", "view_as", "reshape_as")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape each row, or split each row into several."""
    name = op_name(func)
    v = args[0] if args else kwargs["input"]
    sizes = _with_rows_open(v, _sizes_of_view(name, v, args, kwargs))
    if not _ints(sizes) or sizes.count(-1) != 1:
        plain = v._dynamic() if _ints(sizes) and -1 not in sizes else None
        if plain is not None:
            return plain.view(sizes)  # a fixed number of rows: the view checks it when it runs
        refuse(
            v, f"{name} has other sizes than those of", "the number of rows is no number of the capture; write -1 there"
        )
    shape, at, j = v._whole.shape, v._row_dim, sizes.index(-1)
    before, after = math.prod(sizes[:j]), math.prod(sizes[j + 1 :])
    rows, inside = math.prod(shape[:at]), math.prod(shape[at + 1 :])
    if before == rows and after == inside:
        if v._index_dim == -1 and len(shape) == 2 and inside == 1 and len(sizes) == 1:
            return index_column(v, 0)
        return wrap(v._whole.reshape([*sizes[:j], shape[at], *sizes[j + 1 :]]), j, v._selection)
    if before == rows and after and inside % after == 0:
        times = inside // after
        whole = v._whole.reshape([*sizes[:j], shape[at] * times, *sizes[j + 1 :]])
        return wrap(whole, j, repeated_rows(v._selection, times))
    inner, times = v._selection.each or (v._selection, 0)
    if times and before == rows == inside == 1 and after and times % after == 0:
        return wrap(v._whole.reshape([-1, *sizes[j + 1 :]]), 0, repeated_rows(inner, times // after))
    if before and rows == 1 and before != 1 and inside % (before * after) == 0:
        refuse(v, f"{name} cuts", "which are in which part depends on values")
    return refuse(v, f"{name} groups", "which are side by side depends on values")


def _sizes_of_view(name: str, v: MaskedRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The sizes that a view asks for, which may be the count of the rows and -1."""
    if name in ("view_as", "reshape_as"):
        like = args[1]
        return [-1 if isinstance(like, MaskedRows) and d == like._row_dim else n for d, n in enumerate(_shape(like))]
    given = args[1:] or tuple(kwargs.values())
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        refuse(v, "view as another dtype looks at", "it is not known here")
    return list(given[0] if isinstance(given[0], list | tuple) else given)


def _with_rows_open(v: MaskedRows, sizes: list[Any]) -> list[Any]:
    """The sizes with -1 in place of the count of the rows, and then the size that -1 stands for in its own place."""
    count, shape = v._selection._count, v._whole.shape
    if not any(s is count for s in sizes):
        return sizes
    each = math.prod(shape) // max(1, shape[v._row_dim])  # the size of a row
    known = math.prod(s for s in sizes if isinstance(s, int) and s > 0)
    rest = each // known if known and each % known == 0 else -1
    sizes = [rest if isinstance(s, int) and s == -1 else s for s in sizes]
    return [-1 if s is count else s for s in sizes]


def _shape(x: Tensor) -> Sequence[int]:
    return x._whole.shape if isinstance(x, MaskedRows) else x.shape


@rule("unsqueeze")
def unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a dim of size 1."""
    given = bound(("input", "dim"), args, kwargs)
    v = given["input"]
    d = normalized_dim(given["dim"], v._whole.dim() + 1)
    return wrap(v._whole.unsqueeze(d), v._row_dim + (d <= v._row_dim), v._selection)


@rule("squeeze")
def squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Remove given dims of size 1."""
    given = bound(("input", "dim"), args, kwargs)
    v, dim = given["input"], given.get("dim")
    if dim is None:
        refuse(v, "squeeze() without a dim looks at the number of", "one row alone would have no dim",
               instead="the dim that is meant: squeeze(-1)")  # fmt: skip
    dims = sorted(normalized_dim(d, v._whole.dim()) for d in ([dim] if isinstance(dim, int) else dim))
    if v._row_dim in dims:
        refuse(v, "squeeze looks at the number of", "one row alone would have no dim")
    if v._index_dim == -1 and dims == [1] and v._whole.shape[1] == 1:
        return index_column(v, 0)
    gone = [d for d in dims if v._whole.shape[d] == 1]
    return wrap(v._whole.squeeze(gone), v._row_dim - sum(d < v._row_dim for d in gone), v._selection)


@rule(*MOVES)
def moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reorder dims."""
    v, _ = only_first(op_name(func), args, kwargs)
    return wrap(func(v._whole, *args[1:], **kwargs), _where_to(v, lambda x: func(x, *args[1:], **kwargs)), v._selection)


def _where_to(v: MaskedRows, move: Any) -> int:
    """The dim of the rows after a reordering; found by reordering a meta tensor of distinct sizes."""
    marks = torch.empty_strided([2 + d for d in range(v._whole.dim())], [0] * v._whole.dim(), device="meta")
    return [*move(marks).shape].index(2 + v._row_dim)


@rule("expand", "expand_as")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand dims of size 1."""
    v = args[0]
    if op_name(func) == "expand_as":
        like = args[1]
        if (
            not isinstance(v, MaskedRows)
            or not isinstance(like, MaskedRows)
            or v._row_dim - v._whole.dim() != like._row_dim - like._whole.dim()
        ):
            refuse(tensors_in(args)[0], "expand_as repeats something for", "both have to be selected by the same mask")
        return wrap(v._whole.expand_as(like._whole), like._row_dim, common_selection([v, like]))
    sizes = list(args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:])
    back = v._row_dim - v._whole.dim()
    if len(sizes) < v._whole.dim() or not (sizes[back] is v._selection._count or sizes[back] == -1):
        refuse(v, "expand says the number of", "it is no number of the capture; write -1 there")
    sizes[back] = -1
    return wrap(v._whole.expand(sizes), len(sizes) + back, v._selection)


@rule("repeat")
def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat dims other than the dim of the rows."""
    v, *times = args
    times = list(times[0]) if isinstance(times[0], list | tuple) else times
    at = v._row_dim + len(times) - v._whole.dim()
    if at < 0 or times[at] != 1:
        refuse(v, "repeat puts others behind", "cat does so", instead="torch.cat([x, x])")
    return wrap(v._whole.repeat(times), at, v._selection)


@rule("select", "narrow")
def narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A part of a dim other than the dim of the rows."""
    v, at = only_first(op_name(func), args, kwargs)
    d = normalized_dim(kwargs.get("dim", args[1] if len(args) > 1 else 0), v._whole.dim())
    if d == at:
        refuse(v, f"{op_name(func)} takes some of", "which ones depends on values")
    return wrap(func(v._whole, *args[1:], **kwargs), at - (op_name(func) == "select" and d < at), v._selection)


@rule("chunk", "split", "unbind", "tensor_split")
def parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Parts along a dim other than the dim of the rows."""
    v, at = only_first(op_name(func), args, kwargs)
    where = 1 if op_name(func) == "unbind" else 2
    d = normalized_dim(kwargs.get("dim", args[where] if len(args) > where else 0), v._whole.dim())
    if d == at:
        refuse(v, f"{op_name(func)} cuts", "which are in which part depends on values")
    if v._index_dim == -1 and op_name(func) == "unbind":
        return tuple(index_column(v, i) for i in range(v._whole.shape[1]))
    removed = op_name(func) == "unbind" and d < at
    return type(found := func(v._whole, *args[1:], **kwargs))(wrap(x, at - removed, v._selection) for x in found)


@rule("cat", "concat", "concatenate", "hstack", "vstack", "stack")
def cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate or stack selected rows, along the dim of the rows or another one."""
    name = op_name(func)
    given = bound(("tensors", "dim"), args, kwargs)
    tensors, rows = list(given["tensors"]), tensors_in(given["tensors"])
    dims = rows[0]._whole.dim()
    dim = {"hstack": 0 if dims == 1 else 1, "vstack": 0}.get(name, given.get("dim", 0))
    if name == "vstack" and dims == 1:
        refuse(rows[0], "vstack needs the number of", "it depends on values")
    d = normalized_dim(dim, dims + (name == "stack"))
    if name == "stack" or d != rows[0]._row_dim:
        if len(rows) != len(tensors) or any(r._row_dim != rows[0]._row_dim for r in rows):
            refuse(rows[0], f"{name} puts others beside", "all have to be selected by the same mask")
        selection = common_selection(rows)
        whole = torch.stack if name == "stack" else torch.cat
        return wrap(
            whole([r._whole for r in rows], d),
            rows[0]._row_dim + (name == "stack" and d <= rows[0]._row_dim),
            selection,
        )
    if any(r._row_dim != d for r in rows):
        refuse(rows[0], f"{name} puts others behind", "rows can be behind rows alone")
    masks, keys = [], []
    for t in tensors:
        if isinstance(t, MaskedRows):
            masks.append(t._selection.mask)
            keys.append(t._selection.key)
        else:
            masks.append(torch.ones(t.shape[d], dtype=torch.bool, device=t.device))
            keys.append(t.shape[d])
    mask = torch.cat(masks)
    selection = Selection(mask, ("cat", *keys), rows[0]._selection.origin, mask.shape)
    return wrap(torch.cat([t._whole if isinstance(t, MaskedRows) else t for t in tensors], d), d, selection)


RULES.add((getattr(Tensor, _name).__get__ for _name in ("T", "mT", "H", "mH")), moved)
