"""The ops of plans that are not torch's: name (without ``actorflow.``) → function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler import layout_ops, optimizers


def embedding_part(weight: Tensor, indices: Tensor, start: int) -> Tensor:
    """Rows of a table of which this device holds those from ``start`` on; zeros for the others."""
    local = indices - start
    mine = (local >= 0) & (local < weight.shape[0])
    rows = torch.nn.functional.embedding(torch.where(mine, local, 0), weight)
    return torch.where(mine.unsqueeze(-1), rows, 0)


def embedding_part_backward(grad: Tensor, indices: Tensor, rows: int, start: int, padding_index: int, scale: bool) -> Tensor:
    """The gradient of this device's ``rows`` rows of a table, from ``start`` on."""
    local = indices - start
    mine = (local >= 0) & (local < rows)
    grad = torch.where(mine.unsqueeze(-1), grad, 0)
    return torch.ops.aten.embedding_dense_backward(grad, torch.where(mine, local, 0), rows, padding_index - start if padding_index >= start else -1, scale)


OPS: dict[str, Callable[..., Any]] = {
    **layout_ops.OPS,
    **optimizers.OPS,
    "embedding_part": embedding_part,
    "embedding_part_backward": embedding_part_backward,
}
