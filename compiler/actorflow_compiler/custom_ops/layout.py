"""Ops that compiler passes add to those of the user's step: rectangles of tensors and pieces of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def carve(x: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """The rectangle of ``x`` that begins at ``start``; a view."""
    for dim, (lo, n) in enumerate(zip(start, size, strict=True)):
        if n != x.shape[dim]:
            x = x.narrow(dim, lo, n)
    return x


def arrange(
    parts: Sequence[Tensor], shape: Sequence[int], starts: Sequence[Sequence[int]], dtype: torch.dtype,
    add: bool = False,
) -> Tensor:  # fmt: skip
    """A tensor of ``shape`` with each part written (or, with ``add``, added) at its start, and zeros elsewhere.

    It is on the device of the first part.
    """
    covered = not add and sum(p.numel() for p in parts) == torch.Size(shape).numel()
    out = (torch.empty if covered else torch.zeros)(tuple(shape), dtype=dtype, device=parts[0].device)
    for part, start in zip(parts, starts, strict=True):
        place = carve(out, start, part.shape)
        if add:
            place.add_(part)
        else:
            place.copy_(part)
    return out


def unpack(x: Tensor, dim: int, pieces: int, piece: int) -> Tensor:
    """Piece number ``piece`` of ``x``, which is cut into ``pieces`` equal pieces along ``dim``; a view."""
    size = x.shape[dim] // pieces
    return x.narrow(dim, piece * size, size)


def pack(x: Tensor, dim: int, pieces: int) -> Tensor:
    """``pieces`` equal tensors joined along ``dim``, as a register joins them; only checks of signatures run it."""
    return torch.cat([x] * pieces, dim)


def first(x: Tensor, piece: int) -> Tensor:
    """``x`` for the first piece and zeros for the others: one summand of a sum over the pieces."""
    nothing = torch.zeros_like(x) if isinstance(x, Tensor) else 0  # a number of the script is no tensor
    return x if piece == 0 else nothing


def identity(x: Tensor) -> Tensor:
    """The same tensor."""
    return x


def constrain(x: Tensor, layout: str, origin: str) -> Tensor:
    """The same tensor; ``layout`` is a hint for layout inference (see ``hints/constrain.py``)."""
    return x


def add_(tensors: Sequence[Tensor], value: float) -> None:
    """Add a number to many tensors in place."""
    torch._foreach_add_(list(tensors), value)


OPS: dict[str, Callable[..., Any]] = {
    "carve": carve, "arrange": arrange, "unpack": unpack, "pack": pack, "first": first, "identity": identity,
    "constrain": constrain,
    "accumulate": identity, "last": identity, "add_": add_,
}  # fmt: skip
