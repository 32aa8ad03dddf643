"""Detect that the disk with the logs is full, and mention it in errors that it explains."""

from __future__ import annotations

import errno
import os

__all__ = ["full_disk", "is_full"]

LEFT = 1 << 16  # bytes; a disk with less counts as full, since a single write may be larger


def is_full(folder: str) -> bool:
    """Whether nothing more can be written to a folder's disk."""
    try:
        found = os.statvfs(folder)  # psutil does not report inodes
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < LEFT or (found.f_files > 0 and found.f_favail == 0)


def full_disk(error: BaseException, rank: int, folder: str) -> str:
    """A text for an error caused by a full disk of a rank's logs; empty for any other error."""
    seen: set[int] = set()
    while not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        behind = error.__cause__ or error.__context__
        if behind is None or id(behind) in seen:
            return ""
        seen.add(id(behind))
        error = behind
    if not rank or not is_full(folder):  # rank 0 prints to the terminal
        return ""
    return (
        f"the disk with the logs of rank {rank} is full ({folder}): make room there, print less, or give another "
        f"folder with --log-dir"
    )
