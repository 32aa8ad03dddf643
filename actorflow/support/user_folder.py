"""A folder on disk that belongs to this user alone, and is used by several processes at a time.

Whoever can write to it can change what is computed.  So a folder that others may write to, or that belongs to somebody
else, is refused, and so are such files in it.  Each use opens the folder, checks what it has opened, and works within
that, so that nothing can be exchanged in between.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["UserFolder"]

PART = ".part"  # ending of files that are being written
ABANDONED = 3600.0  # seconds after which such a file is a dead process's
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UserFolder:
    """A folder of files, by their names; see ``plan_store.PlanFolder``.

    All methods raise OSError where the file system does, and ``Unsafe``, which is one.
    """

    class Unsafe(PermissionError):
        """Others can change what is in the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> str:
        """The path, as in messages."""
        return str(self._path)

    def make(self) -> None:
        """Make the folder unless it exists, for this user alone, and remove what dead processes have left in it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self._path, 0o700)
        with self._opened() as folder:
            for entry in os.scandir(folder):
                with suppress(OSError):
                    if entry.name.endswith(PART) and time.time() - entry.stat().st_mtime > ABANDONED:
                        os.unlink(entry.name, dir_fd=folder)

    def files(self) -> dict[str, int]:
        """The sizes of the files in the folder, by name; empty if there is no such folder."""
        found = {}
        with suppress(FileNotFoundError, NotADirectoryError), self._opened() as folder:
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):  # another process has removed it
                    if entry.is_file(follow_symlinks=False):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_size
        return found

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it, as a whole or not at all."""
        part = f"{name}.{os.getpid()}-{secrets.token_hex(4)}{PART}"
        with self._opened() as folder:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(part, flags, 0o600, dir_fd=folder), "wb", buffering=0) as file:
                    left = memoryview(data)
                    while left:
                        left = left[file.write(left) :]
                os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise

    def get(self, name: str) -> bytes:
        """A whole file."""
        with self._opened() as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(name, flags, dir_fd=folder), "rb") as file:
                _check(os.fstat(file.fileno()), f"{self._path}/{name}", "600")
                return file.read()

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)

    def last_used(self) -> dict[str, float]:
        """When each file in the folder was written, or noted as used, in seconds; see ``note_use``."""
        found = {}
        with suppress(FileNotFoundError, NotADirectoryError), self._opened() as folder:
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime
        return found

    def note_use(self, name: str) -> None:
        """Count a file as the one used last."""
        with self._opened() as folder:
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    @contextmanager
    def locked(self, name: str, wait: bool) -> Iterator[bool]:
        """Hold the lock of this name, which is a file, against all other processes and threads.

        Gives False, and holds nothing, where another one has it; with ``wait`` it is waited for.  The system frees the
        lock of a process that ends in any way.
        """
        file = -1
        try:
            while file < 0:
                with self._opened() as folder:
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                    file = os.open(name, flags, 0o600, dir_fd=folder)
                    _check(os.fstat(file), f"{self._path}/{name}", "600")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    break
                with self._opened() as folder:
                    there = None
                    with suppress(FileNotFoundError):
                        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if there is None or not os.path.samestat(there, os.fstat(file)):  # removed in between
                    os.close(file)
                    file = -1
            else:
                yield True
                return
            yield False
        finally:
            if file >= 0:
                os.close(file)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder, opened and checked."""
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check(os.fstat(folder), self.path, "700")
            yield folder
        finally:
            os.close(folder)


def _check(there: os.stat_result, path: str, mode: str) -> None:
    """Raise ``Unsafe`` for what others can change."""
    if there.st_uid != os.geteuid():
        raise UserFolder.Unsafe(
            f"{path} belongs to another user (number {there.st_uid}), who could change what is computed; expected: "
            f"a folder of your own in ACTORFLOW_CACHE"
        )
    if there.st_mode & OTHERS_WRITE:
        raise UserFolder.Unsafe(
            f"others may write to {path}, and so change what is computed; expected: chmod {mode} {path}"
        )
