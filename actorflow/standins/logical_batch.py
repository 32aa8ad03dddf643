"""Stand-ins for batches of a data source: their shape is known, and each rank reads the rows that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.standins.lazy_tensor import METADATA
from actorflow_compiler.core.monkey_patches import original
from actorflow_compiler.core.runs import Runs, position
from actorflow_compiler.core.torch_internals import only_dispatch
from actorflow_compiler.core.user_code import UserLines

__all__ = ["ArrivingInput", "BatchTensor", "LogicalBatch", "RowsRead"]

HOST = torch.device("cpu")
_no_override = only_dispatch
_CONVERSIONS = {  # of every element by itself: a stand-in stays one
    Tensor.to, Tensor.type, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
    Tensor.long, Tensor.int, Tensor.short, Tensor.char, Tensor.byte, Tensor.bool, Tensor.contiguous, Tensor.detach,
    Tensor.pin_memory,
}  # fmt: skip
_lines = UserLines()


class RowsRead(Protocol):
    """Rows of a batch that are being read."""

    @property
    def source(self) -> str:
        """The data source, for messages: the loader of train.py:31."""

    @property
    def text(self) -> str:
        """Which rows of it these are: rows 32-63 of epoch 0."""

    def ready(self) -> bool:
        """Whether they are here, or cannot be read."""

    def then(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once, on any thread, when they are ready."""

    def leaf(self, index: int) -> Tensor:
        """The rows of one tensor of the batch, in order.  Waits for them; raises the error of the reading."""


class LogicalBatch(Protocol):
    """A batch of a data source, of which any rows can be read."""

    @property
    def text(self) -> str:
        """Which rows of the source it is, for messages; equal on all ranks that have the same batch."""

    @property
    def size(self) -> int:
        """The number of its rows."""

    def read(self, rows: Runs) -> RowsRead:
        """Begin to read some of its rows."""

    def look(self, leaf: int, line: str) -> Tensor:
        """The whole of one of its tensors, because ``line`` of the script looks at it."""


class BatchTensor(Tensor):
    """A tensor of a batch: a job reads the rows of it that its rank needs.

    Shape, dtype and device are known.  Conversions to another dtype or device are done to the rows that are read.
    Anything else that the script does with it reads the whole batch, on this rank.
    """

    batch: LogicalBatch
    leaf: int  # which tensor of the batch it is
    casts: tuple[torch.dtype, ...]  # to which its elements are converted, in order
    value: Tensor | None = None  # the whole of it, once the script has looked at it

    @staticmethod
    def of(
        batch: LogicalBatch,
        leaf: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device = HOST,
        casts: tuple[torch.dtype, ...] = (),
    ) -> BatchTensor:
        """The stand-in for tensor number ``leaf`` of a batch, of shape [rows, ...]."""
        made: BatchTensor = Tensor._make_wrapper_subclass(BatchTensor, tuple(shape), dtype=dtype, device=device)
        made.batch, made.leaf, made.casts = batch, leaf, casts
        return made

    def whole(self) -> Tensor:
        """Its value, which is read now unless the script has looked at it before."""
        if self.value is None:
            found = self.batch.look(self.leaf, _lines.here())
            self.value = converted(found, self.casts).to(self.device)
            if self.value is found:
                self.value = found.clone()  # the script may change it
        return self.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = original(func), kwargs or {}
        if func in METADATA:
            with _no_override():
                return func(*args, **kwargs)
        if func in _CONVERSIONS and isinstance(args[0], BatchTensor) and args[0].value is None:
            return args[0]._converted(func, args[1:], kwargs)
        args, kwargs = _whole((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = _whole((args, kwargs or {}))
        return func(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """For NumPy: an array that shares the value's memory unless the dtype differs or a copy is requested."""
        array = self.whole().numpy()
        return array.astype(dtype, copy=bool(copy)) if dtype is not None or copy else array

    def _converted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a conversion, as torch has it for a tensor of this dtype and on this device."""
        alike = func(torch.empty(0, dtype=self.dtype, device=self.device), *args, **kwargs)
        if not isinstance(alike, Tensor):  # ``x.type()`` is a text
            return alike
        if (alike.dtype, alike.device) == (self.dtype, self.device):
            return self
        casts = self.casts if alike.dtype == self.dtype else (*self.casts, alike.dtype)
        return BatchTensor.of(self.batch, self.leaf, self.shape, alike.dtype, alike.device, casts)


@dataclass(frozen=True, slots=True)
class ArrivingInput:
    """An argument of a call of which only some rows are read, and may be on their way."""

    read: RowsRead
    leaf: int
    casts: tuple[torch.dtype, ...]
    read_rows: Runs  # those that ``read`` reads
    rows: Runs  # those that the argument is wanted for: some of them

    def value(self) -> Tensor:
        """The wanted rows, in order.  Waits for them; raises the error of the reading."""
        found = self.read.leaf(self.leaf)
        if self.rows != self.read_rows:
            places = [(position(self.read_rows, lo), hi - lo) for lo, hi in self.rows]  # each lies in one run
            found = torch.cat([found[at : at + count] for at, count in places])
        return converted(found, self.casts)


def converted(value: Tensor, casts: Sequence[torch.dtype]) -> Tensor:
    """A tensor converted to one dtype after the other."""
    for dtype in casts:
        value = value.to(dtype)
    return value


def _whole(tree: Any) -> Any:
    return pytree.tree_map_only(BatchTensor, BatchTensor.whole, tree)
