"""Temporary folders that say which process they belong to, so that those of dead processes can be removed.

A process that is killed removes nothing.  The next start of a run finds what it has left: a folder of this user with a
file that names its owner by process id and start, by which a later process of the same id is told from it.  A folder
whose owner lives, or cannot be known from here (another boot, another container), stays; so does one without such a
file, as are folders of logs.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["birth", "make_owned_folder", "owned_folder", "remove_leftovers", "remove_owned_folder"]

BEGINNING = "actorflow-"  # of the names of all these folders
OWNER = "owner.json"  # the file in each that says who has made it


def birth(pid: int) -> int:
    """When a process began, in the kernel's ticks since boot, to tell it from a later process with the same pid.

    Raises OSError if the process has ended.  psutil gives a time of day, which changes when the clock is set.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def make_owned_folder(kind: str = "") -> str:
    """Make a folder for temporary files of this process, which its user alone can enter; ``kind`` is in its name.

    Raises OSError where there is no room for it.
    """
    folder = tempfile.mkdtemp(prefix=f"{BEGINNING}{kind}{'-' if kind else ''}")  # of mode 0700
    with suppress(OSError):  # where a process cannot be told from a later one, its folder stays
        owner = {"pid": os.getpid(), "birth": birth(os.getpid()), "where": _where()}
        Path(folder, OWNER).write_text(json.dumps(owner))
    return folder


@contextmanager
def owned_folder(kind: str) -> Iterator[str]:
    """A folder as of ``make_owned_folder``, which is removed at the end of the block."""
    folder = make_owned_folder(kind)
    try:
        yield folder
    finally:
        remove_owned_folder(folder)


def remove_owned_folder(folder: str) -> None:
    """Remove a folder of ``make_owned_folder``, also while others write files to it, who find it gone."""
    gone = f"{folder}.gone"
    with suppress(OSError):
        os.rename(folder, gone)
        folder = gone
    shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> list[str]:
    """Remove the folders of this user's processes that have ended without doing so; returns which they were."""
    removed = []
    with suppress(OSError):  # there is no folder for temporary files, or this user cannot list it
        for entry in list(os.scandir(tempfile.gettempdir())):
            if entry.name.startswith(BEGINNING) and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.path)
    return removed


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Whether a folder is one of those, and its owner is known to have ended."""
    try:
        found = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        owner = json.loads(Path(entry.path, OWNER).read_text())
        pid, began, where = int(owner["pid"]), int(owner["birth"]), owner["where"]
        if where != _where():
            return False
    except (OSError, ValueError, TypeError, KeyError):  # it is none of those, or is just being made or removed
        return False
    return _has_ended(pid, began)


def _has_ended(pid: int, began: int) -> bool:
    try:
        return birth(pid) != began
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):  # nothing is known
        return False


def _where() -> str:
    """What a process id is unique in: the boot of the machine, and the container."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
