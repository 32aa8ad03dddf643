"""Redirect views of a tensor that became a stand-in to the variable, so that they show the plan's value.

In PyTorch ``p.data``, ``p.detach()`` and ``model.state_dict()`` give views that always share memory with ``p``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from actorflow.standins.memory_spans import MemorySpan, memory_span, overlap
from actorflow.standins.owned_tensor import CompositeCopy, DetachedTensor, OwnedTensor
from actorflow_compiler.core.garbage_collection import instances

__all__ = ["AssignedData", "TakenTensor", "redirect_views", "layout_of"]

_WEAK: Any = StorageWeakRef  # StorageWeakRef is not typed


@dataclass(frozen=True, slots=True)
class TakenTensor:
    """A tensor that has become a stand-in, with its former memory and layout."""

    owned: OwnedTensor
    memory: Any
    where: MemorySpan
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_at(self, where: MemorySpan | None) -> bool:
        """Whether this span overlaps the tensor's former memory, which still exists."""
        return where is not None and not self.memory.expired() and overlap(self.where, where)


@dataclass(frozen=True, slots=True)
class AssignedData:
    """A stand-in whose ``.data`` the script has set to a plain tensor."""

    taken: TakenTensor  # describes that tensor's memory as the stand-in's
    tensor: weakref.ref[Tensor]
    version: int  # of the tensor when it was assigned


def layout_of(tensor: Tensor, where: MemorySpan) -> tuple[Any, ...]:
    """The memory, span and layout of a tensor that is about to become a stand-in, for ``TakenTensor``."""
    memory = _WEAK(tensor.untyped_storage())
    return memory, where, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def redirect_views(these: Sequence[TakenTensor], but: Collection[int]) -> None:
    """Redirect all views of these tensors that the script holds to their variables.

    ``but`` are the ids of views that stay as they are; so do views with a graph, and views of which there are views
    with a graph.
    """
    left: dict[int, list[TakenTensor]] = {}
    for one in these:
        if not one.memory.expired():
            left.setdefault(one.where[0], []).append(one)
    if not left:
        return
    copies: dict[int, DetachedTensor] = {}
    tensors = instances(Tensor)
    for tensor in sorted(tensors, key=Tensor._is_view, reverse=True):  # views of views first: they hold their bases
        if tensor.requires_grad or id(tensor) in but or (where := memory_span(tensor)) is None:
            continue
        there = [one for one in left.get(where[0], ()) if one.dtype == tensor.dtype and overlap(one.where, where)]
        if there:
            _redirect(tensor, where, there, copies)


def _redirect(
    tensor: Tensor, where: MemorySpan, there: Sequence[TakenTensor], copies: dict[int, DetachedTensor]
) -> None:
    """Redirect a tensor that lies in one variable's memory, or whose memory contains that of several."""
    memory, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # a new view of the same memory, with no base
    plain.set_(memory, offset, tensor.shape, tensor.stride())
    for one in there:
        if id(one.owned) not in copies:
            copies[id(one.owned)] = DetachedTensor.of(plain.as_strided(one.shape, one.stride, one.offset), one.owned)
    wholes = [copies[id(one.owned)].whole for one in there]
    within = next((n for n, one in enumerate(there) if one.where[1] <= where[1] and where[2] <= one.where[2]), None)
    whole = CompositeCopy(plain, wholes) if within is None else wholes[within]
    DetachedTensor.become(tensor, plain, whole)
