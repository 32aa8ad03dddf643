"""Digest frozen data by what they hold, so that equal data have one digest in every process."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import re
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

__all__ = ["NoDigest", "digest_of", "digest_of_code", "digest_of_files"]

STARTED = time.time()  # of this process
OURS = ("actorflow", "actorflow_compiler", "actorflow_scheduler")


class NoDigest(Exception):
    """Data hold something of which there is no way to tell whether it is equal in another process."""


def digest_of(value: Any) -> str:
    """SHA-256, in hexadecimal digits, of plain values, enumerations and our dataclasses, nested in any way.

    Types count: 1, 1.0 and True differ, as do a tuple and a list, 0.0 and -0.0.  Mappings are equal if their items are
    in one order, sets in any.  Every field of a dataclass counts.  Raises NoDigest for any other kind of value.
    """
    out = bytearray()
    try:
        _write(value, out)
    except RecursionError:
        raise NoDigest("what is nested too deep, or in a circle") from None
    return hashlib.sha256(out).hexdigest()


def digest_of_files(folder: Path, pattern: str = "*.py") -> str:
    """SHA-256 of the names and bytes of the files below a folder.  Raises NoDigest if there are none to read."""
    found = hashlib.sha256()
    paths = _files(folder, pattern)
    try:
        for path in paths:
            with open(path, "rb") as file:
                data = file.read()
            found.update(f"{path.removeprefix(str(folder))}\n{len(data)}\n".encode())
            found.update(data)
    except OSError as error:
        raise NoDigest(f"the files in {folder}, which cannot be read: {error}") from error
    if not paths:
        raise NoDigest(f"the files in {folder}, where none were found")
    return found.hexdigest()


def digest_of_code(folder: Path) -> str:
    """The digest of our code in a folder.  Raises NoDigest if it has changed since this process started."""
    for path in _files(folder, "*.py"):
        with suppress(OSError):
            if os.stat(path).st_mtime > STARTED:  # then this process may run what was there before
                raise NoDigest(f"{path}, which has changed since this process started")
    return digest_of_files(folder)


def _files(folder: Path, pattern: str) -> list[str]:
    """The files below a folder whose names match, in order; to make hundreds of objects of pathlib takes as long."""
    found = os.walk(folder)
    return sorted(os.path.join(parent, name) for parent, _, names in found for name in fnmatch.filter(names, pattern))


def _write(value: Any, out: bytearray) -> None:
    """Append a text that no value but an equal one has: of each kind its own letter, and sizes before contents."""
    kind = type(value)
    if kind in _WRITERS:
        _WRITERS[kind](value, out)
    elif isinstance(value, Enum):
        _parts(b"e", (kind.__module__, kind.__qualname__, value.name), out)
    elif is_dataclass(kind) and kind.__module__.partition(".")[0] in OURS:
        out += _head(kind)
        for name in _names(kind):
            _write(getattr(value, name), out)
    elif isinstance(value, np.generic):
        _parts(b"n", (value.dtype.str, value.tobytes()), out)
    else:
        raise NoDigest(f"a {kind.__module__}.{kind.__qualname__}")


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@functools.cache
def _head(kind: type) -> bytes:
    out = bytearray()
    _parts(b"c", (kind.__module__, kind.__qualname__, *_names(kind)), out)
    return bytes(out)


def _bytes(letter: bytes) -> Callable[[bytes, bytearray], None]:
    def write(data: bytes, out: bytearray) -> None:
        out += b"%b%d:" % (letter, len(data))
        out += data

    return write


def _parts(letter: bytes, parts: Any, out: bytearray) -> None:
    out += b"%b%d:" % (letter, len(parts))
    for part in parts:
        _write(part, out)


def _text(value: str, out: bytearray) -> None:
    _bytes(b"s")(value.encode("utf-8", "surrogatepass"), out)


def _mapping(value: Mapping[Any, Any], out: bytearray) -> None:
    out += b"d%d:" % len(value)
    for key, one in value.items():
        _write(key, out)
        _write(one, out)


def _set(value: Any, out: bytearray) -> None:
    texts = []
    for one in value:
        text = bytearray()
        _write(one, text)
        texts.append(bytes(text))
    _parts(b"S", sorted(texts), out)


_WRITERS: dict[type, Callable[[Any, bytearray], None]] = {
    type(None): lambda value, out: out.extend(b"N"),
    bool: lambda value, out: out.extend(b"T" if value else b"F"),
    int: lambda value, out: _bytes(b"i")(b"%d" % value, out),
    float: lambda value, out: out.extend(b"f" + struct.pack(">d", value)),
    complex: lambda value, out: out.extend(b"z" + struct.pack(">dd", value.real, value.imag)),
    str: _text,
    bytes: _bytes(b"b"),
    tuple: lambda value, out: _parts(b"t", value, out),
    list: lambda value, out: _parts(b"l", value, out),
    dict: _mapping,
    MappingProxyType: _mapping,
    set: _set,
    frozenset: _set,
    torch.Size: lambda value, out: _parts(b"h", tuple(value), out),
    torch.dtype: lambda value, out: _parts(b"y", (str(value),), out),
    torch.device: lambda value, out: _parts(b"v", (str(value),), out),
    re.Pattern: lambda value, out: _parts(b"r", (value.pattern, value.flags), out),
}
