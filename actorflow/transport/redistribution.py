"""Cut the tensors that a rank sends in an exchange by their boxes, and assemble outputs from received pieces.

A box is a rectangular part of a tensor.  The boxes of one tensor that one member sends to another form a run of
elements, box after box.  Every run starts at a multiple of ``ALIGN`` bytes in the flat buffer, so that tensors of any
dtypes can share it.  Equal boxes at regular distances (a grid) are moved by one op, as one strided view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import ITEM_BYTES
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.plan.grids import Grid, grids
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
    """Views of the boxes of a tensor, one for each of their grids and of its shape."""
    return [view_of(tensor, grid) for grid in grids(boxes)]


def run_of(tensor: Tensor, boxes: Sequence[Box]) -> Tensor:
    """A flat copy of the elements of the boxes of a tensor, box after box."""
    pieces = [piece.reshape(-1) for piece in cut(tensor, boxes)]
    return torch.cat(pieces) if pieces else tensor.new_empty(0)


def split_run(run: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """Views of the elements of some boxes in a flat run of them, one for each of their grids and of its shape."""
    found = grids(boxes)
    parts = torch.split(run, [numel(grid.shape) for grid in found])
    return [part.view(grid.shape) for part, grid in zip(parts, found, strict=True)]


def windows(flat: Tensor, offset: int, boxes: Sequence[Box], dtype: torch.dtype) -> list[Tensor]:
    """As ``split_run`` of the run that begins at byte ``offset`` of a flat buffer."""
    stop = offset + sum(numel(box.size) for box in boxes) * dtype.itemsize
    return split_run(flat[offset:stop].view(dtype), boxes) if boxes else []


def cut_like(tensor: Tensor, boxes: Sequence[Box], others: Sequence[Box]) -> list[Tensor]:
    """The boxes of a tensor in the shapes of the grids of ``others``, boxes of the same sizes; views if grids agree."""
    pieces = cut(tensor, boxes)
    if [tuple(piece.shape) for piece in pieces] == [grid.shape for grid in grids(others)]:
        return pieces
    return split_run(run_of(tensor, boxes), others)


def view_of(tensor: Tensor, grid: Grid) -> Tensor:
    """The view of all boxes of a grid in a tensor, of the grid's shape."""
    if not grid.counts:
        return _view(tensor, grid)
    strides = tensor.stride()

    def along(index: Sequence[int]) -> int:
        return sum(i * stride for i, stride in zip(index, strides, strict=True))

    steps = tuple(along(step) for step in grid.steps)
    return tensor.as_strided(grid.shape, (*steps, *strides), tensor.storage_offset() + along(grid.start))


def run_bytes(boxes: Sequence[Box], dtype: str) -> int:
    """The bytes that a run of boxes takes in a flat buffer, with padding."""
    return padded(sum(numel(box.size) for box in boxes) * ITEM_BYTES[dtype])


def padded(nbytes: int) -> int:
    """``nbytes``, rounded up to a multiple of ``ALIGN``."""
    return -(-nbytes // ALIGN) * ALIGN


def join(exchange: Exchange, spec: TensorSpec, pieces: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Assemble the output of an exchange; ``pieces[m]`` came from member m, one for each grid of the received boxes.

    Pieces are copied or added in the order of the group.  Copied boxes do not overlap, so they cover the output if
    their sizes add up to its size; then it need not be zeroed first.
    """
    whole = numel(spec.shape)
    sizes = [sum(piece.numel() for piece in came) for came in pieces]
    fresh = sizes[0] == whole if exchange.add else sum(sizes) == whole  # the first member's boxes, or all, cover it
    output = (torch.empty if fresh else torch.zeros)(spec.shape, dtype=dtype_of(spec.dtype), device=device)
    for member, boxes in enumerate(exchange.receive):
        for part, piece in zip(cut(output, boxes), pieces[member], strict=True):
            if exchange.add and not (fresh and member == 0):
                part.add_(piece)
            else:
                part.copy_(piece)
    return output


def _view(tensor: Tensor, box: Box | Grid) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor
