"""What is to be saved, and where: what a save is given on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actorflow.persistence.file_plan import FilePlan
from actorflow.persistence.folder_lock import FolderLock
from actorflow.persistence.storage import Folder

__all__ = ["SaveOrder"]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What is to be saved, and where; equal on all ranks, but for ``random`` and ``lock``."""

    number: int  # of the save
    folder: Folder
    on_disk: bool  # it is written to the folder; else there are copies in memory alone
    step: int | None
    objects: Mapping[str, Any]  # JSON
    plan: FilePlan
    random: Any  # the state of this rank's random generators as JSON, or None
    random_differs: bool  # the states of all ranks are kept
    lock: FolderLock | None  # the master's
