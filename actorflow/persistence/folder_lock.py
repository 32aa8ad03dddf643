"""One run at a time writes to a folder of checkpoints: a lock that says who has it."""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from actorflow.persistence.storage import Folder, LocalFolder
from actorflow_compiler.core.errors import StateError

__all__ = ["FolderLock", "lock_folder"]

NAME = ".actorflow-lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS}  # of file systems that have none


class FolderLock:
    """This process's right to write to a folder.

    On a file system it is a lock that ends with the process, however it ends.  Elsewhere, the last run that took it has
    it: one that lost it learns so before it completes a checkpoint.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._id = uuid.uuid4().hex
        self._fd = -1
        text = json.dumps({
            "id": self._id, "host": socket.gethostname(), "pid": os.getpid(), "user": _user(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        })  # fmt: skip
        if isinstance(folder, LocalFolder):
            self._take(Path(folder.path) / NAME, text)
        else:
            folder.put(NAME, text.encode())

    def _take(self, path: Path, text: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                self._folder.put(NAME, text.encode())
                os.close(fd)
                return
            held = _who(os.read(fd, 4096))
            os.close(fd)
            raise StateError(
                f"another run writes checkpoints to {self._folder.path!r}: {held}; expected: a folder for each run, "
                f"or that run to have ended"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
        self._fd = fd

    def check(self) -> None:
        """Raise StateError if another run has taken the folder over."""
        if self._fd >= 0:
            return
        said = b""
        with suppress(FileNotFoundError):
            said = self._folder.get(NAME)
        if self._id.encode() not in said:
            raise StateError(
                f"another run has begun to write checkpoints to {self._folder.path!r}: {_who(said)}; expected: a "
                f"folder for each run"
            )


_held: dict[str, FolderLock] = {}  # by path


def lock_folder(folder: Folder) -> FolderLock:
    """This process's lock of a folder, taken now unless it is held.  Raises StateError and OSError."""
    key = str(Path(folder.path).resolve()) if isinstance(folder, LocalFolder) else folder.path
    if key not in _held:
        _held[key] = FolderLock(folder)
    return _held[key]


def _who(said: bytes) -> str:
    try:
        one = json.loads(said)
        return f"process {one['pid']} of {one['user']} on host {one['host']}, since {one['since']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said who it is"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
