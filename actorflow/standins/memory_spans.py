"""Where the elements of a tensor lie in memory, and whether two tensors have some in common."""

from __future__ import annotations

import torch
from torch import Tensor

from actorflow.deferred import DeferredTensor
from actorflow.standins.lazy_tensor import LazyTensor
from actorflow.standins.owned_tensor import OwnedTensor

__all__ = ["MemorySpan", "overlap", "memory_span"]

MemorySpan = tuple[int, int, int]  # a memory, and from where to where in it


def memory_span(tensor: Tensor) -> MemorySpan | None:
    """Where a tensor of the script's lies; None where it has no memory of its own."""
    if (
        isinstance(tensor, OwnedTensor | LazyTensor | DeferredTensor)
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return None
    try:
        memory = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    where = memory._cdata if memory.device.type == "meta" else memory.data_ptr()  # it is in no memory in a capture
    if not where:
        return None
    first = int(tensor.storage_offset()) * tensor.element_size()
    extent = 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return where, first, first + extent * tensor.element_size()


def overlap(one: MemorySpan, other: MemorySpan) -> bool:
    """Whether two tensors have some element in common, or may have."""
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
