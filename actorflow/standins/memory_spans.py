"""The span of memory in which the elements of a tensor lie, and whether the spans of two tensors overlap."""

from __future__ import annotations

import torch
from torch import Tensor

from actorflow.deferred import DeferredTensor
from actorflow.standins.lazy_tensor import LazyTensor
from actorflow.standins.logical_batch import BatchTensor
from actorflow.standins.owned_tensor import OwnedTensor

__all__ = ["MemorySpan", "overlap", "memory_span"]

MemorySpan = tuple[int, int, int]  # address of the memory, first byte, byte after the last one


def memory_span(tensor: Tensor) -> MemorySpan | None:
    """The memory span of a tensor of the script.

    None for stand-ins, deferred and lazy tensors, and tensors that are empty or not strided.
    """
    if (
        isinstance(tensor, OwnedTensor | LazyTensor | DeferredTensor | BatchTensor)
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return None
    try:
        memory = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    where = memory._cdata if memory.device.type == "meta" else memory.data_ptr()  # a meta tensor has no address
    if not where:
        return None
    first = int(tensor.storage_offset()) * tensor.element_size()
    extent = 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return where, first, first + extent * tensor.element_size()


def overlap(one: MemorySpan, other: MemorySpan) -> bool:
    """Whether the spans overlap, so that the tensors may have elements in common."""
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
