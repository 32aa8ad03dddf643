"""List the checkpoints of a folder, one for each step; those without a complete manifest are ignored."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from actorflow.persistence.manifest import MANIFEST, Manifest, read_manifest
from actorflow.persistence.storage import Folder, ReadableFolder, open_folder
from actorflow.persistence.stored import StoredFile, StoredState
from actorflow_compiler.core.errors import StateError

__all__ = [
    "FoundCheckpoint", "checkpoints_in", "open_checkpoint", "plans_beside", "step_folder", "step_name", "step_of",
]  # fmt: skip

PLANS = "plans"  # the folder of compiled plans, beside checkpoints or in one
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A folder that is a checkpoint, or was to become one."""

    folder: ReadableFolder
    step: int | None
    manifest: Manifest | None  # None if it is no whole checkpoint
    problem: str = ""  # then why; a text for people

    @property
    def state(self) -> StoredState:
        """Its tensors, in files that are not open yet."""
        assert self.manifest is not None
        files = [StoredFile(self.folder, record) for record in self.manifest.files]
        source = f"checkpoint {zlib.crc32(self.manifest.to_json()):08x}"
        return StoredState(dict(self.manifest.tensors), files, source, self.folder.path)


def step_folder(folder: Folder, step: int) -> Folder:
    """The folder for a step's checkpoint."""
    return folder.sub(step_name(step))


def step_name(step: int) -> str:
    """The name of that folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name, or None."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


def plans_beside(folder: Folder) -> Folder:
    """The folder of the plans that belong to a folder of checkpoints, or to one; those of steps have one in common."""
    around, _, name = folder.path.rstrip("/").rpartition("/")
    of_step = step_of(name) is not None and not around.endswith("/") and around  # else nothing is around it
    return (open_folder(around) if of_step else folder).sub(PLANS)


def open_checkpoint(folder: Folder) -> FoundCheckpoint:
    """The checkpoint in a folder: its manifest must be whole, and its files there with their sizes.

    Raises FileNotFoundError if the folder has no manifest, and OSError.
    """
    step = step_of(folder.path.rstrip("/").rpartition("/")[2])
    try:
        manifest = read_manifest(folder)
    except StateError as error:
        return FoundCheckpoint(folder, step, None, str(error))
    there = folder.files()
    for file in manifest.files:
        if file.name not in there:
            return FoundCheckpoint(folder, manifest.step, None, f"{folder.path}/{file.name} is missing")
        if there[file.name] != file.size:
            return FoundCheckpoint(
                folder, manifest.step, None,
                f"{folder.path}/{file.name} has {there[file.name]} bytes, and {file.size} were written",
            )  # fmt: skip
    return FoundCheckpoint(folder, manifest.step, manifest)


def checkpoints_in(folder: Folder) -> list[FoundCheckpoint]:
    """The checkpoints of all steps in a folder, whole or not, the newest first.  Raises OSError."""
    steps = sorted(((step, name) for name in folder.folders() if (step := step_of(name)) is not None), reverse=True)
    found = []
    for step, name in steps:
        sub = folder.sub(name)
        try:
            found.append(open_checkpoint(sub))
        except FileNotFoundError:
            found.append(FoundCheckpoint(sub, step, None, f"{sub.path} has no {MANIFEST}: its save did not end"))
    return found
