"""Read files that launchers hold in memory: those of this node, and through its ranks those of another."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

from actorflow.control.cluster import Alone, Cluster
from actorflow.persistence.storage import RangeReader
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


class HeldFile(RangeReader):
    """A file that this node's launcher holds; it can be read for as long as this object lives.

    Raises FileNotFoundError where none of this name is held.
    """

    survives = True

    def __init__(self, holder: str, name: str) -> None:
        self._file = os.fdopen(open_held_file(holder, name), "rb", buffering=0)  # closed when this object dies
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, stop: int) -> bytearray:
        """See ``RangeReader``."""
        data = bytearray(stop - start)
        view, at = memoryview(data), start
        while view:
            got = os.preadv(self._file.fileno(), [view], at)
            if not got:
                raise OSError(f"the file in memory has ended at byte {at}; {stop} bytes were expected")
            view, at = view[got:], at + got
        return data


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
