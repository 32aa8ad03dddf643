"""Build modules without memory (``deferred_init``), and let each rank make its own parts later.

Every op that makes or changes such a tensor is recorded, with the position of its random numbers in their
generator's stream.  A part is made by running the ops again, on a few elements at a time where the ops allow it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actorflow.deferred import replay
from actorflow.deferred.tape import Buffer, BufferView, Indices, RecordedOp, StoredTensor, StoredValues
from actorflow.deferred.tape import digest as _digest
from actorflow.deferred.tensor import DeferredMode, DeferredTensor, active_mode, with_kind_of
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.torch_internals import OpOverload, swap_contents

__all__ = ["DeferredTensor", "deferred_init", "digest", "materialize", "shard", "stored"]

T = TypeVar("T", bound=nn.Module | Tensor | torch.optim.Optimizer)


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules without memory.

    Tensors made inside have a shape, a dtype and a device, but no memory.  They are initialised when they are needed:
    at the first call of a job each rank makes the parts that its plan assigns to it.  Their values, random numbers
    included, are those that the same lines give without ``deferred_init``; so are random numbers drawn afterwards.

    >>> with flow.deferred_init():
    ...     model = GPT(layers=48)
    """
    if active_mode() is not None:
        yield
        return
    recorder = DeferredMode()
    try:
        with recorder:
            yield
    finally:
        recorder.settle()


def materialize(thing: T) -> T:
    """Give memory and values to what was built in ``deferred_init``, in place; returns ``thing``.

    ``thing`` is a module, a tensor or an optimizer (then its state is made).  Every tensor is made whole on this rank.
    Call it only to use a model without a job; a job does it by itself, and each rank makes only its own parts.
    """
    with replay.without_modes():
        waiting: dict[int, DeferredTensor] = {id(t): t for t in _tensors(thing) if isinstance(t, DeferredTensor)}
        while waiting:
            _, first = waiting.popitem()
            buffer = first._buffer
            group = [first, *(t for t in waiting.values() if t._buffer is buffer)]
            size = buffer.nbytes // first.dtype.itemsize
            storage = replay.whole_tensor(BufferView(buffer, first.dtype, (size,), (1,), 0)).untyped_storage()
            for tensor in group:
                waiting.pop(id(tensor), None)
                swap_contents(tensor, with_kind_of(tensor, replay.tensor_over(storage, tensor.view_of_buffer)))
            del first, group
    return thing


def shard(tensor: DeferredTensor, indices: Indices) -> Tensor:
    """A new real tensor with the elements of ``tensor`` whose index is in ``indices`` in each dim."""
    return replay.shard(tensor.view_of_buffer, indices)


def stored(values: StoredValues, device: torch.device | str = "cpu") -> Tensor:
    """A deferred tensor whose values lie in a file, of which each rank reads its part when it needs it.

    One without elements is a real tensor.
    """
    meta = torch.empty(values.shape, dtype=values.dtype, device="meta")
    if not meta.numel():
        return torch.empty(values.shape, dtype=values.dtype, device=device)
    with torch.no_grad():
        made = DeferredTensor.of(meta, Buffer(torch.device(device), meta.numel() * meta.itemsize))
    view = made.view_of_buffer
    clone: OpOverload = torch.ops.aten.clone.default
    RecordedOp(
        clone, (StoredTensor(values),), {}, (), (), (view,), torch.get_default_dtype(), None, None, overwrites=True
    ).keep()
    return made


def digest(tensor: DeferredTensor) -> int:
    """A hash of how a deferred tensor is made; where it is equal on two ranks, ``shard`` gives both the same values."""
    return _digest(tensor.view_of_buffer)


def _tensors(thing: nn.Module | Tensor | torch.optim.Optimizer) -> Iterator[object]:
    if isinstance(thing, nn.Module):
        for module in thing.modules():
            yield from pytree.tree_leaves([module._parameters, module._buffers])
            yield from pytree.tree_leaves([v for k, v in module.__dict__.items() if k != "_modules"])
    elif isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, torch.optim.Optimizer):
        yield from pytree.tree_leaves(list(thing.state.values()))
    else:
        raise StateError(
            f"materialize({type(thing).__name__}) was found; a module, a tensor or an optimizer was expected"
        )
