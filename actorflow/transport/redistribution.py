"""Cut the tensors that a rank sends in an exchange by their boxes, and assemble outputs from received pieces.

A box is a rectangular part of a tensor.  The boxes of one tensor that one member sends to another form a run of
elements, box after box.  Every run starts at a multiple of ``ALIGN`` bytes in the flat buffer, so that tensors of any
dtypes can share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import ITEM_BYTES
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Exchange, TensorSpec

ALIGN = 16  # bytes; the size of the largest dtype's items


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
    """Views of the boxes of a tensor."""
    return [_view(tensor, box) for box in boxes]


def windows(flat: Tensor, offset: int, boxes: Sequence[Box], dtype: torch.dtype) -> list[Tensor]:
    """Views of the boxes of a run that begins at byte ``offset`` of a flat buffer."""
    found = []
    for box in boxes:
        stop = offset + numel(box.size) * dtype.itemsize
        found.append(flat[offset:stop].view(dtype).view(box.size))
        offset = stop
    return found


def run_bytes(boxes: Sequence[Box], dtype: str) -> int:
    """The bytes that a run of boxes takes in a flat buffer, with padding."""
    return padded(sum(numel(box.size) for box in boxes) * ITEM_BYTES[dtype])


def padded(nbytes: int) -> int:
    """``nbytes``, rounded up to a multiple of ``ALIGN``."""
    return -(-nbytes // ALIGN) * ALIGN


def join(exchange: Exchange, spec: TensorSpec, pieces: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Assemble the output of an exchange; ``pieces[m]`` came from member m, one tensor for each received box.

    Pieces are copied or added in the order of the group.  Copied boxes do not overlap, so they cover the output if
    their sizes add up to its size; then it need not be zeroed first.
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
