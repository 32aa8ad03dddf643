"""Write and read files of the safetensors format, piece by piece, with a checksum for each block of bytes.

A file holds rectangles of tensors.  Its header says, as torch's own writer does (``DCP_SHARDING_INFO``), where in the
whole tensor each lies, so that ``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads it; to the safetensors
library it is a file of ordinary tensors.
"""

from __future__ import annotations

import functools
import json
import mmap
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actorflow.persistence.storage import NewFile, RangeReader
from actorflow_compiler.core.errors import StateError

__all__ = [
    "BLOCK",
    "BUFFER",
    "BlockWriter",
    "Bytes",
    "Entry",
    "SUFFIX",
    "code_of",
    "dtype_of_name",
    "dtype_name",
    "header_of",
    "read_header",
]

SUFFIX = ".safetensors"
BLOCK = 1 << 20  # bytes of a file that have a checksum together
BUFFER = 4 * BLOCK  # bytes that are gathered before they are written
_MOST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: name for name, code in _CODES.items()}

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A rectangle of a tensor in a file."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]  # where it begins in the whole tensor
    shape: tuple[int, ...]
    begin: int  # its first byte in the file

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as manifests name it: "float32"."""
    return str(dtype).removeprefix("torch.")


def code_of(name: str, dtype: torch.dtype) -> str:
    """The format's code of a dtype.  Raises StateError, with the tensor's name, for one that it does not have."""
    code = _CODES.get(dtype_name(dtype))
    if code is None:
        raise StateError(
            f"{name} is {dtype}, which the safetensors format does not have; it has {', '.join(_CODES)}; save a view "
            f"of it, such as torch.view_as_real(tensor)"
        )
    return code


def dtype_of_name(name: str) -> torch.dtype:
    """``"float32"`` → ``torch.float32``; also of the format's codes.  Raises StateError."""
    found = getattr(torch, _DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise StateError(f"dtype {name!r} was found, which torch {torch.__version__} does not have")
    return found


def header_of(wanted: Sequence[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]]]) -> tuple[bytes, list[Entry]]:
    """The first bytes of a file with these (name, dtype, offsets, shape), and its entries in the order of the file.

    Entries with the longest items come first, so that each begins at a multiple of its item's size; of these the
    smallest, so that what is read at once when a checkpoint is loaded lies in few blocks.
    """
    ordered = sorted(wanted, key=lambda one: (-one[1].itemsize, torch.Size(one[3]).numel()))
    begins: dict[str, int] = {}
    said: dict[str, Any] = {}
    end = 0
    for name, dtype, _, shape in ordered:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        said[name] = {"dtype": code_of(name, dtype), "shape": list(shape), "data_offsets": [end, end + nbytes]}
        begins[name] = end
        end += nbytes
    sharding = json.dumps({name: {"saved_offsets": list(offsets)} for name, _, offsets, _ in ordered})
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": sharding}
    text = json.dumps({"__metadata__": metadata, **said}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    entries = [Entry(name, dtype, offsets, shape, begin + begins[name]) for name, dtype, offsets, shape in ordered]
    return struct.pack("<Q", len(text)) + text, entries


def read_header(reader: RangeReader, what: str) -> list[Entry]:
    """The entries of a file.  Raises StateError if the file is damaged or has another format."""
    try:
        (length,) = struct.unpack("<Q", reader.read(0, 8)) if reader.size >= 8 else (reader.size,)
        if not 2 <= length <= min(_MOST_HEADER, reader.size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {reader.size}")
        said: Mapping[str, Mapping[str, object]] = json.loads(reader.read(8, 8 + length))
        metadata = said.get("__metadata__", {})
        sharding = json.loads(str(metadata.get("DCP_SHARDING_INFO", "{}")))
        found = [_entry(name, one, sharding, 8 + length) for name, one in said.items() if name != "__metadata__"]
        for entry in found:
            if entry.begin + entry.nbytes > reader.size:
                raise ValueError(f"{entry.name} ends behind the end of the file, at byte {entry.begin + entry.nbytes}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"{what} is no whole safetensors file: {error}; such a file, as it was written, was expected"
        ) from error
    return found


def _entry(
    name: str, said: Mapping[str, object], sharding: Mapping[str, Mapping[str, Sequence[int]]], base: int
) -> Entry:
    shape, offsets = said["shape"], said["data_offsets"]
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    at = tuple(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(shape)
    made = Entry(name, dtype_of_name(str(said["dtype"])), at, tuple(shape), base + int(offsets[0]))
    if made.nbytes != offsets[1] - offsets[0]:
        raise ValueError(f"{name} has {offsets[1] - offsets[0]} bytes; {made.nbytes} were expected")
    return made


class BlockWriter:
    """Writes a file, and keeps the checksum (CRC-32) of each of its blocks.

    What is written is gathered in a buffer first, a block at a time, so that its checksum is computed while it is in
    the processor's cache, and the file gets few large writes from memory that begins at a page.
    """

    def __init__(self, file: NewFile) -> None:
        self._file = file
        memory = mmap.mmap(-1, BUFFER, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer: Bytes = np.frombuffer(memory, np.uint8)
        self._filled = 0  # bytes in the buffer
        self._checksum = 0
        self.size = 0
        self.checksums: list[int] = []

    def write(self, data: memoryview) -> None:
        """Append bytes.  Raises OSError."""
        if data.nbytes:
            source = np.frombuffer(data, np.uint8)

            def copy(start: int, out: Bytes) -> None:
                out[:] = source[start : start + len(out)]

            self.fill(len(source), copy)

    def fill(self, nbytes: int, copy: Callable[[int, Bytes], None]) -> None:
        """Append bytes: ``copy(start, out)`` writes those from number ``start`` on to ``out``.  Raises OSError."""
        start = 0
        while start < nbytes:
            count = min(BLOCK - self.size % BLOCK, nbytes - start)
            some = self._buffer[self._filled : self._filled + count]
            copy(start, some)
            self._checksum = zlib.crc32(some.data, self._checksum)
            start += count
            self.size += count
            self._filled += count
            if self.size % BLOCK == 0:
                self._end_block()
            if self._filled == BUFFER:
                self._flush()

    def close(self) -> None:
        """Make the file durable.  Raises OSError."""
        if self.size % BLOCK:
            self._end_block()
        self._flush()
        self._file.close()

    def abandon(self) -> None:
        """Stop writing, after an error."""
        self._file.abandon()

    def _flush(self) -> None:
        filled, self._filled = self._filled, 0
        if filled:
            self._file.write(self._buffer[:filled].data)

    def _end_block(self) -> None:
        self.checksums.append(self._checksum)
        self._checksum = 0
