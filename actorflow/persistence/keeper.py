"""Keep the last checkpoints of a run, and go on from the newest one (``flow.checkpoint.Keeper``)."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from actorflow.control import cluster as clusters
from actorflow.control.regroup import regroup, should_regroup
from actorflow.persistence.folders import FoundCheckpoint, checkpoints_in, open_checkpoint, plans_beside
from actorflow.persistence.loading import Loaded, load_found, verified
from actorflow.persistence.manifest import MANIFEST, OWN_FILE
from actorflow.persistence.memory_folder import MemoryFolder, find_in_memory
from actorflow.persistence.neighbour_copies import KeptCopies
from actorflow.persistence.objects import as_object, is_loaded
from actorflow.persistence.saving import Saving, begin_save, finish_saves, refuse_in_step
from actorflow.persistence.storage import Folder, open_folder
from actorflow.persistence.stored import is_unread
from actorflow.session.plan_store import KEPT
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import StateError

__all__ = ["Keeper"]

LOOKS = 10  # times that a rank looks at the clock within ``every_seconds``


def _is_ours(folder: Folder) -> bool:
    """Whether a folder holds nothing but what a save has written."""
    files = folder.files()
    return bool(files) and not folder.folders() and all(n == MANIFEST or OWN_FILE.fullmatch(n) for n in files)


def _last_name(found: FoundCheckpoint) -> str:
    """The name of a checkpoint's folder."""
    return found.folder.path.rstrip("/").rpartition("/")[2]


class Keeper:
    """Saves every so many steps, keeps the last checkpoints, and resumes from the newest whole one.

    ``objects`` are what ``flow.checkpoint.save`` takes.  ``every``: steps from one checkpoint to the next;
    ``every_seconds``: seconds, as the master's clock says; with both, whichever comes first.  ``keep``: how many
    checkpoints stay; an older one is removed once a newer one is complete.

    ``neighbours``: on so many other nodes there are copies of each checkpoint in memory, too, from which a run that
    ``actorflow run --max-restarts`` starts again goes on without reading a disk, after the loss of that many nodes.
    ``disk_every``: then only checkpoints this many steps after the last one in the folder are written there, too.

    >>> keeper = flow.checkpoint.Keeper("runs/a", model=model, optimizer=optimizer, every=500, keep=3)
    >>> for step in keeper.steps(10_000):
    ...     loss = train_step(*batch(step))

    Every rank must do the same.  Raises StateError for values that make no sense.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        /,
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        keep: int | None = 3,
        random: bool = True,
        neighbours: int | None = None,
        disk_every: int | None = None,
        **objects: Any,
    ) -> None:
        numbers = (("every", every), ("keep", keep), ("neighbours", neighbours), ("disk_every", disk_every))
        for name, value in numbers:
            if value is not None and (type(value) is not int or value < (name != "neighbours")):
                least = int(name != "neighbours")
                raise StateError(f"{name}={value!r} was found; a number from {least} on, or None, was expected")
        if disk_every is not None and neighbours is None:
            raise StateError(
                "disk_every= without neighbours= was found; every= says how often a Keeper writes to its folder"
            )
        if every_seconds is not None and not every_seconds > 0:
            raise StateError(f"every_seconds={every_seconds!r} was found; more than 0, or None, was expected")
        if every is None and every_seconds is None:
            raise StateError("a Keeper without every= and every_seconds= would never save; one of them was expected")
        if not objects:
            raise StateError("a Keeper without objects was found; model=model, for example, was expected")
        self._root = open_folder(path)
        self._objects, self._random = objects, random
        self._every, self._seconds, self._keep = every, every_seconds, keep
        self._last = -1  # the last step that was saved, or loaded
        self._saved_at = time.monotonic()
        self._next_look = 0  # the step at which the ranks ask the master's clock again
        self._looked = (time.monotonic(), 0)  # when they did so last, and at which step
        self._disk_every = disk_every
        self._on_disk = -1  # the last step that was saved in the folder, or loaded
        self._kept = self._where_kept(neighbours)
        self._saving: Saving | None = None  # the last one
        self._resumed: Loaded | None = None
        self._asked = False
        KEPT.keep_in(plans_beside(self._root))
        if clusters.current().settings.max_restarts and self._root.path.startswith("memory://"):
            self._say(
                f"the checkpoints in {self._root.path!r} end with this process: when the run starts again "
                f"(--max-restarts), it begins at its first step"
            )

    def resume(self) -> Loaded | None:
        """Load the newest checkpoint that is whole; None if there is none.  Done once; ``steps`` does it.

        Checkpoints that are not whole or damaged are named on rank 0, and ignored.  Raises StateError, on every rank,
        if the newest whole one does not fit the objects.
        """
        refuse_in_step("a Keeper")
        if self._asked:
            return self._resumed
        self._asked = True
        finish_saves()
        objects = {name: as_object(value) for name, value in self._objects.items() if is_loaded(value)}
        for found in self._candidates():
            state = None if found.problem else found.state
            problem = verified(found, state)
            if state is not None and not problem:
                self._resumed = load_found(found, state, objects, self._random, checked=True, strict=True)
                self._last = -1 if found.step is None else found.step
                self._on_disk = self._on_disk if isinstance(found.folder, MemoryFolder) else self._last
                self._next_look = self._last + 1
                return self._resumed
            self._say(f"{problem}; it is ignored")
        return None

    @property
    def start(self) -> int:
        """The number of the first step that is still to be done: 0, or the one behind that of the loaded checkpoint."""
        self.resume()
        return self._last + 1

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are still to be done, up to ``total``.

        After each, what ``step`` does is done; the last step is saved, too, and the checkpoint awaited.
        """
        for number in range(self.start, total):
            yield number
            if number < total - 1:
                self.step(number)
        if self._on_disk < total - 1 and total > 0:
            self.save(total - 1)
        self.wait()

    def step(self, number: int, **values: Any) -> Saving | None:
        """Step ``number`` has been done: save if it is time to.  ``values`` are saved beside the objects.

        Returns the handle of a save that has begun, or None.  Where nodes wait to be taken in (``actorflow run
        --nnodes MIN:MAX``), all scripts end once the save is complete (SystemExit), and start again with them.
        """
        self.resume()
        if not self._due(number):
            return None
        on_disk = self._kept is None or self._disk_every is None or number - self._on_disk >= self._disk_every
        saving = self._save(number, values, on_disk)
        if should_regroup(clusters.current()):
            self._say(f"nodes have come: the run starts again with them behind step {number}")
            saving.wait()
            regroup(clusters.current())
        return saving

    def save(self, number: int, **values: Any) -> Saving:
        """Save now, as the state after step ``number``; see ``flow.checkpoint.save``."""
        return self._save(number, values, on_disk=True)

    def _save(self, number: int, values: Mapping[str, Any], on_disk: bool) -> Saving:
        both = sorted(values.keys() & self._objects.keys())
        if both:
            raise StateError(f"{', '.join(both)} was given to the Keeper and for this step; another name was expected")
        self._last, self._saved_at = number, time.monotonic()
        self._on_disk = number if on_disk else self._on_disk
        everything = {**self._objects, **values}
        self._saving = begin_save(self._root.path, everything, number, self._random, self._prune, self._kept, on_disk)
        return self._saving

    def wait(self) -> None:
        """Wait for the save that is under way, if any.  Raises StateError if it failed."""
        if self._saving is not None:
            self._saving.wait()

    def _due(self, number: int) -> bool:
        if self._every is not None and number - self._last >= self._every:
            return True
        return self._seconds is not None and number >= self._next_look and self._time_has_come(number)

    def _time_has_come(self, number: int) -> bool:
        """Whether the master's clock says that it is time, and at which step it is to be asked again."""
        run, now = clusters.current(), time.monotonic()
        assert self._seconds is not None
        said = None
        if run.rank == 0:
            when, at = self._looked
            pace = (now - when) / max(1, number - at)  # seconds for each step
            rest = max(1, int(self._seconds / LOOKS / max(pace, 1e-9)))
            said = [json.dumps([now - self._saved_at >= self._seconds, min(rest, 1000)]).encode()] * run.world
        due, rest = json.loads(run.scatter("flow.checkpoint.Keeper: is it time", said))
        self._looked, self._next_look = (now, number), number + rest
        return bool(due)

    def _where_kept(self, neighbours: int | None) -> KeptCopies | None:
        """Where copies in memory are; None where there are none."""
        if neighbours is None:
            return None
        holder = clusters.current().settings.held_files
        if not holder:
            self._say(
                f"neighbours={neighbours} keeps nothing: no launcher would start this script again, as "
                f"`actorflow run --max-restarts` does"
            )
            return None
        what = [self._root.path, sorted(self._objects)]  # other Keepers have copies of their own
        key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
        return KeptCopies(holder, key, neighbours)

    def _candidates(self) -> Iterator[FoundCheckpoint]:
        """The whole checkpoints, the newest first, as the master finds them: in memory, and in the folder."""
        run = clusters.current()
        steps: list[tuple[int, str]] = []
        problem = ""
        if run.rank == 0:
            try:
                for found in checkpoints_in(self._root):
                    if found.manifest is None:
                        self._say(f"{found.problem}; it is ignored")
                    else:
                        steps.append((-1 if found.step is None else found.step, _last_name(found)))
            except OSError as error:
                problem = f"the folder {self._root.path!r} cannot be read: {error}"
        said = None if run.rank else [json.dumps([problem, steps]).encode()] * run.world
        problem, steps = json.loads(run.scatter("flow.checkpoint.Keeper: resume", said))
        if problem:
            raise StateError(problem)
        in_memory = None if self._kept is None else find_in_memory(run, self._kept)
        for step, name in steps:
            if in_memory is not None and in_memory.step is not None and in_memory.step >= step:
                yield in_memory
                in_memory = None
            yield open_checkpoint(self._root.sub(name))
        if in_memory is not None:
            yield in_memory

    def _prune(self, folder: Folder) -> None:
        """On the master, when a checkpoint is complete: remove what is older than the last that are kept."""
        if self._keep is None:
            return
        left = self._keep
        for found in checkpoints_in(self._root):
            if found.manifest is not None and left:
                left -= 1
            elif found.folder.path != folder.path and _is_ours(old := self._root.sub(_last_name(found))):
                if is_unread(found.folder.path):
                    continue
                with suppress(OSError):  # it stays, and is removed with the next
                    old.remove_all()

    def _say(self, text: str) -> None:
        if clusters.current().rank == 0:
            say(text)
