"""Multiply each row by the matrix of its group, as mixtures of experts do, with the rows in any order.

Unlike a grouped product of sorted rows, it may be split along the rows, the groups and both sides of the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED = "actorflow.grouped_mm"
GROUPED_WEIGHT = "actorflow.grouped_mm_weight"
ALIGNED = 16  # bytes; torch's CUDA kernel needs rows of matrices to be multiples of it


def grouped_mm(x: Tensor, weight: Tensor, group: Tensor, first: int, groups: int) -> Tensor:
    """``out[t] = x[t] @ weight[group[t] - first]``; zeros for rows whose group is in another part.

    x (rows, k), weight (groups here, k, n), group int (rows,) → (rows, n).  The first matrix is that of
    group ``first`` of ``groups``; the sum over all parts of the groups is the whole result.
    """
    del groups  # only counting FLOPs needs it
    out = x.new_zeros(x.shape[0], weight.shape[2])
    if _has_kernel(x, weight):
        order, ends = _by_group(group, first, weight.shape[0])
        found = F.grouped_mm(x[order], weight, offs=ends)
        here = torch.arange(len(order), device=x.device) < ends[-1]
        out[order] = torch.where(here.unsqueeze(-1), found, 0)  # torch leaves rows without a group here unwritten
        return out
    for e, rows in _rows_by_group(group, first, weight.shape[0]):
        out[rows] = x[rows] @ weight[e]
    return out


def grouped_mm_weight(x: Tensor, grad: Tensor, group: Tensor, first: int, count: int, groups: int) -> Tensor:
    """The gradient of the ``count`` matrices of this part in ``grouped_mm``: for each, its rows' ``xᵀ @ grad``.

    x (rows, k), grad (rows, n), group int (rows,) → (count, k, n).
    """
    del groups
    if _has_kernel(x, grad):
        order, ends = _by_group(group, first, count)
        return F.grouped_mm(x[order].t(), grad[order], offs=ends)
    out = x.new_zeros(count, x.shape[1], grad.shape[1])
    for e, rows in _rows_by_group(group, first, count):
        out[e] = x[rows].t() @ grad[rows]
    return out


def _has_kernel(*tensors: Tensor) -> bool:
    """Whether torch's grouped product supports these tensors; it does not synchronize with the device."""
    return all(
        t.is_cuda and t.dtype == torch.bfloat16 and t.numel() > 0 and t.shape[-1] * t.element_size() % ALIGNED == 0
        for t in tensors
    )


def _by_group(group: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The indices of rows ordered by group, rows without a group of this part last; and where each group ends."""
    at = group - first
    key, order = torch.where((at >= 0) & (at < count), at, count).sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(count, device=group.device, dtype=key.dtype), right=True)
    return order, ends.to(torch.int32)


def _rows_by_group(group: Tensor, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each group of this part that has rows, as an index into the part, and the indices of its rows."""
    order, ends = _by_group(group, first, count)
    start = 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            yield e, order[start:end]
        start = end


OPS: dict[str, Callable[..., Any]] = {"grouped_mm": grouped_mm, "grouped_mm_weight": grouped_mm_weight}
