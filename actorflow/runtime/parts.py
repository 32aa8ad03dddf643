"""Cut one device's part out of a logical tensor by its layout, and put the tensor together from parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actorflow import deferred
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import Broadcast, NdSbp, PartialSum
from actorflow_compiler.plan.region import coordinates, held

__all__ = ["assemble", "part", "sources"]


def part(tensor: Tensor, placement: Placement, sbp: NdSbp, index: int) -> Tensor:
    """A copy of the part that device ``index`` of the placement holds.

    Of a deferred tensor only that part is computed (``deferred.shard``).
    """
    lines = held(tensor.shape, sbp, placement, index)
    if isinstance(tensor, deferred.DeferredTensor):
        return deferred.shard(tensor, lines)
    out = tensor
    for dim, indices in enumerate(lines):
        if len(indices) != tensor.shape[dim]:
            out = out.index_select(dim, torch.from_numpy(indices).to(tensor.device))
    return out.clone(memory_format=torch.contiguous_format) if out is tensor else out.contiguous()


def sources(placement: Placement, sbp: NdSbp, rank: int) -> tuple[int, ...]:
    """Positions in the placement of the devices whose parts make up the tensor.

    Along a broadcast axis, all devices hold the same part; of these, the device at ``rank``'s coordinate is taken, or
    the first device if ``rank`` is not in the placement.
    """
    mine = coordinates(placement, placement.index(rank)) if rank in placement else (0,) * len(placement.hierarchy)
    return tuple(
        index
        for index in range(placement.size)
        if all(
            at == own or not isinstance(entry, Broadcast)
            for at, own, entry in zip(coordinates(placement, index), mine, sbp, strict=True)
        )
    )


def assemble(parts: Mapping[int, Tensor], shape: Sequence[int], placement: Placement, sbp: NdSbp) -> Tensor:
    """The logical tensor of ``shape`` from the parts of its ``sources``."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    first = next(iter(parts.values()))
    out = torch.zeros(tuple(shape), dtype=first.dtype, device=first.device)
    adds = any(isinstance(entry, PartialSum) for entry in sbp)
    for index, tensor in parts.items():
        lines = [torch.from_numpy(indices).to(first.device) for indices in held(shape, sbp, placement, index)]
        grid = [line.view([-1 if d == dim else 1 for d in range(len(lines))]) for dim, line in enumerate(lines)]
        if not grid:
            out += tensor
        else:
            out.index_put_(tuple(grid), tensor, accumulate=adds)
    return out
