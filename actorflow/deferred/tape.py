"""The tape of recorded ops: which ops make the contents of a deferred tensor, and a digest of them.

Memory is represented by a buffer, and a tensor by a view of a buffer.  An op is kept only if it makes or changes a
buffer.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.deferred.random_streams import StreamPosition
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.tensor_bytes import contents
from actorflow_compiler.core.torch_internals import OpOverload, schema_of

__all__ = [
    "Buffer",
    "BufferView",
    "ConstantTensor",
    "Indices",
    "RecordedOp",
    "StoredTensor",
    "StoredValues",
    "digest",
    "needed_ops",
]

Indices = Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]]  # for each dim, the indices of the wanted elements

MOST_COPIED = 1 << 16  # bytes; smaller tensors of the script are copied, so that it may change its own
NUMBERS = itertools.count()  # of ops: their order


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory that is not allocated yet."""

    device: torch.device
    nbytes: int
    ops: list[RecordedOp] = field(default_factory=list)  # that make or change it, in order

    def history(self, before: float) -> list[RecordedOp]:
        """The ops on which its contents before op number ``before`` depend directly, in order."""
        found: list[RecordedOp] = []
        for op in reversed(self.ops):
            if op.number < before:
                found.append(op)
                if op.overwrites:
                    break
        return found[::-1]


@dataclass(frozen=True, slots=True)
class BufferView:
    """A tensor over a buffer; strides and offset in elements."""

    buffer: Buffer
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, buffer: Buffer, tensor: Tensor) -> BufferView:
        """The view of ``buffer`` that has the shape, strides and offset of ``tensor`` (on the meta device)."""
        return cls(buffer, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether the elements are contiguous and in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def covers(self) -> bool:
        """Whether the view is the whole buffer."""
        return self.is_dense and not self.offset and self.numel * self.dtype.itemsize == self.buffer.nbytes


@dataclass(frozen=True, slots=True)
class ConstantTensor:
    """A real tensor that an op reads."""

    tensor: Tensor
    version: int | None  # None: a copy that the script cannot change

    @classmethod
    def of(cls, tensor: Tensor) -> ConstantTensor:
        """Keep a tensor of the script as an input; a small one is copied, so that the script may change its own."""
        if tensor.numel() * tensor.itemsize <= MOST_COPIED:
            return cls(tensor.detach().clone(), None)
        return cls(tensor, tensor._version)  # not detached, because a detached tensor counts its versions separately

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    @property
    def is_dense(self) -> bool:
        """Whether the elements are contiguous and in row-major order."""
        return self.tensor.is_contiguous()

    @property
    def digest(self) -> str:
        """A text that is equal on all ranks whose tensors are equal."""
        tensor = self.get()
        return f"{tensor.dtype}{tuple(tensor.shape)} {zlib.crc32(contents(tensor))}"

    def elements(self, first: int, count: int) -> Tensor:
        """Elements of a dense one, in row-major order."""
        return self.get().view(-1)[first : first + count]

    def get(self) -> Tensor:
        """The tensor; raises StateError if the script has changed it since."""
        if self.version is not None and self.tensor._version != self.version:
            raise StateError(
                f"a tensor {self.tensor.dtype}{list(self.tensor.shape)} was copied into a deferred one and changed "
                f"afterwards, before the first call of a job; expected: it stays as it is until then; copy from a "
                f"clone of it, or call flow.materialize(model) before the change"
            )
        return self.tensor


class StoredValues(Protocol):
    """The values of a tensor that lie in a file."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which they are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    @property
    def digest(self) -> str:
        """A text that is equal on all ranks that read the same values."""

    def read(self, indices: Indices) -> Tensor:
        """A new contiguous tensor of the elements whose index is in ``indices`` in each dim."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file that an op reads; no more of it is read than an op needs."""

    values: StoredValues

    @property
    def dtype(self) -> torch.dtype:
        """See ``ConstantTensor``."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``ConstantTensor``."""
        return self.values.shape

    @property
    def is_dense(self) -> bool:
        """See ``ConstantTensor``."""
        return True

    @property
    def digest(self) -> str:
        """See ``ConstantTensor``."""
        return self.values.digest

    def elements(self, first: int, count: int) -> Tensor:
        """See ``ConstantTensor``."""
        found = [self.values.read([np.array(r) for r in some]) for some in _rectangles(self.shape, first, count)]
        return torch.cat([tensor.view(-1) for tensor in found])

    def get(self) -> Tensor:
        """The whole tensor, in new memory."""
        return self.values.read([*map(np.arange, self.shape)])


def _rectangles(shape: Sequence[int], first: int, count: int) -> Iterator[tuple[range, ...]]:
    """The rectangles that make up a run of elements in row-major order."""
    if not count:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    at, skipped = divmod(first, row)
    if skipped or count < row:  # within one row, or to its end
        taken = min(count, row - skipped)
        yield from ((range(at, at + 1), *rest) for rest in _rectangles(shape[1:], skipped, taken))
    else:
        rows = count // row
        taken = rows * row
        yield (range(at, at + rows), *map(range, shape[1:]))
    yield from _rectangles(shape, first + taken, count - taken)


@dataclass(eq=False, slots=True)
class RecordedOp:
    """One call of an operator; views and constants replace the tensors among its arguments."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[BufferView, ...]
    writes: tuple[BufferView, ...]
    makes: tuple[BufferView | None, ...]  # one for each output; None if the output has no new memory
    default: torch.dtype  # torch's default dtype while the op was recorded
    draws: StreamPosition | None  # where in the stream it starts to draw random numbers
    words: int | None  # how many it draws, if that is known without running it
    overwrites: bool  # whether it overwrites the whole of the one buffer that it writes, without reading it
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def name(self) -> str:
        """The op's name without namespace and overload, such as ``mul_``."""
        return str(schema_of(self.func).name).rpartition("::")[2]

    def argument(self, index: int, name: str, default: Any) -> Any:
        """An argument that may have been passed by position, by name or not at all."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def keep(self) -> None:
        """Append the op to the buffers that it makes or changes."""
        for buffer in {id(v.buffer): v.buffer for v in (*self.writes, *self.makes) if v is not None}.values():
            buffer.ops.append(self)


def needed_ops(*targets: BufferView | RecordedOp) -> list[RecordedOp]:
    """All ops that make the contents of the target views, and the inputs of the target ops, in order.

    A target op itself is not among them.
    """
    found: dict[int, RecordedOp] = {}
    visited: set[tuple[int, float]] = set()  # (id of a buffer, number of the op before which its history was added)
    pending: list[tuple[Buffer, float]] = []

    def want(op: RecordedOp) -> None:
        pending.extend((view.buffer, op.number) for view in (op.reads if op.overwrites else op.reads + op.writes))

    for target in targets:
        if isinstance(target, RecordedOp):
            want(target)
        else:
            pending.append((target.buffer, math.inf))
    while pending:
        buffer, before = pending.pop()
        if (id(buffer), before) in visited:
            continue
        visited.add((id(buffer), before))
        for op in buffer.history(before):
            if op.number not in found:
                found[op.number] = op
                want(op)
    return [found[number] for number in sorted(found)]


def digest(view: BufferView) -> int:
    """A hash that is equal on all ranks for views whose contents come from the same ops and random numbers."""
    numbers: dict[int, int] = {}  # id of a buffer → its number here

    def spoken(leaf: Any) -> str:
        if isinstance(leaf, BufferView):
            number = numbers.setdefault(id(leaf.buffer), len(numbers))
            return f"{number}: {leaf.dtype}{leaf.shape}{leaf.strides}{leaf.offset}"
        if isinstance(leaf, ConstantTensor | StoredTensor):
            return leaf.digest
        return leaf.type if isinstance(leaf, torch.device) else repr(leaf)

    def line(leaves: Sequence[Any]) -> bytes:
        return "; ".join(map(spoken, leaves)).encode() + b"\n"

    found = hashlib.sha256()
    for op in needed_ops(view):
        found.update(f"{op.func} {op.default} {op.draws.digest if op.draws else ''} ".encode())
        found.update(line(pytree.tree_leaves((op.args, op.kwargs, [m for m in op.makes if m is not None]))))
    found.update(line([view]))
    return int.from_bytes(found.digest()[:6], "big")
