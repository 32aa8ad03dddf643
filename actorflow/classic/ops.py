"""Ops with the names and arguments of OneFlow's first generation, implemented by torch's functions.

A function that also exists in torch accepts the arguments of both.  The argument ``name`` of an op has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.errors import CallError

__all__ = [
    "cast",
    "concat",
    "constant",
    "expand_dims",
    "flatten",
    "identity",
    "matmul",
    "reshape",
    "transpose",
]


def reshape(
    x: Tensor | None = None, shape: Any = None, name: str | None = None, *, input: Tensor | None = None
) -> Tensor:
    """The same elements in another shape; one dim may be -1.  Also accepts torch's ``reshape(input, shape)``."""
    return torch.reshape(_one("reshape", x, input), (shape,) if isinstance(shape, int) else tuple(shape))


def matmul(
    a: Tensor | None = None,
    b: Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    name: str | None = None,
    *,
    input: Tensor | None = None,
    other: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``alpha · a @ b``; ``transpose_a`` and ``transpose_b`` exchange the last two dims of an operand first.

    Also accepts torch's ``matmul(input, other, out=)``.
    """
    left, right = _one("matmul", a, input), _one("matmul", b, other)
    left = left.transpose(-2, -1) if transpose_a else left
    right = right.transpose(-2, -1) if transpose_b else right
    found = torch.matmul(left, right) if out is None else torch.matmul(left, right, out=out)
    return found if alpha == 1.0 else found * alpha


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1, name: str | None = None) -> Tensor:
    """Merge the dims from ``start_dim`` to ``end_dim`` into one; torch's ``flatten``."""
    return torch.flatten(input, start_dim, end_dim)


def transpose(
    a: Tensor | None = None,
    perm: Sequence[int] | int | None = None,
    dim1: int | None = None,
    *,
    name: str | None = None,
    input: Tensor | None = None,
    dim0: int | None = None,
) -> Tensor:
    """Reorder the dims to the order ``perm``; torch's ``transpose(input, dim0, dim1)`` exchanges two.

    Without ``perm`` the order of the dims is reversed.  Raises CallError if the two forms are mixed.
    """
    x = _one("transpose", a, input)
    first = dim0 if dim0 is not None else perm
    if isinstance(first, int) and dim1 is not None:
        return torch.transpose(x, first, dim1)
    if isinstance(first, int) or dim1 is not None:
        raise CallError("transpose(x, perm=[…]) or transpose(x, dim0, dim1) was expected; one dim was found")
    return torch.permute(x, tuple(range(x.dim() - 1, -1, -1)) if first is None else tuple(first))


def concat(
    inputs: Sequence[Tensor] | None = None,
    axis: int = 0,
    max_dim_size: int | None = None,
    name: str | None = None,
    *,
    tensors: Sequence[Tensor] | None = None,
    dim: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Concatenate tensors along ``axis``; also accepts torch's ``concat(tensors, dim)``.

    ``max_dim_size`` has no effect.  Raises CallError without tensors.
    """
    parts = inputs if inputs is not None else tensors
    if parts is None:
        raise CallError("concat() without tensors was found; concat([a, b], axis) was expected")
    return torch.cat(list(parts), axis if dim is None else dim, out=out)


def cast(x: Tensor, dtype: torch.dtype, name: str | None = None) -> Tensor:
    """Convert the tensor to another dtype."""
    return x.to(dtype)


def identity(x: Tensor, name: str | None = None) -> Tensor:
    """Return the tensor itself."""
    return x


def expand_dims(input: Tensor, axis: int, name: str | None = None) -> Tensor:
    """Insert a dim of size 1 at ``axis``; torch's ``unsqueeze``."""
    return torch.unsqueeze(input, axis)


def constant(
    value: float, dtype: torch.dtype | None = None, shape: Sequence[int] | int | None = None, name: str | None = None
) -> Tensor:
    """A tensor filled with one value, of shape [1] if no shape is given; torch's ``full``."""
    dims = (1,) if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.full(dims, value, dtype=dtype)


def _one(what: str, first: Tensor | None, second: Tensor | None) -> Tensor:
    """The argument that was passed under one of its two names; raises CallError for none or both."""
    found = first if first is not None else second
    if found is None or (first is not None and second is not None):
        count = "no" if found is None else "twice the same"
        raise CallError(f"{what}: {count} argument was found; one tensor was expected")
    return found
