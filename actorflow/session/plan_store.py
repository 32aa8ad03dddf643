"""Keep compiled plans in folders, by the digest of what they are made from, so that a start does not compile again.

A folder holds, beside files of others, which nobody touches:

    plan-DIGEST.actorflow   a plan: a line of text, a checksum, what it was made from (JSON), and the plan as protobuf
    step-DIGEST.actorflow   what the capture of a step has found (``kept_capture``), by what the capture reads
    costs-LABEL.json        the measurements of the machine by which plans were scheduled
    plans.json              the names of the plans and steps, those used last at the end

The folders are that of the user's cache, for all runs, and those beside checkpoints.  Only the master reads and writes.
Nothing here fails a run, unless the script has named a plan itself (``load``): what cannot be read is compiled, what
cannot be written is said once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

import actorflow_protos
import actorflow_scheduler
from actorflow.runtime.measured_costs import Costs, Place, Target, read
from actorflow.support.terminal import say
from actorflow.support.user_folder import UserFolder
from actorflow_compiler import reuse
from actorflow_compiler.core.cache_folder import CACHE_VARIABLE, cache_folder
from actorflow_compiler.core.digest import NoDigest, digest_of, digest_of_code
from actorflow_compiler.core.errors import ActorflowError, PlanError
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.proto import from_bytes, to_bytes

__all__ = ["KEPT", "KeptPlan", "PlanFolder", "PlanKey", "PlanStore", "code_parts", "file_of"]

SWITCH = "ACTORFLOW_CACHE_PLANS"  # environment variable: 0 keeps plans out of the cache, but not the rest
CAPTURES = "ACTORFLOW_CACHE_CAPTURES"  # … 1 keeps what captures find with plans, and spares the next start the capture
FORMAT = 3  # of the files; increase it when their form changes
HEAD = b"actorflow plan %d\n" % FORMAT
STEP_HEAD = b"actorflow step %d\n" % FORMAT
NAME = re.compile(r"(plan|step)-([0-9a-f]{64})\.actorflow")
USED = "plans.json"
MOST = 32  # plans in a folder beside checkpoints, and in memory
MOST_BYTES = 256 << 20  # … and bytes; the one used last stays in any case
CACHE_MOST, CACHE_MOST_BYTES = 256, 512 << 20  # … in the user's cache
WHERE = "where the ranks are"
# the parts of a key in which a plan that the script names may differ: times alone depend on them, and any plan is legal
ANY = frozenset({"the measured costs of the devices", WHERE})
EARLIER = "what earlier plans and calls have left"  # … in which a plan that a runtime state brings may
LARGEST = 2 << 30  # bytes of a file that is read; protobuf allows no more
FOLDERS = 4  # in which plans are looked for, those named last


T = TypeVar("T")


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
class PlanKey:
    """All that a plan is made from."""

    parts: Mapping[str, str]  # what people call a part → its digest
    said: Mapping[str, str]  # … → a text for people, of those that have one

    @property
    def digest(self) -> str:
        """One digest of all parts, in hexadecimal digits."""
        return digest_of((FORMAT, tuple(self.parts.items())))

    def differences(self, other: PlanKey) -> list[str]:
        """The parts in which another key differs, for people, but for those on which times alone depend."""
        names = [name for name in {**self.parts, **other.parts} if name not in ANY]
        return [
            f"{name} ({self.said[name]}; now {other.said[name]})" if name in self.said and name in other.said else name
            for name in names
            if self.parts.get(name) != other.parts.get(name)
        ]

    def to_json(self) -> dict[str, Any]:
        """The key as JSON data."""
        return {"parts": dict(self.parts), "said": dict(self.said)}

    @staticmethod
    def from_json(data: Any) -> PlanKey:
        """The key of data that ``to_json`` made.  Raises PlanError for other data."""
        try:
            parts, said = ({str(k): str(v) for k, v in data[name].items()} for name in ("parts", "said"))
        except (TypeError, KeyError, AttributeError):
            raise PlanError("it does not say what its plan was made from") from None
        return PlanKey(parts, said)


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan that was found."""

    plan: Plan
    folder: str  # where


@dataclass(frozen=True, slots=True)
class _Made:
    """A file of this process, and the measurements that its plan was scheduled by."""

    data: bytes  # of the file
    costs: tuple[str, bytes] | None  # a file's name and contents; None: it was scheduled without


@dataclass(frozen=True, slots=True)
class _NamedPlan:
    """A plan that the script has named, or that a runtime state has brought."""

    path: str  # where it is from, for people
    key: PlanKey
    plan: Plan
    required: bool = True  # whether it is an error if this plan does not fit; else the step is compiled
    used: bool = False  # whether the job has its first plan from one of these, or none of them fits

    def differences(self, key: PlanKey) -> list[str]:
        """What keeps the plan from being that of a key, for people.

        Of what earlier plans of the run have left, a plan of a runtime state depends by its layouts alone, and any
        layout is legal that the run's variables do not have otherwise, which is checked when it is taken.
        """
        found = self.key.differences(key)
        return found if self.required else [one for one in found if one != EARLIER]


class PlanStore:
    """The folders of this process in which plans are kept, and the plans that it has made."""

    def __init__(self) -> None:
        self._folders: dict[str, PlanFolder] = {}  # by path; those named last at the end
        self._keeping: PlanFolder | None = None  # beside which checkpoints plans are kept; None: not yet known
        self._cache: tuple[Path | None, UserFolder | None] = (None, None)  # the path asked for, and its folder
        self._named: dict[str, list[_NamedPlan]] = {}  # job → the plans that the script has named for it
        self._made: dict[str, _Made] = {}  # name → a file; those used last at the end
        self._told: set[str] = set()
        self._bad: set[str] = set()  # files that are there, and cannot be used
        self._lock = threading.RLock()  # a save keeps plans from a thread of its own
        self.why: dict[str, str] = {}  # job → why its last plan has no key
        self.taken = 0  # plans that were not compiled
        self.skipped = 0  # steps that were not captured

    def forget(self) -> None:
        """Begin anew, as in a new process."""
        self.__init__()  # type: ignore[misc]

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
                self._write(folder, tuple(self._made))

    def _user_folder(self) -> UserFolder | None:
        """The folder of the user's cache, for plans of all runs; None where it is switched off, or not to be used."""
        given = os.environ.get(CACHE_VARIABLE)
        path = None if os.environ.get(SWITCH, "1") in ("", "0") else cache_folder()
        if path != self._cache[0]:
            folder = None if path is None else UserFolder(path / "plans")
            try:
                if folder is not None:
                    folder.make()
            except OSError as error:
                if given is not None or isinstance(error, UserFolder.Unsafe):  # else there is just no such folder here
                    self._say(f"plans are not kept for later runs: {error}")
                folder = None
            self._cache = path, folder
        return self._cache[1]

    def _places(self) -> list[PlanFolder]:
        """The folders in which plans are looked for, in order."""
        cache = self._user_folder()
        return [*reversed(self._folders.values()), *([] if cache is None else [cache])]

    def _look_for(self, name: str, read: Callable[[bytes], T], instead: str) -> tuple[T, str] | None:
        """What ``read`` makes of the first file of this name that it can read, and the folder, or None.

        A file that cannot be read is told of, and what is done ``instead``.
        """
        for folder in self._places():
            try:
                if not 0 < folder.files().get(name, 0) <= LARGEST:
                    continue
                data = folder.get(name)
                found = read(data)
            except FileNotFoundError:
                continue
            except Exception as error:  # a file that somebody has written by hand may fail in any way
                kind = "" if isinstance(error, ActorflowError | OSError) else f"{type(error).__name__}: "
                self._bad.add(f"{folder.path}/{name}")
                self._say(f"{folder.path}/{name} is ignored, and {instead}: {kind}{error}")
                continue
            self._use(name, _Made(data, None))
            return found, folder.path
        return None

    # -- plans -------------------------------------------------------------------------------------

    def key(self, job: str, what: Callable[[], Mapping[str, tuple[Any, str]]]) -> PlanKey | None:
        """The key of a plan of this job, by all code that makes plans and by ``what``; None if there is none.

        ``what`` returns the parts by name, each with a text for people, or an empty one.
        """
        try:
            parts = {**code_parts(), **what()}
            return PlanKey(
                {name: digest_of(part) for name, (part, _) in parts.items()},
                {name: text for name, (_, text) in parts.items() if text},
            )
        except NoDigest as error:
            self.why[job] = str(error)
            if self._folders:
                self._say(f"the plan of {job} is not kept: it depends on {error}")
            return None

    def find(self, key: PlanKey, check: Callable[[Plan], Plan]) -> KeptPlan | None:
        """The plan of a key, once ``check`` has returned it; None if there is none, or only one that is not whole.

        ``check`` raises ActorflowError for a plan that is not as it must be.
        """

        def opened(data: bytes) -> Plan:
            found, plan = _opened(data)
            if found.digest != key.digest:
                raise PlanError("it is another plan's")
            return check(from_bytes(plan))

        with self._lock:
            found = self._look_for(f"plan-{key.digest}.actorflow", opened, "the plan compiled")
            if found is None:
                return None
            self.taken += 1
            return KeptPlan(*found)

    def add(self, key: PlanKey, plan: Plan, target: Target, kind: str) -> None:
        """Keep a plan that was compiled for a target, with the measurements of this kind of device."""
        with self._lock, suppress(PlanError):  # too large for protobuf
            self._use(f"plan-{key.digest}.actorflow", _Made(file_of(key, plan), _costs_file(target, kind)))

    # -- steps -------------------------------------------------------------------------------------

    @property
    def is_kept(self) -> bool:
        """Whether there is any folder for plans."""
        return bool(self._places())

    def names_a_plan(self, job: str) -> bool:
        """Whether the script has named a plan for the job that has not been used yet."""
        return any(not one.used for one in self._named.get(job, ()))

    def find_step(self, digest: str) -> Any:
        """What was found when a step was captured, as JSON data; None if nothing is kept for this digest."""
        with self._lock:
            found = self._look_for(
                f"step-{digest}.actorflow", lambda data: json.loads(_checked(data, STEP_HEAD)), "the step captured"
            )
            return None if found is None else found[0]

    def add_step(self, digest: str, found: Any) -> None:
        """Keep what was found when a step was captured, as JSON data; it replaces what was kept for this digest."""
        name = f"step-{digest}.actorflow"
        with self._lock:
            places = [] if self._keeping is None else [self._keeping]
            self._bad.update(f"{folder.path}/{name}" for folder in (*places, *self._places()))
            self._use(name, _Made(_sealed(STEP_HEAD, json.dumps(found).encode()), None))

    # -- plans that the script names ---------------------------------------------------------------

    def load(self, path: Path) -> None:
        """Use the plan in a file for the first call of its job.  Raises PlanError for a file that has none."""
        try:
            key, data = _opened(path.read_bytes())
            plan = from_bytes(data)
        except OSError as error:
            raise PlanError(f"the plan {path} cannot be read: {error.strerror or error}") from None
        except PlanError as error:
            raise PlanError(f"{path} has no plan to load: {error}; flow.save_plan writes them") from None
        with self._lock:
            self._named.setdefault(plan.name, []).append(_NamedPlan(str(path), key, plan))

    def offer(self, job: str, files: Iterable[bytes], source: str) -> None:
        """Have a job use the first of these plans that fits its first call, in place of those offered before.

        Where none fits, that is said, with what differs, and the step is compiled.  ``source`` says where they are
        from.  A file that cannot be read is named, and left out.
        """
        offered = []
        for data in files:
            try:
                key, plan = _opened(data)
                offered.append(_NamedPlan(source, key, from_bytes(plan), required=False))
            except PlanError as error:
                self._say(f"a plan in {source} is not used: {error}")
        with self._lock:
            named = [one for one in self._named.get(job, []) if one.required]
            self._named[job] = named + [one for one in offered if one.plan.name == job]

    def named(self, job: str, key: PlanKey | None, check: Callable[[Plan], Plan]) -> KeptPlan | None:
        """The plan for this key among those that the script has named for the job; None if it has named none.

        Raises PlanError if none of them fits the first plan that the job needs, and what ``check`` raises; of plans
        that a runtime state has brought, it says so instead.
        """
        with self._lock:
            given = self._named.get(job, [])
            fits = [one for one in given if key is not None and not one.differences(key)]
            fits.sort(key=lambda one: key is not None and bool(one.key.differences(key)))  # those of the same key first
            used = not given or given[0].used
            if fits or not any(one.required for one in given):  # what the script has named is refused again and again
                self._named[job] = [replace(one, used=True) for one in given]
            wrong: list[str] = []
            for found in fits:
                try:
                    plan = check(found.plan)
                except ActorflowError as error:
                    if found.required:
                        raise PlanError(f"{found.path} cannot be used: {error}") from None
                    wrong.append(f"  {found.path}: {error}")
                    continue
                self.taken += 1
                return KeptPlan(plan, found.path)
            if used:
                return None
            if key is None:
                wrong = [f"  it depends on {self.why[job]}, which cannot be compared between processes"]
            elif not wrong:
                wrong = sorted({f"  {one.path}: {', '.join(one.differences(key))}" for one in given})
            self._tell_misfit(job, key, given, "\n".join(wrong))
            return None

    def _tell_misfit(self, job: str, key: PlanKey | None, given: Sequence[_NamedPlan], lines: str) -> None:
        """Raise PlanError that none of the plans that the script has named fits; of offered plans say it."""
        required = [one for one in given if one.required]
        if not required:
            self._say(f"{job} is compiled, as no plan of {given[0].path} fits it; what differs:\n{lines}")
            return
        if key is None:
            raise PlanError(
                f"{required[0].path} cannot be compared with this call of {job}, which depends on {self.why[job]}; "
                f"leave flow.load_plan out"
            )
        raise PlanError(
            f"job {job!r} needs another plan than the loaded one; what differs:\n{lines}\n"
            "expected: the call, script and devices that the plan was saved with; or leave flow.load_plan out, and "
            "the step is compiled"
        )

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

    def _use(self, name: str, made: _Made) -> None:
        """Count a file as the one used last, and keep it where plans are kept."""
        self._made.pop(name, None)
        self._made[name] = made
        while len(self._made) > 1 and (
            len(self._made) > 2 * MOST or sum(len(one.data) for one in self._made.values()) > MOST_BYTES
        ):
            del self._made[next(iter(self._made))]
        if self._keeping is not None:
            self._write(self._keeping, (name,))
        if (cache := self._user_folder()) is not None:
            self._write(cache, (name,))

    def _write(self, folder: PlanFolder, names: tuple[str, ...]) -> None:
        """Write the files that are not there yet, and remove those for which there is no room."""
        try:
            there = folder.files()
            folder.make()
            for name in names:
                made = self._made[name]
                if there.get(name) != len(made.data) or f"{folder.path}/{name}" in self._bad:
                    folder.put(name, made.data)
                    self._bad.discard(f"{folder.path}/{name}")
                costs, data = made.costs or ("", b"")
                if costs and not isinstance(folder, UserFolder) and (costs not in there or folder.get(costs) != data):
                    folder.put(costs, data)
            self._tidy(folder, names)
        except OSError as error:
            self._say(f"plans cannot be kept in {folder.path}, and are compiled again at the next start: {error}")

    def _tidy(self, folder: PlanFolder, used: tuple[str, ...]) -> None:
        """Note the order in which files were used, and remove those used longest ago.  Raises OSError."""
        there = folder.files()
        sizes = {name: size for name, size in there.items() if NAME.fullmatch(name)}
        before: list[str] = []
        with suppress(FileNotFoundError, ValueError, RecursionError):
            said = json.loads(folder.get(USED) if USED in there else b"[]")
            before = [one for one in said if isinstance(one, str)] if isinstance(said, list) else []
        known = dict.fromkeys(one for one in before if one in sizes and one not in used)
        order = [*(one for one in sorted(sizes) if one not in known and one not in used), *known]
        order += [one for one in used if one in sizes]
        most, most_bytes = (CACHE_MOST, CACHE_MOST_BYTES) if isinstance(folder, UserFolder) else (MOST, MOST_BYTES)
        for kind in ("plan", "step"):
            for name in [one for one in order if one.startswith(kind)][:-most]:
                folder.remove(name)
                order.remove(name)
        last = {one[:4]: one for one in order}.values()  # of each kind, which stay in any case
        size = sum(sizes[one] for one in order)  # bytes of all that stay
        for name in [one for one in order if one not in last]:
            if size <= most_bytes:
                break
            folder.remove(name)
            order.remove(name)
            size -= sizes[name]
        if order != before:
            folder.put(USED, json.dumps(order).encode())

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            say(text)


KEPT = PlanStore()  # of this process


def file_of(key: PlanKey, plan: Plan) -> bytes:
    """A plan and its key as the bytes of a file.  Raises PlanError for a plan that is too large for protobuf."""
    return _closed(key, to_bytes(plan))


def _closed(key: PlanKey, plan: bytes) -> bytes:
    head = json.dumps(key.to_json()).encode()
    return _sealed(HEAD, len(head).to_bytes(8, "big") + head + plan)


def _sealed(head: bytes, body: bytes) -> bytes:
    return head + hashlib.sha256(body).digest() + body


def _checked(data: bytes, head: bytes) -> bytes:
    """What ``_sealed`` has been given.  Raises PlanError for a file that is not whole, or of another version."""
    if not data.startswith(head):
        raise PlanError("it is no plan of this version")
    body = data[len(head) + 32 :]
    if hashlib.sha256(body).digest() != data[len(head) : len(head) + 32]:
        raise PlanError("it is damaged")
    return body


def _opened(data: bytes) -> tuple[PlanKey, bytes]:
    """The key and the plan in a file.  Raises PlanError for a file that is not whole, or of another version."""
    body = _checked(data, HEAD)
    size = int.from_bytes(body[:8], "big")
    try:
        return PlanKey.from_json(json.loads(body[8 : 8 + size])), body[8 + size :]
    except (ValueError, RecursionError):
        raise PlanError("it does not say what its plan was made from") from None


@functools.cache
def code_parts() -> Mapping[str, tuple[Any, str]]:
    """All of our code that makes plans, and the versions of what it uses, as in ``key``.  Raises NoDigest."""
    folders = [Path(str(module.__file__)).parent for module in (reuse, actorflow_scheduler, actorflow_protos)]
    session = Path(__file__).parent
    folders += [session, session.parent / "runtime", session.parent / "auto_parallel"]
    versions = [importlib.metadata.version(name) for name in ("numpy", "scipy")]
    python, machine = sys.version.split()[0], platform.machine()
    return {
        "actorflow's own code": (tuple(map(digest_of_code, folders)), ""),
        "the version of torch": ((str(torch.__version__), str(torch.version.git_version)), str(torch.__version__)),
        "the version of Python or the machine": ((sys.version, machine), f"Python {python}, {machine}"),
        "the versions of NumPy and SciPy": (tuple(versions), ", ".join(versions)),
    }


def _costs_name(place: Place) -> str:
    label = re.sub(r"[^\w.-]+", "-", f"{place.label()}-torch-{torch.__version__}")
    return f"costs-{label}.json"


def _costs_file(target: Target, kind: str) -> tuple[str, bytes] | None:
    """The measurements that a plan for this target was scheduled by, as a file; None if there are none."""
    place = target.place(kind)
    if place is None or target.costs is None or target.costs == Costs():
        return None
    return _costs_name(place), json.dumps(target.costs.to_json()).encode()
