"""Decompose ops whose result depends on an operand's strides into ops whose result does not.

A plan records shapes but no strides: on a device, an op's operand may have other strides than it had during capture.
``TABLE`` is a ``decomposition_table`` for the first trace of a step, in which tensors have the strides that users and
autograd see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.substitutes.decomposition_table import Table, registering_into

aten = torch.ops.aten
TABLE: Table = {}
_for = registering_into(TABLE)


def determinant(op: Any, x: Tensor) -> Any:
    """``aten._linalg_det`` and ``aten._linalg_slogdet``: values, LU factors of x or its transpose, and pivots.

    torch factors the transpose of a contiguous real matrix, and its gradient formulas rely on that.
    """
    return NotImplemented if x.is_complex() or x.is_contiguous() else op(x.mT.contiguous())


@_for(aten._linalg_det.default)
def _det(x: Tensor) -> Any:
    return determinant(aten._linalg_det.default, x)


@_for(aten._linalg_slogdet.default)
def _slogdet(x: Tensor) -> Any:
    return determinant(aten._linalg_slogdet.default, x)


@_for(aten.as_strided.default)
def _as_strided(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Any:
    """The same view of a contiguous operand.  Raises ValueError if it reads memory outside the elements of ``x``."""
    offset = 0 if storage_offset is None else storage_offset - x.storage_offset()
    order = sorted(range(x.dim()), key=lambda d: (x.stride(d), x.shape[d]), reverse=True)
    flat = x.permute(order)
    end = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if not flat.is_contiguous() or offset < 0 or (0 not in size and end >= x.numel()):
        raise ValueError(
            f"as_strided({tuple(size)}, {tuple(stride)}, {storage_offset}) was found on a tensor of shape "
            f"{tuple(x.shape)}, strides {x.stride()} and offset {x.storage_offset()}, whose elements are not all that "
            f"it reads; a job has values, and no memory around them. Call it on x.clone(), or index the tensor"
        )
    if x.is_contiguous() and not x.storage_offset():
        return NotImplemented
    return flat.view(-1).as_strided(size, stride, offset)
