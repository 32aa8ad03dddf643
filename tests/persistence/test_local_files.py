"""Files are written past the page cache where the file system can, and through it where it cannot."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from actorflow.persistence import storage
from actorflow.persistence.container import BLOCK, BUFFER, BlockWriter
from actorflow.persistence.storage import LocalFolder

DATA = os.urandom(2 * BUFFER + BLOCK + 777)


class Calls:
    """``fcntl`` and ``os`` for the storage: which writes go past the page cache, and what the file system refuses."""

    F_SETFL = 4

    def __init__(self, refuses: str) -> None:
        self.direct = False
        self.writes: list[tuple[int, bool]] = []
        self._refuses = refuses

    def fcntl(self, fd: int, what: int, flags: int) -> None:
        if flags and self._refuses == "flag":
            raise OSError(errno.EINVAL, "Invalid argument")
        self.direct = bool(flags)

    def write(self, fd: int, data: memoryview) -> int:
        if self.direct and self._refuses == "write":
            raise OSError(errno.EINVAL, "Invalid argument")
        if self.direct and self._refuses == "part":
            data = data[:1000]  # as a signal may end it
        written = os.write(fd, data)
        self.writes.append((written, self.direct))
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def written(folder: Path) -> list[int]:
    """Write DATA in pieces; the checksums of its blocks."""
    writer = BlockWriter(LocalFolder(folder).create("file"))
    writer.write(memoryview(DATA[:100]))
    writer.write(memoryview(b""))
    writer.write(memoryview(DATA[100:]))
    writer.close()
    assert (folder / "file").read_bytes() == DATA
    assert writer.size == len(DATA)
    return writer.checksums


@pytest.mark.parametrize("refuses", ["nothing", "flag", "write", "part"])
def test_a_file_is_what_was_written_whatever_the_file_system_refuses(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(refuses)
    monkeypatch.setattr(storage, "fcntl", calls)
    monkeypatch.setattr(storage, "os", calls)
    assert written(tmp_path) == [zlib.crc32(DATA[at : at + BLOCK]) for at in range(0, len(DATA), BLOCK)]
    whole, rest = (BUFFER, refuses == "nothing"), (BLOCK + 777, False)
    expected = [(1000, True), (BUFFER - 1000, False)] if refuses == "part" else [whole, whole]
    assert calls.writes[: len(expected)] == expected
    assert calls.writes[-1] == rest


def test_a_file_on_the_file_system_here_is_what_was_written(tmp_path: Path) -> None:
    written(tmp_path)


def test_another_error_of_a_write_past_the_page_cache_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    calls = Calls("nothing")
    calls.write = full  # type: ignore[method-assign]
    monkeypatch.setattr(storage, "os", calls)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path)
