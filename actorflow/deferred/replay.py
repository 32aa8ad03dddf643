"""Run recorded ops to make the contents of deferred tensors, whole or one rank's part.

Large tensors are made a chunk at a time where their ops allow it, so that no more than the wanted part is ever in
memory.  Otherwise the ops run as they were recorded, and intermediate results are freed after their last use.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.deferred.chunks import ChunkMaker, can_chunk, chunkwise_reduction, stored_behind
from actorflow.deferred.random_streams import BLOCK, StreamPosition, StreamReader, default_generator
from actorflow.deferred.tape import BufferView, ConstantTensor, Indices, RecordedOp, StoredTensor, needed_ops
from actorflow_compiler.core.torch_internals import real_tensors, schema_of

__all__ = ["tensor_over", "shard", "state_after", "without_modes", "whole_tensor"]

CHUNK = 1 << 20  # elements that are made at a time

_lock = threading.RLock()  # held by the thread that replays: with ranks as threads, several would use the reader below
_reader = StreamReader()
_stretches = ChunkMaker(_reader)


def whole_tensor(view: BufferView) -> Tensor:
    """A new real tensor with the contents of a view and its recorded strides."""
    with without_modes():
        if (stored := stored_behind(view)) is not None:
            return stored.read([*map(np.arange, view.shape)]).to(view.buffer.device)
        reduction = chunkwise_reduction(view)
        if reduction is not None and reduction.args[0].numel > CHUNK:
            return _reduced(reduction)
        if view.numel <= CHUNK or not can_chunk(view):
            return _own(_replayed(view))
        out = torch.empty(view.numel, dtype=view.dtype, device=view.buffer.device)
        for lo in range(0, view.numel, CHUNK):
            hi = min(lo + CHUNK, view.numel)
            _stretches.make(view, lo, out[lo:hi])
        return out.view(view.shape)


def shard(view: BufferView, indices: Indices) -> Tensor:
    """The elements of a view whose index is in ``indices`` in each dim, as a new contiguous tensor."""
    with without_modes():
        if (stored := stored_behind(view)) is not None:
            return stored.read(indices).to(view.buffer.device)
        if view.numel <= CHUNK or not can_chunk(view):
            return _own(_selected(_replayed(view), indices, 0).contiguous())
        scratch = torch.empty(CHUNK, dtype=view.dtype, device=view.buffer.device)
        out = torch.empty([len(lines) for lines in indices], dtype=view.dtype, device=view.buffer.device)
        for where, first, rows, row in _rows(view.shape, indices):
            dim = len(where)
            if out.shape[dim:] == view.shape[dim:]:
                _stretches.make(view, first, out[where].view(-1))
            else:
                made = _stretches.make(view, first, scratch[: rows * row])
                out[where] = _selected(made.view(rows, *view.shape[dim:]), indices[dim:], 1)
        return out


def state_after(op: RecordedOp) -> Tensor:
    """The state in which an op leaves its generator, found by running the op once."""
    with without_modes():
        _, state = _call(op, _run(needed_ops(op), [op]))
    assert state is not None
    return state


def tensor_over(storage: torch.UntypedStorage, view: BufferView) -> Tensor:
    """The real tensor that a view becomes over real memory."""
    tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
    tensor.set_(storage, view.offset, view.shape, view.strides)
    return tensor


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run real ops on one thread at a time, whatever dispatch, autograd or autocast modes the script has entered."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock)
        stack.enter_context(real_tensors())
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _rows(shape: tuple[int, ...], indices: Indices) -> Iterator[tuple[tuple[int | slice, ...], int, int, int]]:
    """The pieces to make one by one: index in the result, first element, number of rows, elements of a row.

    A row covers all dims behind the first dim whose rows fit into a chunk.
    """
    sizes = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # of a row, in elements
    dim = next(dim for dim, size in enumerate(sizes) if size <= CHUNK)
    most = CHUNK // sizes[dim]
    most -= most % BLOCK if most > BLOCK else 0  # so that the next piece starts where this one's random numbers end
    lines = indices[dim]
    ends = [*(np.flatnonzero(np.diff(lines) != 1) + 1).tolist(), len(lines)]
    for outer in itertools.product(*(enumerate(outer.tolist()) for outer in indices[:dim])):
        before = sum(index * size for (_, index), size in zip(outer, sizes, strict=False))
        for start, end in itertools.pairwise([0, *ends]):
            for lo in range(start, end, most):
                rows = min(most, end - lo)
                where: tuple[int | slice, ...] = (*(position for position, _ in outer), slice(lo, lo + rows))
                yield where, before + int(lines[lo]) * sizes[dim], rows, sizes[dim]


def _selected(tensor: Tensor, indices: Indices, first: int) -> Tensor:
    """The elements of a tensor at ``indices``, whose first entry is for dim ``first``."""
    for dim, lines in enumerate(indices, first):
        if len(lines) != tensor.shape[dim]:
            tensor = tensor.index_select(dim, torch.from_numpy(lines).to(tensor.device))
    return tensor


def _reduced(op: RecordedOp) -> Tensor:
    """The result of a reduction over a large tensor: the op is applied to its results for all chunks."""
    source: BufferView = op.args[0]
    found = []
    for lo in range(0, source.numel, CHUNK):
        size = min(CHUNK, source.numel - lo)
        piece = torch.empty(size, dtype=source.dtype, device=source.buffer.device)
        found.append(op.func(_stretches.make(source, lo, piece, op.number)))
    result: Tensor = op.func(torch.stack(found))
    return result


def _replayed(view: BufferView) -> Tensor:
    return tensor_over(_storage(_run(needed_ops(view), [view]), view), view)


def _run(ops: Sequence[RecordedOp], targets: Sequence[BufferView | RecordedOp]) -> dict[int, torch.UntypedStorage]:
    """Run ops on real memory; returns the memory of the targets by id of buffer."""
    last: dict[int, int] = {}  # id of a buffer → the last op that uses it
    for number, op in enumerate(ops):
        last.update((id(view.buffer), number) for view in _views(op))
    for target in targets:
        last.update((id(v.buffer), len(ops)) for v in ([target] if isinstance(target, BufferView) else _views(target)))
    dying: dict[int, list[int]] = {}
    for buffer, number in last.items():
        dying.setdefault(number, []).append(buffer)
    memory: dict[int, torch.UntypedStorage] = {}
    for number, op in enumerate(ops):
        out = pytree.tree_leaves(_call(op, memory)[0])
        for made, tensor in zip(op.makes, out, strict=True):
            if made is not None:
                memory[id(made.buffer)] = _as_recorded(tensor, made)
        del out
        for buffer in dying.get(number, ()):
            memory.pop(buffer, None)
    return memory


def _views(op: RecordedOp) -> list[BufferView]:
    given = [leaf for leaf in pytree.tree_leaves((op.args, op.kwargs)) if isinstance(leaf, BufferView)]
    return given + [made for made in op.makes if made is not None]


def _call(op: RecordedOp, memory: dict[int, torch.UntypedStorage]) -> tuple[Any, Tensor | None]:
    """Call an op on real memory; returns its result and the state of its generator afterwards."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, BufferView):
            return tensor_over(_storage(memory, leaf), leaf)
        return leaf.get() if isinstance(leaf, ConstantTensor | StoredTensor) else leaf

    args, kwargs = pytree.tree_map(real, (op.args, op.kwargs))
    with _default_dtype(op.default):
        if op.draws is None:
            return op.func(*args, **kwargs), None
        device = (*op.writes, *_views(op))[0].buffer.device
        generator = _generator(op.draws, op.words, device)
        if any(a.name == "generator" for a in schema_of(op.func).arguments):
            out = op.func(*args, **{**kwargs, "generator": generator})
            return out, generator.get_state()
        lent = default_generator(device)
        own = lent.get_state()
        lent.set_state(generator.get_state())
        try:
            return op.func(*args, **kwargs), lent.get_state()
        finally:
            generator.set_state(lent.get_state())
            lent.set_state(own)


def _generator(point: StreamPosition, words: int | None, device: torch.device) -> torch.Generator:
    if words is not None:
        return _reader.at(point, words)
    generator = torch.Generator(device)
    generator.set_state(point.state)
    return generator


def _storage(memory: dict[int, torch.UntypedStorage], view: BufferView) -> torch.UntypedStorage:
    """The real memory of a view; new memory if there is none yet, because nothing reads its previous contents."""
    buffer = view.buffer
    if id(buffer) not in memory:
        memory[id(buffer)] = _new_memory(buffer.nbytes, buffer.device)
    return memory[id(buffer)]


def _as_recorded(tensor: Tensor, view: BufferView) -> torch.UntypedStorage:
    """The memory of a result, copied if its strides or offset differ from those of the view."""
    tensor = tensor.resolve_conj().resolve_neg()
    laid_out = tensor.stride() == view.strides and tensor.storage_offset() == view.offset
    if laid_out and tensor.untyped_storage().nbytes() >= view.buffer.nbytes:
        return tensor.untyped_storage()
    storage = _new_memory(view.buffer.nbytes, view.buffer.device)
    tensor_over(storage, view).copy_(tensor)
    return storage


def _new_memory(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _own(tensor: Tensor) -> Tensor:
    """The tensor in memory that no other elements share: itself, or a copy."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize:
        return tensor
    return tensor.clone()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    now = torch.get_default_dtype()
    if dtype != now:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        if dtype != now:
            torch.set_default_dtype(now)
