"""Keep a checkpoint in the memory of the nodes: each rank's files on its own node, and on some of the next ones.

What a rank in the same place on a neighbour node holds by itself it writes there; only the rest is sent.  The files are
in the memory of the nodes' launchers, which outlive the ranks, so that a run that starts again after the loss of a node
reads no disk.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from actorflow.control.cluster import Alone, Cluster
from actorflow.persistence.far_files import far_files_in_use
from actorflow.persistence.file_plan import FilePlan
from actorflow.persistence.manifest import MANIFEST, FileRecord
from actorflow.persistence.parcels import Parcel, write_files
from actorflow.persistence.piece_assignment import Piece, by_neighbours, neighbours_of
from actorflow.persistence.save_order import SaveOrder
from actorflow.persistence.storage import NewFile
from actorflow.runtime.snapshot import Snapshot
from actorflow.support.held_files import held_files, hold_file, let_go_of_files
from actorflow.support.requests import Request
from actorflow.support.terminal import say
from actorflow.transport.communicators import CommunicatorRegistry, Scope, abort_all, over_gloo
from actorflow_compiler.core.errors import ActorflowError

__all__ = ["CopiesManifest", "KeptCopies", "NeighbourCopies", "NeighbourPlan", "WrittenCopies", "neighbour_group"]

STRETCH = 64 << 20  # bytes that one operation sends
_UNABLE = "the copies in the memory of nodes cannot be exchanged between ranks {ranks}: {error}"


@dataclass(frozen=True, slots=True)
class WrittenCopies(Request):
    """Asks a rank which files it has written and got for the copies of a save; it answers when it has them."""

    save: int  # number of the save


@dataclass(frozen=True, slots=True)
class CopiesManifest(Request):
    """Asks the master for the manifest of the copies of a save; it answers when they are complete."""

    save: int


@dataclass(frozen=True, slots=True)
class NeighbourPlan:
    """Which files of a checkpoint are kept on which nodes; equal on all ranks."""

    files: FilePlan
    world: int
    devices: int  # ranks of each node
    count: int  # neighbour nodes that have copies

    @classmethod
    def of(cls, plan: FilePlan, world: int, devices: int, count: int) -> NeighbourPlan:
        """The plan for the pieces that a checkpoint on disk has."""
        pieces = tuple(tuple(some) for some in plan.pieces)
        nodes = world // devices
        files = FilePlan(plan.layouts, plan.dtypes, by_neighbours(pieces, devices, nodes, count))
        return cls(files, world, devices, count)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks that have copies of what this one writes, one on each neighbour node."""
        return neighbours_of(rank, self.devices, self.world // self.devices, self.count)

    def column(self, rank: int) -> tuple[int, ...]:
        """The ranks in this one's place on all nodes."""
        return tuple(range(rank % self.devices, self.world, self.devices))

    def place(self, rank: int) -> int:
        """Where a rank is in its column: the number of its node."""
        return rank // self.devices

    def written_by(self, rank: int) -> Iterator[tuple[str, Piece]]:
        """The pieces that a rank writes: its own, and those of others that it holds, too."""
        for layout, pieces in zip(self.files.layouts, self.files.pieces, strict=True):
            for piece in pieces:
                if rank == piece.rank or rank in piece.holders:
                    yield layout.name, piece

    def sent(self, rank: int, to: int) -> list[tuple[str, int]]:
        """The files of a rank that a neighbour cannot write by itself: name and bytes, in order."""
        found = []
        for (owner, file), some in sorted(self.files.files().items()):
            if owner == rank and to not in some[0][1].holders:
                header, entries = self.files.header(some)
                found.append((self.files.name(owner, file), len(header) + sum(entry.nbytes for entry in entries)))
        return found


@dataclass(frozen=True, slots=True)
class KeptCopies:
    """Where the copies of a Keeper's checkpoints are: in this launcher, under names that begin so."""

    holder: str  # see ``support.held_files``
    key: str  # of the Keeper's folder
    count: int  # neighbour nodes

    def prefix(self, step: int) -> str:
        """The beginning of the names of a step's files."""
        return f"{self.key}/{step}/"


class _MemoryFile(NewFile):
    """A file in memory, which the launcher holds once it is whole."""

    def __init__(self, holder: str, name: str) -> None:
        self._holder, self._name = holder, name
        self.fd = os.memfd_create(name.rpartition("/")[2], os.MFD_CLOEXEC)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self.fd, data) :]

    def close(self) -> None:
        hold_file(self._holder, self._name, self.fd)

    def abandon(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class NeighbourCopies:
    """The copies of one checkpoint, as far as this rank is concerned.

    A failure of the copies is no failure of the run: ``problem`` says what it was, on the master once they are
    concluded.  ``group`` is what ``neighbour_group`` returns.
    """

    def __init__(
        self, run: Alone | Cluster, order: SaveOrder, plan: NeighbourPlan, parcels: Sequence[Parcel], kept: KeptCopies,
        group: Any,
    ) -> None:  # fmt: skip
        assert order.step is not None
        self.plan = plan
        self.problem = ""
        self._run, self._order, self._kept = run, order, kept
        self._parcels = parcels
        self._prefix = kept.prefix(order.step)
        self._here = threading.Event()  # this rank's files are there, or could not be had
        self._done = threading.Event()  # the manifest is there, or will not be
        self._own: list[FileRecord] = []  # written by this rank, of its own pieces and of others'
        self._manifest = b""
        self._older_are_read = False  # some rank reads an older checkpoint, of which it has not all files on its node
        self._group = group
        self._sources = [other for other in plan.column(run.rank) if run.rank in plan.neighbours(other)]

    def write(self, snapshot: Snapshot | None, problem: str) -> None:
        """Write this rank's files, and exchange what neighbours need, unless there is a ``problem`` already."""
        made: dict[str, _MemoryFile] = {}

        def create(name: str) -> NewFile:
            made[name] = _MemoryFile(self._kept.holder, self._prefix + name)
            return made[name]

        try:
            self.problem = problem
            if not problem:
                self._write(snapshot, create, made)
            self._parcels = ()
            if self._all_are_well():
                with self._told():
                    self._exchange(made)
        finally:
            for file in made.values():
                file.abandon()
            self._here.set()

    def _write(
        self, snapshot: Snapshot | None, create: Callable[[str], NewFile], made: Mapping[str, _MemoryFile]
    ) -> None:
        """Write this rank's files, and make room for those of others."""
        with self._told():
            self._own = write_files(self.plan.files, self._parcels, snapshot, create)
            for source in self._sources:
                for name, size in self.plan.sent(source, self._run.rank):
                    create(name)
                    os.posix_fallocate(made[name].fd, 0, size)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What is raised inside is this rank's problem."""
        try:
            yield
        except Exception as error:
            said = str(error) if isinstance(error, ActorflowError) else f"{type(error).__name__}: {error}"
            self.problem = f"rank {self._run.rank}: {said}"

    def _all_are_well(self) -> bool:
        """Whether none of the ranks that exchange files has a problem, so that all of them do so."""
        if self._group is None:
            return not self.problem
        unwell = torch.tensor([int(bool(self.problem))])
        with self._told():
            self._group.allreduce([unwell]).wait()
        return not unwell.item() and not self.problem

    def stop(self) -> None:
        """The process ends: stop as soon as possible."""
        if self._group is not None:
            abort_all([self._group], "actorflow-neighbours")

    def conclude(self) -> None:
        """Have the manifest kept on every node once all ranks have their files, and let go of older steps.

        Raises the run's failure.
        """
        try:
            if self._run.rank == 0:
                self._conclude()
            elif self._run.settings.leads:
                manifest, self._older_are_read = json.loads(self._run.pull(0, CopiesManifest(self._order.number)))
                self._manifest = manifest.encode()
            if self._run.settings.leads:
                with self._told():
                    self._keep()
        finally:
            self._done.set()
        if self.problem and self.problem not in _noted and (self._run.rank == 0 or self._manifest):
            _noted.add(self.problem)  # another rank says what only it knows: that it could not keep the manifest
            say(f"no copies in the memory of nodes: {self.problem}")

    def written(self) -> bytes:
        """For the master: this rank's files, or why there are none, as JSON; waits for them."""
        self._here.wait()
        random = self._order.random if self._order.random_differs else None
        files = [[f.name, f.size, list(f.checksums)] for f in self._own]
        return json.dumps([self.problem, files, random, far_files_in_use()]).encode()

    def manifest(self) -> bytes:
        """For other ranks: the manifest, empty where there is none, and whether older files are still read, as JSON.

        Waits for it.
        """
        self._done.wait()
        return json.dumps([self._manifest.decode(), self._older_are_read]).encode()

    # -- the files -------------------------------------------------------------------------------

    def _exchange(self, made: Mapping[str, _MemoryFile]) -> None:
        rank, plan = self._run.rank, self.plan
        works: list[Any] = []
        with _mapped() as map_file:
            for to in plan.neighbours(rank):
                for number, (name, size) in enumerate(plan.sent(rank, to)):
                    for tag, part in _tagged(number, map_file(made[name].fd, size)):
                        works.append(self._group.send([part], plan.place(to), tag))
            for source in self._sources:
                for number, (name, size) in enumerate(plan.sent(source, rank)):
                    for tag, part in _tagged(number, map_file(made[name].fd, size)):
                        works.append(self._group.recv([part], plan.place(source), tag))
            for work in works:
                work.wait()
        for source in self._sources:
            for name, _ in plan.sent(source, rank):
                made[name].close()

    def _conclude(self) -> None:
        """On the master: make the manifest of what all ranks have written."""
        records: dict[str, FileRecord] = {}
        problems, states = list[str](), list[Any]()
        for rank in range(self._run.world):
            said = self._run.pull(rank, WrittenCopies(self._order.number)) if rank else self.written()
            problem, some, random, far = json.loads(said)
            self._older_are_read = self._older_are_read or far
            problems += [problem] if problem else []
            states.append(random)
            for name, size, checksums in some:
                record = FileRecord(name, size, tuple(checksums))
                if records.setdefault(name, record) != record:
                    problems.append(f"the copies of {name} differ, though the ranks should hold the same values")
        order = self._order
        if problems:
            self.problem = "; ".join(problems)
            return
        random = states if order.random_differs else [] if order.random is None else [order.random]
        files = [record for _, record in sorted(records.items())]
        made = self.plan.files.manifest(order.step, self._run.world, order.objects, random, files)
        self._manifest = made.to_json()

    def _keep(self) -> None:
        """Keep the manifest on this node; then nothing older is needed here, unless some rank still reads it."""
        holder = self._kept.holder
        if self._manifest:
            file = _MemoryFile(holder, self._prefix + MANIFEST)
            file.write(memoryview(self._manifest))
            file.close()
            file.abandon()
        names = {name: name.startswith(self._prefix) for name in held_files(holder, f"{self._kept.key}/")}
        if not self._manifest:  # this step's files are of no use
            let_go_of_files(holder, [name for name, of_this in names.items() if of_this])
        elif not self._older_are_read:
            let_go_of_files(holder, [name for name, of_this in names.items() if not of_this])


def _tagged(number: int, data: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The stretches of a sender's file of this number for one receiver, each with the tag that it travels with."""
    for at in range(max(1, -(-data.numel() // STRETCH))):
        yield number << 16 | at, data[at * STRETCH : (at + 1) * STRETCH]


@contextmanager
def _mapped() -> Iterator[Any]:
    """Inside the context, a function that maps a file of a known size into memory, as a uint8 tensor."""
    maps: list[mmap.mmap] = []

    def map_file(fd: int, size: int) -> Tensor:
        maps.append(mmap.mmap(fd, size))
        return torch.frombuffer(maps[-1], dtype=torch.uint8)

    yield map_file


_noted = set[str]()  # problems that were printed
_registries: dict[Cluster, CommunicatorRegistry] = {}


def neighbour_group(run: Alone | Cluster, plan: NeighbourPlan) -> Any:
    """The communicator of the ranks in this one's place on all nodes, None for a single node; collective."""
    if plan.world == plan.devices or not plan.count or not isinstance(run, Cluster):
        return None
    if run not in _registries:
        store = PrefixStore("flow.checkpoint/neighbours", run.store())
        _registries[run] = CommunicatorRegistry(run.rank, store, over_gloo, _UNABLE)
    return _registries[run].open(Scope.GROUP, plan.column(run.rank))
