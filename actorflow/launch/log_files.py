"""Copy growing log files from one node to another in pieces, each copy of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

FILES = ("stdout", "stderr")  # what a rank prints, each to a file of its own
MOST = 32 << 20  # bytes that are copied of a file from its beginning, while it grows
RUSH = 4 << 20  # bytes that are still copied when nothing more is written; of more than these …
LAST = 256 << 10  # … and of what is longer than MOST, only so many of the end
CHUNK = 256 << 10  # bytes of one piece


def log_path(folder: str | Path, rank: int, file: str) -> Path:
    """Where a rank's output is kept: ``FOLDER/rank3.stderr.log``."""
    return Path(folder, f"rank{rank}.{file}.log")


class LogTail:
    """The pieces of one file that grows: all of a short one, the beginning and the end of a long one."""

    def __init__(self, path: Path, most: int = MOST, rush: int = RUSH, last: int = LAST) -> None:
        self._path = path
        self._most, self._rush, self._last = most, rush, last
        self._at = 0  # bytes read so far

    def more(self) -> bytes:
        """What has been written since, at most ``CHUNK`` bytes; empty where there is nothing, or the most is copied."""
        return self._read(self._at, min(CHUNK, self._most - self._at))

    def rest(self) -> Iterator[bytes]:
        """The rest of a file to which nothing more is written; where that is too long, a note and the end of it."""
        left = self._size() - self._at
        if left > self._rush or self._size() > self._most:
            last = min(left, self._last)
            yield f"\n… {left - last:,} bytes are left out here; the whole is in {self._path} …\n".encode()
            self._at += left - last
        while piece := self._read(self._at, CHUNK):
            yield piece

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:  # nothing was written
            return 0

    def _read(self, start: int, most: int) -> bytes:
        if most <= 0:
            return b""
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                piece = file.read(most)
        except OSError:
            return b""
        self._at = start + len(piece)
        return piece


class LogCopies:
    """The copies of what other nodes' ranks print, in one folder; what exceeds the bound is dropped."""

    def __init__(self, folder: str, nodes: range, devices: int, most: int = MOST + RUSH + LAST) -> None:
        self._folder = folder
        self._nodes = nodes
        self._devices = devices  # ranks of each node
        self._most = most  # bytes of one file
        self._written: dict[Path, int] = {}

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name; ValueError for what is no name of a file in it."""
        if name != Path(name).name:
            raise ValueError(f"{name!r} is no file's name")
        return bool(name) and Path(self._folder, name).exists()

    def add(self, node: int, rank: int, file: str, data: bytes) -> None:
        """Write a piece behind those before it; ValueError where the node has no such rank or file."""
        if node not in self._nodes or rank // self._devices != node or file not in FILES:
            raise ValueError(f"node {node} has no {file!r} of rank {rank}")
        path = log_path(self._folder, rank, file)
        written = self._written.get(path, 0)
        data = data[: self._most - written]
        with path.open("ab" if written else "wb") as copy:  # an earlier run's, in a folder that is used again, ends
            copy.write(data)
        self._written[path] = written + len(data)


class LogTransfer(Protocol):
    """A launcher's part in gathering logs."""

    port: int  # where this node's launcher keeps logs; 0: it does not

    def send_to(self, address: str) -> None:
        """Start to send logs to this address; any thread."""

    def finish(self, well: bool) -> None:
        """This node's ranks have ended, ``well`` or not: wait for a bounded time until the rest has been sent."""


class NoLogTransfer:
    """The part of a launcher of a run of one node, whose logs stay where they are."""

    port = 0

    def send_to(self, address: str) -> None:
        """See ``LogTransfer``; nobody asks for them."""

    def finish(self, well: bool) -> None:
        """See ``LogTransfer``; nothing is under way."""
