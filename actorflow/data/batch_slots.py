"""Memory that a rank shares with its workers: each slot takes the tensors of one batch, and is used again.

torch makes a file for every tensor that leaves a worker, whose pages the system clears and maps in both processes: a
tenth of what a worker needs to decode images.  Pages of a slot are cleared and mapped once.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Room", "BatchSlots", "is_plain"]

_ALIGN = 64  # bytes; where tensors begin
_HELD = 8  # slots beside those that are being read: of batches that calls or the script hold
_LEAST = 1 << 14  # bytes; a smaller batch goes through a pipe
_keys = itertools.count()


class BatchSlots:
    """Slots of one size, made before the workers, who take them over.

    A slot is taken when a worker is told to read into it, and free again when the last tensor in it is freed in this
    process.  Their memory is the system's once it is written to, and belongs to no file.
    """

    def __init__(self, count: int, size: int) -> None:
        """``size`` bytes each, a multiple of the size of a page; raises OSError where there is no such memory."""
        self.key, self.size = next(_keys), size
        self._file = os.memfd_create("actorflow-batches", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, count * size)
            self._memory = mmap.mmap(self._file, count * size)
        except (OSError, ValueError, OverflowError) as error:
            self.taken_over()
            raise OSError(str(error)) from error
        self._free = list(range(count))
        _here[self.key] = self

    @staticmethod
    def of(tensors: Sequence[int], ahead: int) -> BatchSlots | None:
        """For batches with tensors of so many bytes, ``ahead`` of which are read at a time; None: there can be none."""
        size = sum(-(-one // _ALIGN) * _ALIGN for one in tensors)
        if size < _LEAST or not hasattr(os, "memfd_create"):
            return None
        with suppress(OSError):
            return BatchSlots(ahead + _HELD, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        return None

    def taken_over(self) -> None:
        """All workers are there."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def take(self) -> int | None:
        """The number of a free slot, which is taken now: the one that was freed last.  None: there is none."""
        with suppress(IndexError):
            return self._free.pop()
        return None

    def room(self, number: int) -> Room:
        """In a worker: a slot to write to."""
        return Room(self, self._memory, number * self.size, (number + 1) * self.size, number)

    def tensor(self, lease: _Lease, place: _Place) -> Tensor:
        """A tensor in a slot, which is taken for as long as it lives."""
        start = lease.number * self.size + place.start
        part = _Part((place.size,), np.uint8, self._memory, start)
        part.lease = lease
        return torch.frombuffer(part, dtype=place.dtype).as_strided(place.shape, place.stride)

    def give_back(self, number: int) -> None:
        """A slot is free."""
        self._free.append(number)

    def __reduce__(self) -> Any:
        """For a worker that is not forked."""
        return _opened, (self.key, self.size, DupFd(self._file), len(self._memory))

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.taken_over()


_here: weakref.WeakValueDictionary[int, BatchSlots] = weakref.WeakValueDictionary()


def _opened(key: int, size: int, file: Any, whole: int) -> BatchSlots:
    slots = object.__new__(BatchSlots)
    slots.key, slots.size, slots._free, slots._file = key, size, [], file.detach()
    slots._memory = mmap.mmap(slots._file, whole)
    slots.taken_over()
    return slots


class _Lease:
    """Keeps a slot from being used again."""

    def __init__(self, slots: BatchSlots, number: int) -> None:
        self.slots, self.number = slots, number

    def __del__(self) -> None:
        self.slots.give_back(self.number)


class _Part(np.ndarray[Any, Any]):
    """The bytes of a tensor in a slot."""

    lease: _Lease


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is in its slot."""

    start: int  # bytes
    size: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Room:
    """A slot in a worker: tensors are put one behind the other."""

    def __init__(self, slots: BatchSlots, memory: mmap.mmap, start: int, end: int, number: int) -> None:
        self._slots, self._memory, self._start, self._end, self._number = slots, memory, start, end, number
        self._next = start
        self._tensors: dict[int, tuple[int, Tensor]] = {}  # address → where it begins, and the tensor there

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A contiguous tensor to write to; None where there is no room for it."""
        count = int(np.prod(shape, dtype=object))
        start, size = self._next, count * dtype.itemsize
        if not size or start + size > self._end:
            return None
        made = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(tuple(shape))
        self._next = -(-(start + size) // _ALIGN) * _ALIGN
        self._tensors[made.data_ptr()] = start, made
        return made

    def sent(self, found: Any) -> Any:
        """What to send, so that ``found`` arrives, and the slot is free again once the tensors in it are.

        Of a list, what ``put`` has returned arrives as tensors.
        """
        return _Sent(self._slots.key, self._number, found)

    def put(self, value: Any) -> Any:
        """What ``sent`` takes for a tensor, which is copied unless it is here; without room, and for others, itself."""
        if not is_plain(value):
            return value
        start, there = self._tensors.get(value.data_ptr(), (0, None))
        if there is None or (there.dtype, there.shape, there.stride()) != (value.dtype, value.shape, value.stride()):
            room = self.empty((value.numel(),), value.dtype)
            if room is None:
                return value
            start = self._tensors[room.data_ptr()][0]
            dense = value.is_contiguous()
            stride = value.stride() if dense else torch.empty_like(value, device="meta").stride()
            value = room.as_strided(value.shape, stride).copy_(value)
        size = value.numel() * value.element_size()
        return _Place(start - self._start, size, value.dtype, tuple(value.shape), value.stride())


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor that its bytes, dtype, shape and strides describe."""
    if type(value) is not Tensor or not value.numel() or value.layout is not torch.strided:
        return False
    return value.device.type == "cpu" and not (
        value.is_quantized or value.requires_grad or value.is_conj() or value.is_neg()
    )


class _Sent:
    """What a worker has read into a slot, on its way."""

    def __init__(self, key: int, number: int, found: Any) -> None:
        self._said = key, number, found

    def __reduce__(self) -> Any:
        return _arrived, self._said


def _arrived(key: int, number: int, found: Any) -> Any:
    slots = _here[key]
    lease = _Lease(slots, number)
    if type(found) is not list:
        return found
    return [slots.tensor(lease, one) if isinstance(one, _Place) else one for one in found]
