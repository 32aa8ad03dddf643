"""Carry out a save in the background: write this rank's files and, on the master, the manifest of all.

What the snapshot holds of the plans' variables is written to files, which are made durable.  The master
hears from all ranks, and writes the manifest last; until it is there, the folder is no checkpoint.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actorflow.control.cluster import Alone, Cluster
from actorflow.persistence.manifest import MANIFEST, OWN_FILE, FileRecord, Manifest, read_manifest
from actorflow.persistence.neighbour_copies import NeighbourCopies
from actorflow.persistence.parcels import Parcel, write_files
from actorflow.persistence.save_order import SaveOrder
from actorflow.persistence.storage import Folder
from actorflow.persistence.stored import is_unread
from actorflow.runtime.snapshot import Snapshot
from actorflow.support import background
from actorflow.support.requests import Request
from actorflow_compiler.core.errors import ActorflowError, ClusterError, StateError

__all__ = ["SaveOutcome", "SaveTask", "WrittenFiles"]


@dataclass(frozen=True, slots=True)
class WrittenFiles(Request):
    """Asks a rank which files it has written for a save; it answers when they are durable."""

    save: int  # number of the save, equal on all ranks


@dataclass(frozen=True, slots=True)
class SaveOutcome(Request):
    """Asks the master how a save ended; it answers when it has."""

    save: int


class SaveTask:
    """A save on this rank.  ``complete`` is called on the master when the checkpoint is complete."""

    def __init__(
        self, run: Alone | Cluster, order: SaveOrder, parcels: Sequence[Parcel], snapshot: Snapshot | None,
        copies: NeighbourCopies | None, complete: Callable[[Folder], object],
    ) -> None:  # fmt: skip
        self.order = order
        self.copies = copies
        self.ended = threading.Event()  # the checkpoint is complete, or has failed; on other ranks: this rank's part
        self.error: BaseException | None = None  # why, once it has ended
        self.told = False  # the error was raised in the script
        self._run, self._folder = run, order.folder
        self._parcels, self._snapshot, self._complete = parcels, snapshot, complete
        self._lock = threading.Lock()  # of the next
        self._asked = False  # the master, how the save ended
        self._heard = threading.Event()  # it has answered
        self._here = threading.Event()  # this rank's files are durable, or could not be written
        self._files: list[FileRecord] = []
        self._problem = ""  # why they could not

    def stop(self) -> None:
        """The process ends: stop as soon as possible."""
        if self._snapshot is not None:
            self._snapshot.fail(ClusterError("the process ended before the checkpoint was written"))
        if self.copies is not None:
            self.copies.stop()

    def carry_out(self) -> None:
        """Write this rank's files and, on the master, the manifest when all ranks have written theirs."""
        try:
            self._problem = self._problem_of(self._begin)
            if self.copies is not None:
                self.copies.write(self._snapshot, self._problem)
            if self.order.on_disk:
                self._problem = self._problem or self._problem_of(self._write_files)
            self._parcels = ()
            self._here.set()
            if self.copies is not None:
                self.copies.conclude()
            if self._run.rank == 0 and self.order.on_disk:
                self._conclude()
            elif self._problem:
                raise StateError(self._failed(self._problem))
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def _problem_of(self, do: Callable[[], object]) -> str:
        """Do something; returns why it could not be done, or nothing."""
        try:
            do()
        except Exception as error:
            return f"rank {self._run.rank}: {error if isinstance(error, ActorflowError) else _told(error)}"
        return ""

    def written_files(self) -> bytes:
        """For the master: this rank's files, or why there are none, as JSON; waits for them."""
        self._here.wait()
        files = [[f.name, f.size, list(f.checksums)] for f in self._files]
        random = self.order.random if self.order.random_differs else None
        return json.dumps([self._problem, files, random]).encode()

    def wait(self, timeout: float | None) -> None:
        """Return when the checkpoint is complete; see ``Saving.wait``."""
        end = None if timeout is None else time.monotonic() + timeout
        over = self.ended.wait(timeout)
        if over and self.error is None and self._run.rank:
            self._ask()
            over = self._heard.wait(None if end is None else max(0.0, end - time.monotonic()))
        if not over:
            raise TimeoutError(f"the checkpoint {self._folder.path!r} was not written in {timeout} s")
        if self.error is not None:
            self.told = True
            raise self.error

    def _ask(self) -> None:
        """Ask the master, once, how the save ended; on a thread of its own, as the answer comes when it has."""
        with self._lock:
            if self._asked:
                return
            self._asked = True

        def ask() -> None:
            try:
                problem = self._run.pull(0, SaveOutcome(self.order.number)).decode()
                self.error = StateError(problem) if problem else None
            except BaseException as error:
                self.error = error
            finally:
                self._heard.set()

        background.start(ask, f"actorflow-save-{self.order.number}-outcome")

    def outcome(self) -> bytes:
        """For other ranks: why the save failed, or nothing; waits for its end."""
        self.ended.wait()
        return b"" if self.error is None else str(self.error).encode()

    # -- this rank's files -------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._snapshot is not None:
            self._snapshot.begin_to_read()

    def _write_files(self) -> None:
        self._files = write_files(self.order.plan, self._parcels, self._snapshot, self._folder.create)

    # -- the whole, on the master ------------------------------------------------------------------

    def _conclude(self) -> None:
        """Write the manifest when all ranks have written their files.  Raises StateError, and the run's failure."""
        files, problems, states = list[FileRecord](), list[str](), list[Any]()
        for rank in range(self._run.world):
            said = self._run.pull(rank, WrittenFiles(self.order.number)) if rank else self.written_files()
            problem, some, random = json.loads(said)
            problems += [problem] if problem else []
            states.append(random)
            files += [FileRecord(name, size, tuple(checksums)) for name, size, checksums in some]
        if not self.order.random_differs:
            states = [] if self.order.random is None else [self.order.random]
        try:
            if problems:
                raise StateError(self._failed("; ".join(problems)))
            self._check(files)
            order = self.order
            manifest = order.plan.manifest(order.step, self._run.world, order.objects, states, files)
            self._put(manifest)
        except OSError as error:
            self._remove_unnamed()
            raise StateError(self._failed(_told(error))) from error
        except StateError:
            self._remove_unnamed()
            raise
        if not is_unread(self._folder.path):  # else a later save removes the files of the checkpoint before
            self._remove_but(file.name for file in files)
        self._complete(self._folder)

    def _put(self, manifest: Manifest) -> None:
        """Write the manifest.  Raises OSError, unless it is there nevertheless."""
        try:
            self._folder.put(MANIFEST, manifest.to_json())
        except OSError:
            with suppress(OSError):
                if self._folder.get(MANIFEST) == manifest.to_json():
                    return
            raise

    def _check(self, files: Sequence[FileRecord]) -> None:
        """Raise StateError unless the master sees all files, and the folder is still this run's.  Raises OSError."""
        there = self._folder.files()
        for file in files:
            if there.get(file.name) != file.size:
                raise StateError(self._failed(
                    f"{file.name}, which another rank has written, is not there for the master, or not whole; "
                    f"expected: a folder that all nodes share"
                ))  # fmt: skip
        assert self.order.lock is not None
        self.order.lock.check()

    def _remove_unnamed(self) -> None:
        """Remove the files that the folder's manifest does not name, of a save that failed."""
        with suppress(OSError, StateError):
            named: list[str] = []
            with suppress(FileNotFoundError):
                named = [file.name for file in read_manifest(self._folder).files]
            self._remove_but(named, self.order.plan.prefix)

    def _remove_but(self, named: Iterable[str], prefix: str = "") -> None:
        """Remove the files that saves have written and whose names begin so, but for these."""
        kept = {*named}
        with suppress(OSError):
            for name in self._folder.files():
                if OWN_FILE.fullmatch(name) and name.startswith((prefix, MANIFEST)) and name not in kept:
                    self._folder.remove(name)

    def _failed(self, why: str) -> str:
        return f"the checkpoint {self._folder.path!r} was not written: {why}; older checkpoints are as they were"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
