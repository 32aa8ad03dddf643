"""What ``torch.distributed.checkpoint`` asks of a tensor: which pieces of the whole this rank has, and their values.

So it writes and reads global tensors as it does DTensors: each rank its part, nothing is gathered, and a checkpoint may
be read in any other layout, or by one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor
from actorflow.eager.linked_views import LinkedView, refresh
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.sbp import P
from actorflow_compiler.plan.plan import Box
from actorflow_compiler.plan.region import boxes, region

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["answer_torchs_checkpoints"]


def answer_torchs_checkpoints(kind: Any) -> None:
    """Give a class of tensors the three methods by which ``torch.distributed.checkpoint`` knows its own kinds."""
    kind.__create_write_items__ = _write_items
    kind.__create_chunk_list__ = _chunks
    kind.__get_tensor_shard__ = _piece


def _write_items(x: GlobalTensor, fqn: str, _: Any) -> list[WriteItem]:
    """What this rank could write of the whole; torch has each piece written by one of the ranks that have it."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    pieces = _pieces(x)
    if isinstance(x, LinkedView):
        refresh(x)
    properties = TensorProperties.create_from_tensor(x._local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(whole.start)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(whole), properties=properties, size=x.size()),
        )
        for whole, _ in pieces
    ]


def _chunks(x: GlobalTensor) -> list[ChunkStorageMetadata]:
    """What this rank has to read of the whole."""
    if isinstance(x, LinkedView):
        raise StateError(
            f"torch.distributed.checkpoint was to load into a view of shape {tuple(x.shape)} of a global tensor, which "
            f"has values of its own; the tensor itself was expected, or a clone() of the view"
        )
    return [_chunk(whole) for whole, _ in _pieces(x)]


def _piece(x: GlobalTensor, index: MetadataIndex) -> Tensor:
    """The piece of this rank's part that begins at an index of the whole; it shares memory with the part."""
    for whole, mine in _pieces(x):
        if index.offset is None or tuple(index.offset) == whole.start:
            if 0 in whole.size:
                return x._local.new_empty(whole.size)
            return x._local[tuple(slice(lo, lo + n) for lo, n in zip(mine.start, mine.size, strict=True))]
    raise StateError(f"{index} was asked of a global tensor, {x._spec.layout}, of which this rank has no such piece")


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.size))


def _pieces(x: GlobalTensor) -> list[tuple[Box, ...]]:
    """The rectangles of which this rank's part consists: each as a box of the whole and as one of the part.

    Raises StateError for partial sums, which no rank has the values of, and where torch would take each rank for a run
    of its own, as ranks have not met.
    """
    spec: GlobalSpec = x._spec
    place, sbp = spec.layout.placement, spec.layout.sbp
    if P in sbp:
        raise StateError(
            f"torch.distributed.checkpoint was given a global tensor of shape {spec.shape} that lies as {spec.layout}, "
            f"of whose values each rank has a term; expected: x.to_global(sbp=flow.sbp.broadcast), or split"
        )
    if spec.comm.world > 1 and not distributed.is_initialized():
        raise StateError(
            f"torch.distributed.checkpoint was given a global tensor of shape {spec.shape}, and has no process group, "
            f"so that each of the {spec.comm.world} ranks would write as if it were alone; call "
            f"flow.distributed.barrier() before, which makes one"
        )
    if spec.comm.rank not in place:
        return []
    if 0 in spec.shape:
        return [(Box((0,) * len(spec.shape), spec.shape),) * 2]
    mine = region(spec.shape, sbp, place, place.ranks.index(spec.comm.rank))
    return [] if not all(mine) else boxes(mine, (tuple(((0, n),) for n in spec.shape), mine))
