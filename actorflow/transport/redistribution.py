"""Cut what a rank sends in an exchange into flat bytes by its boxes, and put outputs together from what came.

What one member sends another for one tensor is a run of elements, box after box; every run starts
at a multiple of ``ALIGN`` bytes, so that tensors of any dtypes share one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import ITEM_BYTES
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Exchange, TensorSpec

ALIGN = 16  # bytes; the largest item


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` → ``torch.float32``.  Raises PlanError for a dtype that plans do not know."""
    found = getattr(torch, name, None) if name in ITEM_BYTES else None
    if not isinstance(found, torch.dtype):
        raise PlanError(f"dtype {name!r} was found; one of {', '.join(ITEM_BYTES)} was expected")
    return found


def check(comm: Collective, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    """Raise PlanError unless the operands of a collective fit its targets and its exchanges."""
    parts = len(tensors) if comm.kind == CollectiveKind.ALL_REDUCE else len(comm.exchanges)
    if not len(tensors) == len(specs) == parts:
        raise PlanError(
            f"{comm.label} {comm.id}: {len(tensors)} operands, {len(specs)} targets and {parts} exchanges were found; "
            "expected one each"
        )
    for i, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        if tensor.dtype != dtype_of(spec.dtype):
            raise PlanError(f"{comm.label} {comm.id}: operand {i} is {tensor.dtype}; its target is {spec.dtype}")


def cut(tensor: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """The views of a tensor that boxes name."""
    return [_view(tensor, box) for box in boxes]


def windows(flat: Tensor, offset: int, boxes: Sequence[Box], dtype: torch.dtype) -> list[Tensor]:
    """The views of flat bytes, from ``offset`` on, that hold a run of boxes."""
    found = []
    for box in boxes:
        stop = offset + numel(box.size) * dtype.itemsize
        found.append(flat[offset:stop].view(dtype).view(box.size))
        offset = stop
    return found


def run_bytes(boxes: Sequence[Box], dtype: str) -> int:
    """The room that a run of boxes takes in a flat buffer."""
    return padded(sum(numel(box.size) for box in boxes) * ITEM_BYTES[dtype])


def padded(nbytes: int) -> int:
    """The room that some bytes take in a flat buffer."""
    return -(-nbytes // ALIGN) * ALIGN


def join(exchange: Exchange, spec: TensorSpec, pieces: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """The output of an exchange: ``pieces[m]`` are what member m sent, one tensor for each received box.

    Pieces are placed or added in the order of the group.  Placed boxes do not overlap, so they cover
    the output when their sizes add up to it; then nothing is zeroed first.
    """
    whole = numel(spec.shape)
    sizes = [sum(numel(box.size) for box in boxes) for boxes in exchange.receive]
    fresh = sizes[0] == whole if exchange.add else sum(sizes) == whole  # the first member's boxes, or all, cover it
    output = (torch.empty if fresh else torch.zeros)(spec.shape, dtype=dtype_of(spec.dtype), device=device)
    for member, boxes in enumerate(exchange.receive):
        for box, piece in zip(boxes, pieces[member], strict=True):
            part = _view(output, box)
            if exchange.add and not (fresh and member == 0):
                part.add_(piece.view(part.shape))
            else:
                part.copy_(piece.view(part.shape))
    return output


def _view(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor
