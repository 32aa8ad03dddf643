"""The ops that actorflow adds to torch's: a plan's op ``actorflow.NAME`` is the function ``OPS[NAME]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.custom_ops import causal_attention as attention_ops
from actorflow_compiler.custom_ops import grouped_mm as grouped_ops
from actorflow_compiler.custom_ops import layout as layout_ops
from actorflow_compiler.custom_ops import mirrored as mirrored_ops
from actorflow_compiler.custom_ops import optimizers, quantiles
from actorflow_compiler.custom_ops import random as random_ops
from actorflow_compiler.custom_ops import ring_attention as ring_ops
from actorflow_compiler.custom_ops import split_classes as class_ops
from actorflow_compiler.numbers import ops as number_ops
from actorflow_compiler.substitutes import ctc_loss, fixed_sizes, loss_scaling, observers

Kernel = Callable[..., Any]
OPS: dict[str, Kernel] = {
    **ctc_loss.OPS, **layout_ops.OPS, **class_ops.OPS, **grouped_ops.OPS, **attention_ops.OPS, **ring_ops.OPS,
    **optimizers.OPS,
    **quantiles.OPS, **fixed_sizes.OPS, **mirrored_ops.OPS, **loss_scaling.OPS, **number_ops.OPS, **observers.OPS,
    "uniform": random_ops.uniform,
}  # fmt: skip


def op(name: str) -> Callable[[Kernel], Kernel]:
    """Register a function as the op ``actorflow.name``: ``@op("first")``.

    It takes tensors and plain Python arguments (tuples for lists) and returns a tensor, or a tuple of them.
    """

    def register(kernel: Kernel) -> Kernel:
        assert name not in OPS, name
        OPS[name] = kernel
        return kernel

    return register


@op("embedding_part")
def embedding_part(weight: Tensor, indices: Tensor, first: int, whole: int) -> Tensor:
    """Look up rows in a part of a table, whose row 0 is row ``first`` of the whole; zeros for rows of other parts.

    weight (rows, width), indices any shape → (*indices, width); the sum over all parts is the whole lookup.  An index
    outside the ``whole`` rows raises the same error as an embedding that is not split.
    """
    if not weight.shape[0]:
        return weight.new_zeros(*indices.shape, weight.shape[1])
    at = indices - first
    elsewhere = ((at < 0) & (indices >= 0)) | ((at >= weight.shape[0]) & (indices < whole))
    found = torch.embedding(weight, at.masked_fill(elsewhere, 0))
    return found.masked_fill_(elsewhere.unsqueeze(-1), 0)


@op("embedding_part_backward")
def embedding_part_backward(grad: Tensor, indices: Tensor, first: int, rows: int, skip: int) -> Tensor:
    """The gradient of ``embedding_part``'s weight (rows, width); row ``skip`` of the whole table gets none."""
    at = (indices - first).reshape(-1)
    here = (at >= 0) & (at < rows) & (at != skip - first)
    out = grad.new_zeros(rows + 1, grad.shape[-1])  # the last row collects gradients of rows of other parts
    return out.index_add_(0, torch.where(here, at, rows), grad.reshape(at.numel(), grad.shape[-1]))[:rows]
