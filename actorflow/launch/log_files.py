"""Copy growing log files from one node to another in pieces, each copy of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Protocol

from actorflow.support.refusals import MessageRefused, RefusalReason

FILES = ("stdout", "stderr")  # the output streams of a rank, each with its own file
MOST = 32 << 20  # bytes copied from the beginning of a file while it grows
RUSH = 4 << 20  # bytes left at the end that are still copied in full; if more are left …
LAST = 256 << 10  # … or the file exceeds MOST, only this many bytes of its end
CHUNK = 256 << 10  # bytes of one piece


def log_path(folder: str | Path, rank: int, file: str) -> Path:
    """The file of a rank's output: ``FOLDER/rank3.stderr.log``."""
    return Path(folder, f"rank{rank}.{file}.log")


class LogTail:
    """Reads a growing file in pieces: all of a short file, the beginning and the end of a long one."""

    def __init__(self, path: Path, most: int = MOST, rush: int = RUSH, last: int = LAST) -> None:
        self._path = path
        self._most, self._rush, self._last = most, rush, last
        self._at = 0  # bytes read so far

    def more(self) -> bytes:
        """The next new bytes, at most ``CHUNK``; empty if there are none, or if ``MOST`` bytes have been read."""
        return self._read(self._at, min(CHUNK, self._most - self._at))

    def rest(self) -> Iterator[bytes]:
        """The rest of a file that no longer grows; if that is too long, a note and the end of it."""
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
    """Copies of the output of other nodes' ranks, in one folder; bytes beyond a bound for each file are dropped."""

    def __init__(self, folder: str, nodes: range, devices: int, most: int = MOST + RUSH + LAST) -> None:
        self._folder = folder
        self._nodes = nodes
        self._devices = devices  # ranks of each node
        self._most = most  # bytes of one file
        self._written: dict[Path, int] = {}

    def has(self, name: str) -> bool:
        """Whether the folder has a file of this name, which the caller has checked."""
        return Path(self._folder, name).exists()

    def add(self, node: int, rank: int, file: str, data: bytes) -> None:
        """Append a piece to its file; MessageRefused if the node has no such rank or file."""
        if node not in self._nodes or rank // self._devices != node or file not in FILES:
            found = f"node {node} has no {file!r} of rank {rank}"
            raise MessageRefused(RefusalReason.NUMBER, found, f"{' or '.join(FILES)} of a rank of that node")
        path = log_path(self._folder, rank, file)
        written = self._written.get(path, 0)
        data = data[: self._most - written]
        with path.open("ab" if written else "wb") as copy:  # replaces the file of an earlier run in the same folder
            copy.write(data)
        self._written[path] = written + len(data)


class LogTransfer(Protocol):
    """A launcher's part in gathering logs."""

    port: int  # on which this node's launcher receives logs; 0: it does not

    def send_to(self, address: str) -> None:
        """Start to send logs to this address; any thread."""

    def finish(self, well: bool, unreachable: Set[int] = frozenset()) -> None:
        """After this node's ranks have ended, ``well`` or not: wait for a bounded time until the rest is sent.

        Nothing more is expected of launchers on hosts that are ``unreachable``.
        """


class NoLogTransfer:
    """``LogTransfer`` for a run of one node, whose logs stay where they are."""

    port = 0

    def send_to(self, address: str) -> None:
        """See ``LogTransfer``; there is nothing to send."""

    def finish(self, well: bool, unreachable: Set[int] = frozenset()) -> None:
        """See ``LogTransfer``; there is nothing to wait for."""
