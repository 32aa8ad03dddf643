"""Read files that launchers hold in memory: those of this node, and through its ranks those of another."""

from __future__ import annotations

import io
import weakref
from dataclasses import dataclass

from actorflow.control.cluster import Alone, Cluster
from actorflow.persistence.storage import FileReader, RangeReader
from actorflow.support.held_files import open_held_file
from actorflow.support.requests import Request
from actorflow_compiler.core.errors import ClusterError

__all__ = ["FarFile", "HeldFile", "HeldRange", "far_files_in_use", "serve_held_files"]


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
    run.serve(HeldRange, lambda request: [bytes(HeldFile(holder, request.name).read(request.start, request.stop))])
