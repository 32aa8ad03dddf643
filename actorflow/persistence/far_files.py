"""Read files that launchers hold in memory: those of this node, and through its ranks those of another."""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from actorflow.control.cluster import Alone, Cluster
from actorflow.persistence.storage import FileReader, RangeReader
from actorflow.support.held_files import open_held_file
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.support.requests import Request
from actorflow_compiler.core.errors import ClusterError

__all__ = ["FarFile", "HeldFile", "HeldRange", "far_files_in_use", "serve_held_files"]

PIECE = 1 << 20  # bytes that are read at a time


@dataclass(frozen=True, slots=True)
class HeldRange(Request):
    """Asks for bytes of a file that the launcher of a rank's node holds."""

    name: str
    start: int
    stop: int


class HeldFile(FileReader):
    """A file that this node's launcher holds; it can be read for as long as this object lives.

    Raises FileNotFoundError where none of this name is held.
    """

    def __init__(self, holder: str, name: str) -> None:
        super().__init__(io.FileIO(open_held_file(holder, name)), f"{name!r} in memory")


class FarFile(RangeReader):
    """A file that the launcher of another node holds, of which ``owner`` is a rank."""

    def __init__(self, run: Alone | Cluster, owner: int, name: str, size: int) -> None:
        self._run, self._owner, self._name, self.size = run, owner, name, size
        _far.add(self)

    def read(self, start: int, stop: int) -> bytearray:
        """See ``RangeReader``."""
        try:
            return bytearray(self._run.pull(self._owner, HeldRange(self._name, start, stop)))
        except ClusterError as error:
            raise OSError(str(error)) from error


_far = weakref.WeakSet[FarFile]()


def far_files_in_use() -> bool:
    """Whether this rank may still read files of other nodes."""
    return bool(_far)


def serve_held_files(run: Alone | Cluster, holder: str) -> None:
    """Let other ranks read what this node's launcher holds."""
    run.serve(HeldRange, lambda request: _range(HeldFile(holder, request.name), request))


def _range(file: HeldFile, request: HeldRange) -> Iterator[bytes]:
    """The bytes of a file that are asked for, piece by piece; raises MessageRefused where they do not lie in it."""
    if not 0 <= request.start <= request.stop <= file.size:
        what = f"bytes {request.start} to {request.stop} of {request.name!r}"
        raise MessageRefused(RefusalReason.SIZE, what, f"bytes between 0 and {file.size}")
    return (bytes(file.read(at, min(at + PIECE, request.stop))) for at in range(request.start, request.stop, PIECE))
