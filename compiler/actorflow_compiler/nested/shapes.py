"""Reshape, split and concatenate nested tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actorflow_compiler.masked.rules import bound, op_name
from actorflow_compiler.nested.pointwise import pointwise
from actorflow_compiler.nested.tensor import RULES, NestedRows, RaggedSize, dim_of_rows, nested_in, refuse, rule

__all__ = ["padded", "nested_sizes"]


def nested_sizes(x: NestedRows) -> tuple[Any, ...]:
    """The shape.  The ragged dim is a ``RaggedSize``, unless all sequences of a strided tensor have equal lengths."""
    lengths = set(x._lengths.of)
    ragged: Any = lengths.pop() if len(lengths) == 1 and not x._jagged else RaggedSize(x._lengths)
    return (len(x), *(ragged if d == x._ragged_dim else size for d, size in enumerate(x._rows.shape)))


@rule("size")
def size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The size of one dim, or the shape."""
    given = bound(("input", "dim"), args, kwargs)
    found, dim = nested_sizes(given["input"]), given.get("dim")
    return found if dim is None else found[dim]


@rule("view", "reshape")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape dims other than the ragged one; ``shape`` has -1 or the ragged size for that one."""
    x, *rest = args
    name = op_name(func)
    given: Any = rest or [kwargs.get("shape", kwargs.get("size"))]
    shape = [*(given[0] if isinstance(given[0], Sequence) else given)]
    expected = f"expected: {name}({len(x)}, …), with -1 or nt.size({x._ragged_dim + 1}) where sequences differ"
    if shape and shape[0] in (-1, None):
        refuse(x, f"{name} to {_text(shape)}", "its dim 0 is the batch", expected)
    if not shape or shape[0] != len(x):
        refuse(x, f"{name} to {_text(shape)}", f"the batch has {len(x)} sequences", expected)
    own = nested_sizes(x)[x._ragged_dim + 1]
    there = [d for d, n in enumerate(shape) if isinstance(n, RaggedSize)] or [d for d, n in enumerate(shape) if n == -1]
    if not there and isinstance(own, int):  # all sequences have equal lengths
        there = [x._ragged_dim + 1]
    if len(there) != 1 or not _is_size(shape[there[0]], own):
        refuse(x, f"{name} to {_text(shape)}", "it leaves the ragged dim no place of its own", expected)
    at = there[0] - 1
    before = 1
    for n in shape[1 : at + 1]:
        before *= n
    behind = [n for n in shape[at + 2 :] if n != -1]
    left = x._rows.shape[x._ragged_dim + 1 :].numel()
    fits = left % math.prod(behind or [1]) == 0 if len(behind) < len(shape) - at - 2 else left == math.prod(behind)
    if before != x._rows.shape[: x._ragged_dim].numel() or not fits:
        refuse(x, f"{name} to {_text(shape)}", "it joins the ragged dim with others", expected)
    rows = [*shape[1:]]
    rows[at] = x._rows.shape[x._ragged_dim]
    return x.like(getattr(x._rows, name)(rows), at)


def _is_size(n: Any, own: Any) -> bool:
    return (isinstance(n, int) and n == -1) or n == own


def _text(shape: Sequence[Any]) -> str:
    return f"({', '.join('ragged' if isinstance(n, RaggedSize) else str(n) for n in shape)})"


@rule("view_as", "reshape_as")
def view_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape to the shape of another nested tensor."""
    x, other = args
    if not isinstance(other, NestedRows) or not isinstance(x, NestedRows):
        refuse(nested_in(args)[0], op_name(func))
    return view(getattr(Tensor, op_name(func).removesuffix("_as")), (x, *nested_sizes(other)), {})


@rule("transpose", "swapaxes", "swapdims")
def transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Swap two dims other than the batch."""
    x, one, other = bound(("input", "dim0", "dim1"), args, kwargs).values()
    a, b = (dim_of_rows(x, d, op_name(func)) for d in (one, other))
    return x.like(x._rows.transpose(a, b), {a: b, b: a}.get(x._ragged_dim, x._ragged_dim))


@rule("permute")
def permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Permute dims other than the batch."""
    x, *rest = args
    given_dims = [*(rest[0] if rest and isinstance(rest[0], Sequence) else rest or kwargs["dims"])]
    dims = x._rows.dim() + 1
    if given_dims and given_dims[0] % dims:
        refuse(x, "permute", "the batch has to stay dim 0")
    order = [dim_of_rows(x, d, "permute") for d in given_dims[1:]]
    return x.like(x._rows.permute(order), order.index(x._ragged_dim))


@rule("unflatten")
def unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split a dim other than the ragged one into several."""
    x, dim, into = bound(("input", "dim", "nested_sizes"), args, kwargs).values()
    d = _other_dim(x, dim, "unflatten")
    return x.like(x._rows.unflatten(d, into), x._ragged_dim + (d < x._ragged_dim) * (len(into) - 1))


@rule("flatten")
def flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Join dims, none of them ragged."""
    given = bound(("input", "start_dim", "end_dim"), args, kwargs)
    x = given["input"]
    start, end = (
        dim_of_rows(x, given.get(key, plain), "flatten") for key, plain in (("start_dim", 0), ("end_dim", -1))
    )
    if start <= x._ragged_dim <= end and start != end:
        refuse(x, "flatten over the ragged dim", instead="expected: nt.values().flatten(…)")
    return x.like(x._rows.flatten(start, end), x._ragged_dim - (end < x._ragged_dim) * (end - start))


@rule("unsqueeze")
def unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a dim of size 1."""
    x, dim = bound(("input", "dim"), args, kwargs).values()
    d = dim % (x._rows.dim() + 2) - 1
    if d < 0:
        refuse(x, "unsqueeze(0)", "the batch has to stay dim 0")
    return x.like(x._rows.unsqueeze(d), x._ragged_dim + (d <= x._ragged_dim))


@rule("squeeze")
def squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Remove a dim of size 1."""
    if len(args) + len(kwargs) < 2:
        refuse(args[0], "squeeze without a dim", instead="expected: nt.squeeze(dim)")
    x, dim = bound(("input", "dim"), args, kwargs).values()
    d = _other_dim(x, dim, "squeeze")
    out = x._rows.squeeze(d)
    return x.like(out, x._ragged_dim - (d < x._ragged_dim) * (x._rows.dim() - out.dim()))


@rule("chunk", "split", "narrow")
def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces along a dim other than the ragged one."""
    name = op_name(func)
    if name == "narrow":
        x, dim, start, length = bound(("input", "dim", "start", "length"), args, kwargs).values()
        return x.like(x._rows.narrow(_other_dim(x, dim, name), start, length))
    names = {"chunks": "into", "split_size": "into", "split_size_or_sections": "into", "tensor": "input"}
    given = bound(("input", "into", "dim"), args, {names.get(k, k): v for k, v in kwargs.items()})
    x, into = given["input"], given["into"]
    d = _other_dim(x, given.get("dim", 0), name)
    return tuple(x.like(piece) for piece in getattr(x._rows, name)(into, d))


@rule("select")
def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One sequence, or one index of a dim other than the ragged one."""
    x, dim, index = bound(("input", "dim", "index"), args, kwargs).values()
    if dim % (x._rows.dim() + 1) == 0:
        return x.each[index]
    d = _other_dim(x, dim, "select")
    return x.like(x._rows.select(d, index), x._ragged_dim - (d < x._ragged_dim))


@rule("cat", "concat", "concatenate")
def cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate nested tensors along a dim other than the ragged one."""
    given = bound(("tensors", "dim"), args, kwargs)
    tensors = given["tensors"]
    first = nested_in(tensors)[0]
    if not all(isinstance(t, NestedRows) for t in tensors):
        refuse(first, "cat with plain tensors")
    d = _other_dim(first, given.get("dim", 0), "cat")

    def over(*rows: Tensor) -> Tensor:
        return torch.cat(rows, d)

    return pointwise(over, (*tensors,), {})


@rule("unbind")
def unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sequences, or the slices along a dim other than the ragged one."""
    given = bound(("input", "dim"), args, kwargs)
    x, dim = given["input"], given.get("dim", 0)
    if dim % (x._rows.dim() + 1) == 0:
        return x.each
    d = _other_dim(x, dim, "unbind")
    return tuple(x.like(rows, x._ragged_dim - (d < x._ragged_dim)) for rows in x._rows.unbind(d))


@rule("__getitem__")
def get_item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One sequence, or parts of the dims after the ragged one."""
    x, index = args
    if isinstance(x, NestedRows) and isinstance(index, int):
        return x.each[index]
    if isinstance(x, NestedRows) and isinstance(index, tuple) and index and index[0] is Ellipsis:
        plain = all(isinstance(i, int | slice) for i in index[1:])
        if plain and len(index) - 1 < x._rows.dim() - x._ragged_dim:
            return x.like(x._rows[index])
    if isinstance(x, NestedRows) and isinstance(index, tuple) and index and isinstance(index[0], int):
        return x.each[index[0]][index[1:]]
    return refuse(
        nested_in(args)[0], "[ ]", instead="expected: nt[i], with a number, nt[..., a:b] over dims that are not "
        "ragged, or plain tensors, which nt.unbind() gives",
    )  # fmt: skip


def to_padded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The sequences padded to the longest one, or to ``output_size``."""
    given = bound(("input", "padding", "output_size"), args, kwargs)
    x = given["input"]
    wanted: Any = given.get("output_size")
    if not isinstance(x, NestedRows):
        refuse(nested_in((args, kwargs))[0], "to_padded_tensor")
    own = [*x._rows.shape]
    own[x._ragged_dim] = max(x._lengths.of)
    size = own if wanted is None else [*wanted][1:]
    if wanted is not None and (len(size) != len(own) or wanted[0] not in (len(x), -1)):
        refuse(x, f"to_padded_tensor with output_size={_text(wanted)}", f"it has {len(x)} sequences and "
               f"{len(own)} dims behind them")  # fmt: skip
    size = [n if isinstance(m, RaggedSize) or m == -1 else m for m, n in zip(size, own, strict=True)]
    if any(m < n for m, n in zip(size, own, strict=True)):
        refuse(x, f"to_padded_tensor with output_size={_text(wanted)}", f"the largest sequence is {_text(own)}")
    return padded(x, given["padding"], size)


def padded(x: NestedRows, value: float, size: Sequence[int]) -> Tensor:
    """Stack the sequences, each padded with ``value`` to ``size``."""

    def fill(rows: Tensor) -> Tensor:
        missing = [(0, m - n) for n, m in zip(rows.shape, size, strict=True)]
        return F.pad(rows, [n for pair in reversed(missing) for n in pair], value=value)

    return torch.stack([fill(rows) for rows in x.each])


RULES.add((torch.nested.to_padded_tensor, Tensor.to_padded_tensor), to_padded)


def _other_dim(x: NestedRows, dim: int, name: str) -> int:
    d = dim_of_rows(x, dim, name)
    if d == x._ragged_dim:
        refuse(x, f"{name} along the ragged dim", instead="expected: a loop over nt.unbind()")
    return d
