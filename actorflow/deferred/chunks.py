"""Make a chunk of a dense deferred tensor's elements without the other elements.

This works for tensors that are made of fills, random numbers, copies, and ops that compute each element from the
elements at the same position with the same result wherever the chunk begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.deferred.random_streams import Sampler, StreamReader, draw
from actorflow.deferred.tape import BufferView, ConstantTensor, RecordedOp, StoredTensor, StoredValues

__all__ = ["DRAWN", "ChunkMaker", "can_chunk", "chunkwise_reduction", "stored_behind"]

# Ops whose result for an element does not depend on the element's position: vectorised exponentials, for
# instance, may differ at the ends of a chunk.
EXACT = {
    "abs", "add", "bitwise_and", "bitwise_or", "clamp", "clamp_max", "clamp_min", "div", "erfinv", "ge", "gt", "le",
    "logical_not", "lt", "mul", "neg", "relu", "sqrt", "sub", "where",
}  # fmt: skip
COPIES = {"_to_copy", "clone"}
IN_PLACE = {"copy_", "fill_", "zero_", *(f"{name}_" for name in EXACT)}
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FILLED: dict[str, Callable[[RecordedOp], Any]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda op: 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda op: 1),
    **dict.fromkeys(("full", "full_like"), lambda op: op.argument(1, "fill_value", 0)),
    "new_full": lambda op: op.argument(2, "fill_value", 0),
}
DRAWN = {
    "normal_": Sampler.NORMAL,
    "randn": Sampler.NORMAL,
    "uniform_": Sampler.UNIFORM,
    "rand": Sampler.UNIFORM,
}
DENSE = (None, torch.preserve_format, torch.contiguous_format)
REDUCED = {"any", "all", "max", "min"}  # ops whose result for the whole is the op applied to its results for all chunks


def can_chunk(view: BufferView) -> bool:
    """Whether chunks of a view can be made one by one."""
    return view.is_dense and _can_chunk(view, math.inf)


def chunkwise_reduction(view: BufferView) -> RecordedOp | None:
    """The op that makes a view, if it reduces a tensor that can be made in chunks; otherwise None."""
    op = view.buffer.ops[-1]
    source = op.args[0] if op.name in REDUCED and len(op.args) == 1 and len(view.buffer.ops) == 1 else None
    return op if isinstance(source, BufferView) and source.is_dense and _can_chunk(source, op.number) else None


def stored_behind(view: BufferView, before: float = math.inf) -> StoredValues | None:
    """The values in a file of which a view, before op number ``before``, is a copy; None if it is made otherwise."""
    history = view.buffer.history(before)
    if len(history) != 1 or not view.covers or history[0].name not in COPIES | {"copy_"}:
        return None
    op = history[0]
    source, target = op.args[1] if op.writes else op.args[0], _target(op)
    if not isinstance(source, BufferView | StoredTensor):
        return None
    if not ((source.shape, source.dtype) == (view.shape, view.dtype) == (target.shape, target.dtype)):
        return None
    return source.values if isinstance(source, StoredTensor) else stored_behind(source, op.number)


class ChunkMaker:
    """Makes chunks of views; ``reader`` keeps generators from one chunk to the next."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._made: dict[tuple[int, int, int, int], Tensor] = {}  # inputs of ops for this chunk, often read again

    def make(self, view: BufferView, first: int, out: Tensor, before: float = math.inf) -> Tensor:
        """Fill ``out`` (1-D) with a view's elements from ``first`` on, as they are before op number ``before``."""
        self._fill(view, first, out, before)
        self._made.clear()
        return out

    def _fill(self, view: BufferView, first: int, out: Tensor, before: float) -> None:
        lo = view.offset + first
        for op in view.buffer.history(before):
            target = _target(op)
            start, end = max(lo, target.offset), min(lo + out.numel(), target.offset + target.numel)
            if start < end:
                self._apply(op, start - target.offset, out[start - lo : end - lo])

    def _apply(self, op: RecordedOp, first: int, out: Tensor) -> None:
        """Apply an op to ``out``, which holds the elements of the op's target from index ``first`` on."""
        name = op.name
        if name in FILLED:
            out.fill_(FILLED[name](op))
        elif name in DRAWN:
            a, b = 0.0, 1.0
            if name == "normal_":
                a, b = op.argument(1, "mean", a), op.argument(2, "std", b)
            elif name == "uniform_":
                a, b = op.argument(1, "from", a), op.argument(2, "to", b)
            assert op.draws is not None
            draw(self._reader, DRAWN[name], op.draws, _target(op).numel, first, out, a, b)
        elif name not in EMPTY:
            given = (op.args[1:] if op.writes else op.args, op.kwargs)
            args, kwargs = pytree.tree_map(lambda leaf: self._piece(op, leaf, first, out.numel()), given)
            if op.writes:
                op.func(out, *args, **kwargs)
            else:
                out.copy_(op.func(*args, **kwargs))

    def _piece(self, op: RecordedOp, leaf: Any, first: int, count: int) -> Any:
        """An argument of an op; if it is a tensor, only the chunk of it from index ``first`` on."""
        if isinstance(leaf, ConstantTensor | StoredTensor):
            return leaf.elements(first, count)
        if not isinstance(leaf, BufferView):
            return leaf
        history = leaf.buffer.history(op.number)
        key = (id(leaf.buffer), history[-1].number, leaf.offset + first, count)
        if key not in self._made:
            piece = torch.empty(count, dtype=leaf.dtype, device=leaf.buffer.device)
            self._fill(leaf, first, piece, op.number)
            self._made[key] = piece
        return self._made[key]


def _target(op: RecordedOp) -> BufferView:
    """The view that an op writes or makes."""
    found = op.writes[0] if op.writes else op.makes[0]
    assert found is not None
    return found


def _can_chunk(view: BufferView, before: float) -> bool:
    visited: set[tuple[int, float]] = set()
    pending: list[tuple[BufferView, float]] = [(view, before)]
    while pending:
        view, before = pending.pop()
        if (id(view.buffer), before) in visited:
            continue
        visited.add((id(view.buffer), before))
        for op in view.buffer.history(before):
            if not _fits(op, view.dtype):
                return False
            pending.extend((read, op.number) for read in op.reads)
    return True


def _fits(op: RecordedOp, dtype: torch.dtype) -> bool:
    """Whether an op has one dense target of this dtype and computes each element from those at the same position."""
    if len(op.writes) + sum(made is not None for made in op.makes) != 1:
        return False
    target, name = _target(op), op.name
    if target.dtype != dtype or not target.is_dense:
        return False
    if name in FILLED or name in EMPTY:
        return True
    if name in DRAWN:
        return op.words is not None
    if name not in EXACT | COPIES | IN_PLACE or op.kwargs.get("memory_format") not in DENSE:
        return False
    if op.kwargs.get("alpha", 1) != 1:  # whether the scaling is fused with the addition depends on the C++ compiler
        return False
    sources = pytree.tree_leaves((op.args[1:] if op.writes else op.args, op.kwargs))
    tensors = [leaf for leaf in sources if isinstance(leaf, BufferView | ConstantTensor | StoredTensor)]
    if not all(tensor.shape == target.shape and tensor.is_dense for tensor in tensors):
        return False
    dtypes = {tensor.dtype for tensor in tensors}
    # for integers and Python scalars the dtype of the result depends on torch's default dtype
    return name not in EXACT or dtype == torch.bool or (dtype in dtypes and dtypes <= {dtype, torch.bool})
