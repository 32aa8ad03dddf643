"""Keep compiled plans in folders, by the digest of what they are made from, so that a restart does not compile again.

A folder holds, beside files of others, which nobody touches:

    plan-DIGEST.actorflow   a plan: a line of text, a checksum, and the plan as protobuf
    costs-LABEL.json        the measurements of the machine by which plans were scheduled
    plans.json              the digests of the plans, those used last at the end

Only the master reads and writes.  Nothing here fails a run: what cannot be read is compiled, what cannot be written is
said once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

import actorflow_protos
import actorflow_scheduler
from actorflow.runtime.measured_costs import Costs, Place, Target, read
from actorflow_compiler import reuse
from actorflow_compiler.core.digest import NoDigest, digest_of, digest_of_files
from actorflow_compiler.core.errors import ActorflowError, PlanError
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.proto import from_bytes, to_bytes

__all__ = ["KEPT", "KeptPlan", "PlanFolder", "PlanStore"]

FORMAT = 1  # of the files; increase it when their form changes
HEAD = b"actorflow plan %d\n" % FORMAT
NAME = re.compile(r"plan-([0-9a-f]{64})\.actorflow")
USED = "plans.json"
MOST = 32  # plans in a folder
MOST_BYTES = 256 << 20  # … and bytes; the one used last stays in any case
LARGEST = 2 << 30  # bytes of a file that is read; protobuf allows no more
FOLDERS = 4  # in which plans are looked for, those named last
STARTED = time.time()


class PlanFolder(Protocol):
    """A folder of files, by their names."""

    @property
    def path(self) -> str:
        """The path or URL, as in messages."""

    def make(self) -> None:
        """Make the folder unless it exists.  Raises OSError."""

    def files(self) -> dict[str, int]:
        """The sizes of the files in the folder, by name; empty if there is no such folder."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it, as a whole or not at all.  Raises OSError."""

    def get(self, name: str) -> bytes:
        """A whole file.  Raises OSError."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan that was found."""

    plan: Plan
    folder: str  # where


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan of this process, and the measurements that it was scheduled by."""

    data: bytes  # of the file
    costs: tuple[str, bytes] | None  # a file's name and contents; None: it was scheduled without


class PlanStore:
    """The folders of this process in which plans are kept, and the plans that it has made."""

    def __init__(self) -> None:
        self._folders: dict[str, PlanFolder] = {}  # by path; those named last at the end
        self._keeping: PlanFolder | None = None  # where plans are kept; None: not yet known
        self._made: dict[str, _Made] = {}  # digest → a plan; those used last at the end
        self._told: set[str] = set()
        self._bad: set[str] = set()  # files that are there, and cannot be used
        self._lock = threading.RLock()  # a save keeps plans from a thread of its own
        self.taken = 0  # plans that were not compiled

    def forget(self) -> None:
        """Begin anew, as in a new process."""
        self._folders, self._keeping = {}, None
        self._made, self._told, self._bad = {}, set(), set()
        self.taken = 0

    # -- folders -----------------------------------------------------------------------------------

    def read_from(self, folder: PlanFolder) -> None:
        """Look for plans in this folder, too, from now on."""
        with self._lock:
            self._folders.pop(folder.path, None)
            self._folders[folder.path] = folder
            while len(self._folders) > FOLDERS:
                del self._folders[next(iter(self._folders))]

    def keep_in(self, folder: PlanFolder) -> None:
        """Keep plans in this folder from now on, also those that this process has made before."""
        with self._lock:
            self.read_from(folder)
            self._keeping = folder
            if self._made:
                self._write(tuple(self._made))

    # -- plans -------------------------------------------------------------------------------------

    def digest(self, job: str, what: Callable[[], tuple[Any, ...]]) -> str | None:
        """The digest of what a plan of this job is made from, and of all code that makes it; None if there is none."""
        try:
            return digest_of((FORMAT, *_code(), *what()))
        except NoDigest as error:
            if self._folders:
                self._say(f"the plan of {job} is not kept: it depends on {error}")
            return None

    def find(self, digest: str, check: Callable[[Plan], Plan]) -> KeptPlan | None:
        """The plan of a digest, once ``check`` has returned it; None if there is none, or only one that is not whole.

        ``check`` raises ActorflowError for a plan that is not as it must be.
        """
        name = f"plan-{digest}.actorflow"
        with self._lock:
            for folder in reversed(self._folders.values()):
                try:
                    if not 0 < folder.files().get(name, 0) <= LARGEST:
                        continue
                    data = folder.get(name)
                    plan = check(from_bytes(_opened(data, digest)))
                except FileNotFoundError:
                    continue
                except Exception as error:  # a file that somebody has written by hand may fail in any way
                    kind = "" if isinstance(error, ActorflowError | OSError) else f"{type(error).__name__}: "
                    self._bad.add(f"{folder.path}/{name}")
                    self._say(f"{folder.path}/{name} is ignored, and the plan compiled: {kind}{error}")
                    continue
                self.taken += 1
                self._use(digest, _Made(data, None))
                return KeptPlan(plan, folder.path)
        return None

    def add(self, digest: str, plan: Plan, target: Target, kind: str) -> None:
        """Keep a plan that was compiled for a target, with the measurements of this kind of device."""
        with self._lock, suppress(PlanError):  # too large for protobuf
            self._use(digest, _Made(_closed(to_bytes(plan), digest), _costs_file(target, kind)))

    def with_costs(self, target: Target, kind: str) -> Target:
        """The target with the measurements of this machine, as they are now, or else those kept for one like it."""
        place = target.place(kind)
        if place is None or target.measure or target.costs is not None:
            return target
        costs = read(place)
        with self._lock:
            for folder in reversed(self._folders.values()) if costs == Costs() and place.label() else ():
                with suppress(OSError, ValueError, RecursionError):
                    if _costs_name(place) in folder.files():
                        costs = Costs.from_json(json.loads(folder.get(_costs_name(place)))) or costs
                if costs != Costs():
                    break
        return replace(target, costs=costs)

    def _use(self, digest: str, made: _Made) -> None:
        """Count a plan as the one used last, and keep it where plans are kept."""
        self._made.pop(digest, None)
        self._made[digest] = made
        while len(self._made) > 1 and (
            len(self._made) > MOST or sum(len(one.data) for one in self._made.values()) > MOST_BYTES
        ):
            del self._made[next(iter(self._made))]
        if self._keeping is not None:
            self._write((digest,))

    def _write(self, digests: tuple[str, ...]) -> None:
        """Write the plans that are not there yet, and remove those for which there is no room."""
        folder = self._keeping
        assert folder is not None
        try:
            there = folder.files()
            folder.make()
            for digest in digests:
                made, name = self._made[digest], f"plan-{digest}.actorflow"
                if there.get(name) != len(made.data) or f"{folder.path}/{name}" in self._bad:
                    folder.put(name, made.data)
                    self._bad.discard(f"{folder.path}/{name}")
                costs, data = made.costs or ("", b"")
                if costs and (costs not in there or folder.get(costs) != data):
                    folder.put(costs, data)
            self._tidy(folder, digests)
        except OSError as error:
            self._say(f"plans cannot be kept in {folder.path}, and are compiled again at the next start: {error}")

    def _tidy(self, folder: PlanFolder, used: tuple[str, ...]) -> None:
        """Note the order in which plans were used, and remove those used longest ago.  Raises OSError."""
        there = folder.files()
        sizes = {found[1]: size for name, size in there.items() if (found := NAME.fullmatch(name))}
        before: list[str] = []
        with suppress(FileNotFoundError, ValueError, RecursionError):
            said = json.loads(folder.get(USED) if USED in there else b"[]")
            before = [one for one in said if isinstance(one, str)] if isinstance(said, list) else []
        known = dict.fromkeys(one for one in before if one in sizes and one not in used)
        order = [*(one for one in sorted(sizes) if one not in known and one not in used), *known]
        order += [one for one in used if one in sizes]
        while len(order) > 1 and (len(order) > MOST or sum(sizes[one] for one in order) > MOST_BYTES):
            folder.remove(f"plan-{order.pop(0)}.actorflow")
        if order != before:
            folder.put(USED, json.dumps(order).encode())

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(f"actorflow: {text}", file=sys.stderr, flush=True)


KEPT = PlanStore()  # of this process


def _closed(plan: bytes, digest: str) -> bytes:
    return HEAD + hashlib.sha256(digest.encode() + plan).digest() + plan


def _opened(data: bytes, digest: str) -> bytes:
    """The plan in a file.  Raises PlanError for a file that is not whole, or of another plan or version."""
    if not data.startswith(HEAD):
        raise PlanError("it is no plan of this version")
    plan = data[len(HEAD) + 32 :]
    if hashlib.sha256(digest.encode() + plan).digest() != data[len(HEAD) : len(HEAD) + 32]:
        raise PlanError("it is damaged, or another plan's")
    return plan


@functools.cache
def _code() -> tuple[str, ...]:
    """All of our code that makes plans, and the versions of what it uses.  Raises NoDigest."""
    folders = [Path(str(module.__file__)).parent for module in (reuse, actorflow_scheduler, actorflow_protos)]
    session = Path(__file__).parent
    folders += [session, session.parent / "runtime"]
    for folder in folders:
        for path in folder.rglob("*.py"):
            with suppress(OSError):
                if path.stat().st_mtime > STARTED:  # then this process may run what was there before
                    raise NoDigest(f"{path}, which has changed since this process started")
    versions = [importlib.metadata.version(name) for name in ("numpy", "scipy")]
    return (
        *(digest_of_files(folder) for folder in folders), *versions, sys.version, platform.machine(),
        str(torch.__version__), str(torch.version.git_version),
    )  # fmt: skip


def _costs_name(place: Place) -> str:
    label = re.sub(r"[^\w.-]+", "-", f"{place.label()}-torch-{torch.__version__}")
    return f"costs-{label}.json"


def _costs_file(target: Target, kind: str) -> tuple[str, bytes] | None:
    """The measurements that a plan for this target was scheduled by, as a file; None if there are none."""
    place = target.place(kind)
    if place is None or target.costs is None or target.costs == Costs():
        return None
    return _costs_name(place), json.dumps(target.costs.to_json()).encode()
