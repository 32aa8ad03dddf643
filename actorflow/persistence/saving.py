"""Begin a save: all ranks agree on what they save, and each copies the parts that it will write.

The state of the objects is taken apart into JSON and named tensors.  What ranks hold is shared out among them, and a
snapshot of the plans' variables begins.  The rest happens in the background (``save_task.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorflow import deferred
from actorflow.control import cluster as clusters
from actorflow.control.cluster import Alone, Cluster
from actorflow.deferred import DeferredTensor
from actorflow.persistence.container import code_of, dtype_name, dtype_of_name
from actorflow.persistence.file_plan import FilePlan
from actorflow.persistence.folder_lock import FolderLock, lock_folder
from actorflow.persistence.folders import plans_beside, step_folder
from actorflow.persistence.manifest import MANIFEST, OWN_FILE
from actorflow.persistence.neighbour_copies import (
    CopiesManifest,
    KeptCopies,
    NeighbourCopies,
    NeighbourPlan,
    WrittenCopies,
    neighbour_group,
)
from actorflow.persistence.objects import names_of_parameters, state_of
from actorflow.persistence.parcels import Parcel
from actorflow.persistence.piece_assignment import Piece, TensorLayout, assign_pieces
from actorflow.persistence.random_states import random_states
from actorflow.persistence.save_order import SaveOrder
from actorflow.persistence.save_task import SaveOutcome, SaveTask, WrittenFiles
from actorflow.persistence.state_tree import encode
from actorflow.persistence.storage import Folder, open_folder
from actorflow.runtime.snapshot import Cut
from actorflow.session import process
from actorflow.session.plan_store import KEPT
from actorflow.standins.owned_tensor import real_value
from actorflow.support import background
from actorflow.support.exit_hooks import at_exit, when_finished
from actorflow.variables.variable_table import VariableTable
from actorflow_compiler.core.errors import ClusterError, StateError
from actorflow_compiler.core.sbp import PartialSum

__all__ = ["Saving", "begin_save", "finish_saves", "refuse_in_step"]


class Saving:
    """A checkpoint that is being written (a handle)."""

    def __init__(self, folder: Folder, step: int | None, task: SaveTask | None) -> None:
        self.path = folder.path
        self.step = step
        self._task = task

    @property
    def done(self) -> bool:
        """Whether this rank has done its part; on rank 0, whether the checkpoint is complete or has failed."""
        return self._task is None or self._task.ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is complete.

        Raises StateError if it could not be written, on every rank that waits, the run's failure, and TimeoutError
        after ``timeout`` seconds.
        """
        if self._task is not None:
            self._task.wait(timeout)

    def __repr__(self) -> str:
        failed = self._task is not None and self._task.error is not None
        return f"<checkpoint {self.path!r}, {'being written' if not self.done else 'failed' if failed else 'written'}>"


class _Saver:
    """The saves of this process, one at a time."""

    def __init__(self) -> None:
        self.number = 0  # of the next save
        self.pending: SaveTask | None = None
        self._tasks: dict[int, SaveTask] = {}  # that other ranks may still ask about: the last two
        self._outcomes: dict[int, bytes] = {}  # how those before them ended
        self._known = threading.Condition()
        self._run: Alone | Cluster | None = None  # in which requests are answered

    def serve(self, run: Alone | Cluster) -> None:
        """Answer other ranks' requests from now on; before they can make any."""
        if self._run is not run:
            self._run = run
            run.serve(WrittenFiles, lambda request: [self._of(run, request.save).written_files()])
            run.serve(WrittenCopies, lambda request: [self._copies_of(run, request.save).written()])
            run.serve(CopiesManifest, lambda request: [self._copies_of(run, request.save).manifest()])
            run.serve(SaveOutcome, lambda request: [self._outcome(run, request.save)])
            run.on_failure(lambda _: self._notify())
            if isinstance(run, Alone) or clusters.joined_late():
                at_exit(_finish_at_exit)

    def begin(self, task: SaveTask) -> None:
        """Carry out a save in the background."""
        number = task.order.number
        with self._known:
            for old in [n for n in self._tasks if n < number - 1]:
                self._outcomes[old] = self._tasks.pop(old).outcome()
            self._tasks[number] = task
            self._known.notify_all()
        self.pending = task
        background.start(task.carry_out, f"actorflow-save-{number}", task.stop)

    def finish(self) -> None:
        """Wait until the save that is under way, if any, has ended; raises its error unless the handle has done so."""
        task, self.pending = self.pending, None
        if task is not None and not task.told:
            task.wait(None)

    def _notify(self) -> None:
        with self._known:
            self._known.notify_all()

    def _outcome(self, run: Alone | Cluster, number: int) -> bytes:
        return self._outcomes[number] if number in self._outcomes else self._of(run, number).outcome()

    def _copies_of(self, run: Alone | Cluster, number: int) -> NeighbourCopies:
        copies = self._of(run, number).copies
        assert copies is not None
        return copies

    def _of(self, run: Alone | Cluster, number: int) -> SaveTask:
        with self._known:
            self._known.wait_for(lambda: number in self._tasks or run.failed.is_set())
            if number not in self._tasks:
                raise ClusterError(f"save {number} has not begun here, and the run is over")
            return self._tasks[number]


_saver = _Saver()
finish_saves = _saver.finish


def refuse_in_step(what: str) -> None:
    """Raise StateError if a step of a job is being captured; ``what`` was called in it."""
    session = process.started()
    if session is not None and session.context.capturing:
        raise StateError(f"flow.checkpoint: {what} was called in a job's step; expected: between calls of jobs")


def begin_save(
    path: str | os.PathLike[str],
    objects: Mapping[str, Any],
    step: int | None,
    with_random: bool,
    complete: Callable[[Folder], object] = lambda folder: None,
    kept: KeptCopies | None = None,
    on_disk: bool = True,
) -> Saving:
    """Begin to save; see ``actorflow.checkpoint.save``.

    ``complete`` is called on rank 0 when the checkpoint is in the folder.  ``kept``: where copies are kept in the
    memory of nodes; without ``on_disk`` there are these alone.
    """
    root = open_folder(path)
    folder = root if step is None else step_folder(root, step)
    refuse_in_step("save")
    run, session = clusters.current(), process.started()
    _saver.finish()
    if run.settings.pretend:  # actorflow plan
        return Saving(folder, step, None)
    runtime = None if session is None else session.context.runtime
    table = None if runtime is None else runtime.variables
    found = _contents(objects, table)
    random = random_states(None if runtime is None else runtime.seed) if with_random else None
    number = _saver.number
    _saver.number += 1
    _saver.serve(run)
    said, lock = _agree(run, root, folder, found.digest(folder, step), random, on_disk)
    plan = FilePlan(found.layouts, found.dtypes, assign_pieces(found.layouts, run.world), said.prefix)
    counts: dict[str, int] = {}
    copied, copies_plan = list[Parcel](), None
    if kept is not None:
        copies_plan = NeighbourPlan.of(plan, run.world, run.settings.devices, kept.count)
        copied = _parcels(found, copies_plan.written_by(run.rank), table, counts)
    parcels = _parcels(found, plan.written_by(run.rank), table, counts) if on_disk else []
    snapshot = None if runtime is None else runtime.worker.snapshot(_cuts([*copied, *parcels]))
    order = SaveOrder(
        number,
        folder,
        on_disk,
        step,
        found.objects,
        plan,
        random,
        said.random_differs,
        lock,
    )

    def concluded(done: Folder) -> None:
        complete(done)
        KEPT.keep_in(plans_beside(root))

    copies = None
    if kept is not None and copies_plan is not None:
        copies = NeighbourCopies(run, order, copies_plan, copied, kept, neighbour_group(run, copies_plan))
    task = SaveTask(run, order, parcels, snapshot, copies, concluded)
    _saver.begin(task)
    return Saving(folder, step, task)


@dataclass(frozen=True, slots=True)
class _Contents:
    """What is saved: JSON, and the tensors of the script that it names."""

    objects: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    layouts: tuple[TensorLayout, ...]
    dtypes: Mapping[str, torch.dtype]

    def digest(self, folder: Folder, step: int | None) -> str:
        """A text that is equal on two ranks that save tensors of the same names and shapes to the same place."""
        said = [folder.path, step, [(one.name, one.shape, dtype_name(self.dtypes[one.name])) for one in self.layouts]]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _contents(objects: Mapping[str, Any], table: VariableTable | None) -> _Contents:
    names = names_of_parameters(objects)
    tensors: dict[str, Tensor] = {}
    said = {name: encode(state_of(name, value, names), name, tensors) for name, value in objects.items()}
    layouts, dtypes = [], {}
    for name, tensor in tensors.items():
        variable = None if table is None else table.variable_of(tensor)
        if variable is not None:  # it answers at once, where its stand-in has to be asked
            dtypes[name] = dtype = dtype_of_name(variable.dtype)
            if any(isinstance(entry, PartialSum) for entry in variable.sbp):
                layouts.append(TensorLayout(name, variable.shape, dtype.itemsize))
            else:
                sbp = variable.sbp
                layouts.append(TensorLayout(name, variable.shape, dtype.itemsize, variable.placement, sbp))
            continue
        if tensor.layout != torch.strided or tensor.is_meta:
            raise StateError(
                f"{name} is a {tensor.layout} tensor on {tensor.device}; a strided one that has values was expected"
            )
        if getattr(tensor, "has_parts", False):
            raise StateError(
                f"{name} is a global tensor, which a checkpoint cannot hold; its whole value was expected: "
                f"tensor.to_global(sbp=flow.sbp.broadcast).to_local()"
            )
        dtypes[name] = dtype = tensor.dtype
        layouts.append(TensorLayout(name, tuple(tensor.shape), dtype.itemsize))
    for name, dtype in dtypes.items():
        code_of(name, dtype)
    return _Contents(said, tensors, tuple(layouts), dtypes)


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the master says before all ranks begin to write."""

    problem: str  # why the save cannot begin; empty: it can
    prefix: str  # see ``SaveOrder``
    random_differs: bool


def _agree(
    run: Alone | Cluster, root: Folder, folder: Folder, digest: str, random: Any, on_disk: bool
) -> tuple[_Agreed, FolderLock | None]:
    """Begin the save on all ranks; the master makes the folder.  Raises StateError, on every rank, if it cannot."""
    tag = f"flow.checkpoint.save to {folder.path!r}"
    generators = hashlib.sha256(json.dumps(random).encode()).hexdigest()
    gathered = run.gather(tag, f"{digest} {generators}".encode())
    lock, problem, prefix, differs = None, "", "", False
    if gathered is not None:
        of_ranks = [said.decode().split() for said in gathered]
        unequal = [rank for rank, (one, _) in enumerate(of_ranks) if one != digest]
        differs = len({one for _, one in of_ranks}) > 1
        if unequal:
            problem = (
                f"ranks {unequal} save other tensors to {folder.path!r} than rank 0; expected: the same call of "
                f"flow.checkpoint.save on every rank"
            )
        else:
            try:
                lock, prefix = _prepare(root, folder) if on_disk else (None, "")
            except OSError as error:
                problem = f"the checkpoint {folder.path!r} cannot be written: {error}; expected: a folder to write to"
            except StateError as error:
                problem = str(error)
    replies = None if gathered is None else [json.dumps([problem, prefix, differs]).encode()] * run.world
    said = _Agreed(*json.loads(run.scatter(tag, replies)))
    if said.problem:
        raise StateError(said.problem)
    return said, lock


def _prepare(root: Folder, folder: Folder) -> tuple[FolderLock, str]:
    """Make the folder, and take it; returns the lock and the prefix of the new files.  Raises OSError, StateError."""
    root.make()
    lock = lock_folder(root)
    folder.make()
    there = folder.files()
    if MANIFEST not in there:  # what a save has left that did not end
        for name in there:
            if OWN_FILE.fullmatch(name):
                folder.remove(name)
        return lock, ""
    count = 2
    while any(name.startswith(f"{count}-") for name in there):
        count += 1
    return lock, f"{count}-"


def _parcels(
    found: _Contents, pieces: Iterable[tuple[str, Piece]], table: VariableTable | None, counts: dict[str, int]
) -> list[Parcel]:
    """These pieces as this rank writes them; ``counts`` has, for each variable, how many of its pieces came before."""
    layouts = {layout.name: layout for layout in found.layouts}
    parcels = list[Parcel]()
    for name, piece in pieces:
        tensor = found.tensors[name]
        variable = None if table is None or layouts[name].placement is None else table.variable_of(tensor)
        if variable is None:
            parcels.append(Parcel(name, piece, copy=_copied(tensor, piece)))
        else:
            at = counts.get(variable.name, 0)
            counts[variable.name] = at + 1
            parcels.append(Parcel(name, piece, variable.name, at))
    return parcels


def _cuts(parcels: Sequence[Parcel]) -> dict[str, list[Cut]]:
    """The rectangles of variables that this rank writes."""
    cuts: dict[str, list[Cut]] = {}
    for one in parcels:
        if one.variable:
            ends = zip(one.piece.at, one.piece.shape, strict=True)
            cuts.setdefault(one.variable, []).append(tuple(slice(lo, lo + n) for lo, n in ends))
    return cuts


def _copied(tensor: Tensor, piece: Piece) -> Tensor:
    """A copy, in host memory, of a piece of a tensor that the script holds whole."""
    cut = tuple(slice(lo, lo + n) for lo, n in zip(piece.offsets, piece.shape, strict=True))
    if isinstance(tensor, DeferredTensor) and tensor.dim():
        return deferred.shard(tensor, [np.arange(one.start, one.stop) for one in cut]).cpu()
    return real_value(tensor).detach()[cut].to("cpu", copy=True).contiguous()


def _finish_at_exit() -> None:
    """Without actorflow's launcher: wait for a save that is under way, and report one that fails."""
    try:
        _saver.finish()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)


when_finished(finish_saves, first=True)
