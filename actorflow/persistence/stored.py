"""Read tensors of safetensors files: of each no more than the blocks in which the wanted elements lie."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
import zlib
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from actorflow import deferred
from actorflow.deferred.tape import Indices
from actorflow.persistence.container import BLOCK, BUFFER, dtype_of_name
from actorflow.persistence.manifest import FileRecord, StoredPiece, TensorRecord
from actorflow.persistence.storage import RangeReader, ReadableFolder
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.tensor_bytes import memory_of

__all__ = ["KEPT_OPEN", "StoredFile", "StoredState", "StoredTensorValues", "is_unread"]

SPAN = 16 * BLOCK  # bytes that are read at a time
KEPT_OPEN = 128  # files; a process may usually have 1,024 open
SMALL = 1024  # elements; tensors up to this size are read at once, so that optimizers can look at their step counts


class _Unread:
    """What a deferred tensor, or whoever else will read files later, holds until it is done."""

    def __init__(self, files: Sequence[StoredFile]) -> None:
        self.files = files


class StoredFile:
    """A file of a checkpoint; it is opened when something of it is first read.

    So many files stay open (``KEPT_OPEN``), those of all checkpoints together.  Others are opened again when they are
    read again; they must be there then.
    """

    def __init__(self, folder: ReadableFolder, record: FileRecord) -> None:
        self._folder, self._record = folder, record
        self._block: tuple[int, Tensor] | None = None  # the last single block that was read, and where it begins
        self._reader: RangeReader | None = None  # while it is open
        self._trusted: Hashable = None  # the version of the file whose blocks have been checked; None: they have not

    @property
    def path(self) -> str:
        """Its path."""
        return f"{self._folder.path}/{self._record.name}"

    @property
    def blocks(self) -> int:
        """The number of its blocks, of which each has a checksum."""
        return len(self._record.checksums)

    @property
    def survives(self) -> bool:
        """Whether it can be read when its name is gone."""
        return self._reader is not None and self._reader.survives

    def open(self, checked: bool = False) -> None:
        """Open it now, so that it can be read when its name is gone, where the storage can.  Raises StateError.

        ``checked``: its blocks have been, by this rank or another, and are not checked again while it is not changed.
        """
        reader = self._opened()
        if checked:
            self._trusted = reader.version

    def read(self, start: int, stop: int) -> Tensor:
        """Some bytes of the file, as a uint8 tensor; the blocks in which they lie are checked.  Raises StateError."""
        lo, hi = start, stop
        if self._record.checksums:
            lo, hi = start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, self._record.size)
        if self._block is not None and self._block[0] == lo and hi <= lo + BLOCK:
            return self._block[1][start - lo : stop - lo]
        reader = self._opened()
        found = torch.empty(hi - lo, dtype=torch.uint8)
        view = memory_of(found)
        self._fill(reader, lo, view)
        if not self._is_trusted(reader):
            self._check(lo, view)
        if self._record.checksums and hi <= lo + BLOCK:  # small tensors lie side by side
            self._block = lo, found
        return found[start - lo : stop - lo]

    def read_into(self, start: int, out: Tensor) -> bool:
        """Read bytes from ``start`` on into a contiguous tensor, as many as it has, if that can be done at once.

        It cannot where blocks have to be checked, and a few bytes are better read with those beside them.  Raises
        StateError.
        """
        nbytes = out.numel() * out.element_size()
        if nbytes < BLOCK:
            return False
        reader = self._opened()
        if self._record.checksums and not self._is_trusted(reader):
            return False
        self._fill(reader, start, memory_of(out))
        return True

    def forget(self) -> None:
        """Let go of the block that was read last."""
        self._block = None

    def close(self) -> None:
        """Close it; it is opened again when it is read again."""
        self._reader = None

    def verify(self, first: int = 0, last: int | None = None) -> None:
        """Read blocks number ``first`` to ``last`` (exclusive) of the file and check them.  Raises StateError."""
        buffer = torch.empty(BUFFER, dtype=torch.uint8)
        reader = self._opened()
        end = self._record.size if last is None else min(last * BLOCK, self._record.size)
        for start in range(first * BLOCK, end, BUFFER):
            view = memory_of(buffer)[: min(BUFFER, end - start)]
            self._fill(reader, start, view)
            self._check(start, view)

    def _opened(self) -> RangeReader:
        reader = self._reader
        if reader is None:
            reader = self._reader = self._open()
            if reader.reopens:
                _keep_open(self)
        return reader

    def _open(self) -> RangeReader:
        try:
            reader = self._folder.open(self._record.name)
        except FileNotFoundError:
            raise StateError(
                f"{self.path} is missing; the manifest of its checkpoint names it, and a checkpoint that is loaded has "
                f"to stay until all that is needed of it has been read"
            ) from None
        except OSError as error:
            raise StateError(f"{self.path} cannot be read: {error}") from error
        if reader.size != self._record.size:
            raise StateError(
                f"{self.path} is damaged: it has {reader.size} bytes, and {self._record.size} were written"
            )
        return reader

    def _fill(self, reader: RangeReader, start: int, out: memoryview) -> None:
        try:
            reader.read_into(start, out)
        except OSError as error:
            raise StateError(f"{self.path} cannot be read: {error}") from error

    def _is_trusted(self, reader: RangeReader) -> bool:
        return self._trusted is not None and reader.version == self._trusted

    def _check(self, start: int, data: memoryview) -> None:
        """Check whole blocks, of which the first begins at ``start``.  Raises StateError."""
        for at in range(0, len(data), BLOCK) if self._record.checksums else ():
            block = data[at : at + BLOCK]
            if zlib.crc32(block) != self._record.checksums[(start + at) // BLOCK]:
                raise StateError(
                    f"{self.path} is damaged: bytes {start + at} to {start + at + len(block)} are not those that were "
                    f"written (their checksum differs)"
                )


_guard = threading.Lock()  # of those below
_open_files: list[weakref.ref[StoredFile]] = []  # that have a descriptor, the oldest first
_unread: list[tuple[str, weakref.ref[_Unread]]] = []  # folders of checkpoints that somebody is still to read from


def _keep_open(file: StoredFile) -> None:
    """Close the file that was opened first if too many are open now."""
    with _guard:
        _open_files.append(weakref.ref(file))
        if len(_open_files) > KEPT_OPEN:
            _open_files[:] = [one for one in _open_files if (there := one()) is not None and there._reader is not None]
        for one in _open_files[: max(0, len(_open_files) - KEPT_OPEN)]:
            if (there := one()) is not None:
                there.close()


def _hold_unread(folder: str, files: Sequence[StoredFile]) -> _Unread:
    """Files in a folder are still to be read from for as long as the object that is returned lives."""
    held = _Unread(files)
    with _guard:
        _unread[:] = [(path, one) for path, one in _unread if one() is not None]
        _unread.append((folder, weakref.ref(held)))
    return held


def is_unread(folder: str) -> bool:
    """Whether this process is still to read from files in a folder that it could not read once they are removed."""
    with _guard:
        held = [one() for path, one in _unread if path == folder]
    return any(not file.survives for one in held if one is not None for file in one.files)


class StoredTensorValues:
    """The values of a tensor in files (see ``deferred.tape.StoredValues``)."""

    def __init__(
        self, name: str, record: TensorRecord, files: Sequence[StoredFile], source: str, held: object = None
    ) -> None:
        self._name, self._record, self._files, self._source = name, record, files, source
        self._held = held  # see ``is_unread``
        self.dtype = dtype_of_name(record.dtype)
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
        in_one = _is_run(rows) and [*map(len, indices[1:])] == [*shape[1:]] and out.is_contiguous()
        if in_one and self._files[file].read_into(begin + int(rows[0]) * row, out):
            return
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
    """Named tensors in safetensors files; ``source`` is a text that is equal where all of them are.

    ``folder`` is that of a checkpoint, which has to stay until its deferred tensors have been read.
    """

    def __init__(
        self, tensors: dict[str, TensorRecord], files: Sequence[StoredFile], source: str, folder: str = ""
    ) -> None:
        self.records = tensors
        self.files = files
        self._source, self._folder = source, folder
        self._held: weakref.ref[object] = weakref.ref(_Unread(()))  # alive while a deferred tensor is

    def values(self, name: str) -> StoredTensorValues:
        """The values of a tensor."""
        return StoredTensorValues(name, self.records[name], self.files, self._source)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is read when it is needed; a small one is read now.  Raises StateError."""
        record = self.records[name]
        if math.prod(record.shape) <= SMALL:
            return self.values(name).whole()
        return deferred.stored(StoredTensorValues(name, record, self.files, self._source, self.hold()))

    def open(self, checked: bool) -> None:
        """Open the files, of which many stay open, as they may be removed before they are read.  Raises StateError.

        ``checked``: their blocks have been.
        """
        for file in self.files:
            file.open(checked)

    def hold(self) -> object:
        """An object that, as long as it lives, says that the files are still to be read (see ``is_unread``)."""
        held = self._held()
        if held is None:
            held = _hold_unread(self._folder, self.files)
            self._held = weakref.ref(held)
        return held


def _is_run(lines: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    return bool(lines[-1] - lines[0] == len(lines) - 1)
