"""Read tensors of safetensors files: of each no more than the blocks in which the wanted elements lie."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from actorflow import deferred
from actorflow.deferred.tape import Indices
from actorflow.persistence.container import BLOCK, dtype_named
from actorflow.persistence.manifest import FileRecord, StoredPiece, TensorRecord
from actorflow.persistence.storage import RangeReader, ReadableFolder
from actorflow_compiler.core.errors import StateError

__all__ = ["StoredFile", "StoredState", "StoredTensorValues"]

SPAN = 16 * BLOCK  # bytes that are read at a time
SMALL = 1024  # elements; tensors up to this size are read at once, so that optimizers can look at their step counts


class StoredFile:
    """A file of a checkpoint; it is opened when something of it is first read."""

    def __init__(self, folder: ReadableFolder, record: FileRecord) -> None:
        self._folder, self._record = folder, record
        self._block: tuple[int, Tensor] | None = None  # the last single block that was read, and where it begins

    @property
    def path(self) -> str:
        """Its path."""
        return f"{self._folder.path}/{self._record.name}"

    @cached_property
    def _reader(self) -> RangeReader:
        try:
            reader = self._folder.open(self._record.name)
        except FileNotFoundError:
            raise StateError(f"{self.path} is missing; the manifest of its checkpoint names it") from None
        except OSError as error:
            raise StateError(f"{self.path} cannot be read: {error}") from error
        if reader.size != self._record.size:
            raise StateError(
                f"{self.path} is damaged: it has {reader.size} bytes, and {self._record.size} were written"
            )
        return reader

    def open(self) -> None:
        """Open it now, so that it can be read when its name is gone, where the storage can.  Raises StateError."""
        _ = self._reader

    def read(self, start: int, stop: int) -> Tensor:
        """Some bytes of the file, as a uint8 tensor; the blocks in which they lie are checked.  Raises StateError."""
        checksums = self._record.checksums
        lo, hi = (
            (start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, self._record.size)) if checksums else (start, stop)
        )
        if self._block is not None and self._block[0] == lo and hi <= lo + BLOCK:
            return self._block[1][start - lo : stop - lo]
        try:
            data = self._reader.read(lo, hi)
        except OSError as error:
            raise StateError(f"{self.path} cannot be read: {error}") from error
        if checksums:
            view = memoryview(data)
            for at in range(lo, hi, BLOCK):
                if zlib.crc32(view[at - lo : at - lo + BLOCK]) != checksums[at // BLOCK]:
                    raise StateError(
                        f"{self.path} is damaged: bytes {at} to {min(at + BLOCK, hi)} are not those that were written "
                        f"(their checksum differs)"
                    )
        found = torch.frombuffer(data, dtype=torch.uint8)
        if checksums and hi <= lo + BLOCK:  # small tensors lie side by side
            self._block = lo, found
        return found[start - lo : stop - lo]

    def forget(self) -> None:
        """Let go of the block that was read last."""
        self._block = None

    def verify(self) -> None:
        """Read the whole file and check it.  Raises StateError."""
        for start in range(0, self._record.size, SPAN):
            self.read(start, min(start + SPAN, self._record.size))


class StoredTensorValues:
    """The values of a tensor in files (see ``deferred.tape.StoredValues``)."""

    def __init__(self, name: str, record: TensorRecord, files: Sequence[StoredFile], source: str) -> None:
        self._name, self._record, self._files, self._source = name, record, files, source
        self.dtype = dtype_named(record.dtype)
        self.shape = record.shape

    @property
    def digest(self) -> str:
        """A text that is equal on all ranks that read the same values."""
        return f"{self._name} of {self._source}"

    def read(self, indices: Indices) -> Tensor:
        """A new contiguous tensor of the elements whose index is in ``indices`` in each dim.  Raises StateError."""
        out = torch.empty([len(lines) for lines in indices], dtype=self.dtype)
        for piece in self._record.pieces:
            where, within = [], []
            for lines, start, size in zip(indices, piece.offsets, piece.shape, strict=True):
                here = np.flatnonzero((lines >= start) & (lines < start + size))
                where.append(here)
                within.append(lines[here] - start)
            if all(len(lines) for lines in where):
                self._fill(out, piece, where, within)
        return out

    def whole(self) -> Tensor:
        """The whole tensor, in new memory."""
        return self.read([*map(np.arange, self.shape)])

    def _fill(self, out: Tensor, piece: StoredPiece, where: Indices, within: Indices) -> None:
        """Copy the elements ``within`` a piece to where they lie in ``out``."""
        if all(_is_run(lines) for lines in where):  # nearly always: straight into its place
            target = out[tuple(slice(int(lines[0]), int(lines[-1]) + 1) for lines in where)]
            self._copy(piece.file, piece.begin, piece.shape, within, target)
            return
        found = torch.empty([len(lines) for lines in where], dtype=self.dtype)
        self._copy(piece.file, piece.begin, piece.shape, within, found)
        out[tuple(torch.from_numpy(lines).view([-1] + [1] * (len(where) - 1 - d)) for d, lines in enumerate(where))] = (
            found
        )

    def _copy(self, file: int, begin: int, shape: Sequence[int], indices: Indices, out: Tensor) -> None:
        """Copy elements of a stored rectangle, a stretch of rows at a time."""
        if not shape:
            out.copy_(self._elements(file, begin, ()))
            return
        rows, row = indices[0], math.prod(shape[1:]) * self.dtype.itemsize
        if row > SPAN:
            for at, line in enumerate(rows.tolist()):
                self._copy(file, begin + line * row, shape[1:], indices[1:], out[at])
            return
        ends = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for start, end in itertools.pairwise(ends):
            for lo in range(start, end, most := max(1, SPAN // row)):
                hi = min(lo + most, end)
                data = self._elements(file, begin + int(rows[lo]) * row, (hi - lo, *shape[1:]))
                for dim, lines in enumerate(indices[1:], 1):
                    if len(lines) != data.shape[dim]:
                        data = (
                            data.narrow(dim, int(lines[0]), len(lines))
                            if _is_run(lines)
                            else data.index_select(dim, torch.from_numpy(lines))
                        )
                out[lo:hi].copy_(data)

    def _elements(self, file: int, begin: int, shape: Sequence[int]) -> Tensor:
        data = self._files[file].read(begin, begin + math.prod(shape) * self.dtype.itemsize)
        if data.data_ptr() % self.dtype.itemsize or data.storage_offset() % self.dtype.itemsize:
            data = (
                data.clone()
            )  # a file of another writer, whose tensors need not lie at multiples of their items' size
        return data.view(self.dtype).view(tuple(shape))


class StoredState:
    """Named tensors in safetensors files; ``source`` is a text that is equal where all of them are."""

    def __init__(self, tensors: dict[str, TensorRecord], files: Sequence[StoredFile], source: str) -> None:
        self.records = tensors
        self.files = files
        self._source = source

    def values(self, name: str) -> StoredTensorValues:
        """The values of a tensor."""
        return StoredTensorValues(name, self.records[name], self.files, self._source)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is read when it is needed; a small one is read now.  Raises StateError."""
        values = self.values(name)
        return values.whole() if math.prod(values.shape) <= SMALL else deferred.stored(values)


def _is_run(lines: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    return bool(lines[-1] - lines[0] == len(lines) - 1)
