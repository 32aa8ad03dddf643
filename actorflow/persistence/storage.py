"""Folders of checkpoints, on a local disk or, through fsspec, anywhere else."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from actorflow_compiler.core.errors import StateError

__all__ = [
    "FileReader", "Folder", "LocalFolder", "NewFile", "RangeReader", "ReadableFolder", "RemoteFolder", "open_folder",
    "path_of",
]  # fmt: skip

_NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # of file systems that cannot sync a folder
PAGE = 4096  # bytes; writes past the page cache are of whole pages, and begin at one
PART = ".part"  # ends the name of a file that is being written and will be renamed


class NewFile(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Append bytes.  Raises OSError."""

    def close(self) -> None:
        """Make the file durable.  Raises OSError."""

    def abandon(self) -> None:
        """Stop writing, after an error."""


class RangeReader(Protocol):
    """A file of which ranges are read."""

    size: int  # bytes
    survives: bool = False  # it can be read when it has been removed
    reopens: bool = False  # it holds a descriptor, which may be closed, as the file can be opened again

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes from ``start`` to ``stop``, which lie in the file.  Raises OSError."""

    def read_into(self, start: int, out: memoryview) -> None:
        """Read bytes from ``start`` on, as many as ``out`` has, which lie in the file, into it.  Raises OSError."""
        out[:] = self.read(start, start + len(out))

    @property
    def version(self) -> Hashable:
        """What is another one once the file has been written to; None where the storage does not say."""
        return None


class ReadableFolder(Protocol):
    """A folder of files that are read; names are relative to it, and contain no slash."""

    @property
    def path(self) -> str:
        """The path or URL, as in messages."""

    def files(self) -> dict[str, int]:
        """The sizes of the files in the folder, by name; empty if there is no such folder."""

    def get(self, name: str) -> bytes:
        """A whole file.  Raises FileNotFoundError and other OSErrors."""

    def open(self, name: str) -> RangeReader:
        """Open a file for reading ranges of it, also after it was removed or replaced, where the storage can."""


class Folder(ReadableFolder, Protocol):
    """A folder of files that are read and written."""

    def sub(self, name: str) -> Folder:
        """A folder in this one, which need not exist."""

    def make(self) -> None:
        """Make the folder unless it exists.  Raises OSError."""

    def folders(self) -> list[str]:
        """The names of the folders in it."""

    def create(self, name: str) -> NewFile:
        """Begin to write a file; one of this name is overwritten."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it, as a whole or not at all, and durably."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def remove_all(self) -> None:
        """Remove the folder with all that is in it."""


def path_of(path: str | os.PathLike[str]) -> str:
    """A path or URL as text.  Raises StateError for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise StateError(f"{path!r} was found for a checkpoint's folder; a path or a URL such as 's3://…' was expected")
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise StateError(f"{text!r} was found for a checkpoint's folder; a path or a URL was expected")
    return text


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """The folder with this path or URL, which need not exist.  Raises StateError for a URL of an unknown kind."""
    text = path_of(path)
    if "://" not in text or text.startswith("file://"):
        return LocalFolder(Path(text.removeprefix("file://")).absolute())  # the script may change its folder meanwhile
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise StateError(
            f"the folder {text!r} cannot be opened: {error}; a path or a URL that fsspec knows was expected, and some "
            f"kinds need a package of their own (s3://: pip install s3fs)"
        ) from error
    return RemoteFolder(fs, root, text)


class LocalFolder:
    """See ``Folder``: on a file system of this machine, or one that is mounted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> str:
        """See ``Folder``."""
        return str(self._path)

    def sub(self, name: str) -> LocalFolder:
        """See ``Folder``."""
        return LocalFolder(self._path / name)

    def make(self) -> None:
        """See ``Folder``."""
        missing = [one for one in (self._path, *self._path.parents) if not one.exists()]
        self._path.mkdir(parents=True, exist_ok=True)
        for one in missing:
            _sync_folder(one.parent)

    def files(self) -> dict[str, int]:
        """See ``Folder``."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._path) as found:
            return {entry.name: entry.stat().st_size for entry in found if entry.is_file()}
        return {}

    def folders(self) -> list[str]:
        """See ``Folder``."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._path) as found:
            return sorted(entry.name for entry in found if entry.is_dir())
        return []

    def create(self, name: str) -> NewFile:
        """See ``Folder``."""
        return _LocalFile(self._path / name)

    def put(self, name: str, data: bytes) -> None:
        """See ``Folder``."""
        part = self._path / f"{name}{PART}"
        file = _LocalFile(part)
        try:
            file.write(memoryview(data))
            file.close()
        except BaseException:
            file.abandon()
            with suppress(OSError):
                part.unlink()
            raise
        os.replace(part, self._path / name)
        _sync_folder(self._path)

    def get(self, name: str) -> bytes:
        """See ``Folder``."""
        return (self._path / name).read_bytes()

    def open(self, name: str) -> RangeReader:
        """See ``Folder``."""
        return _LocalReader(self._path / name)

    def remove(self, name: str) -> None:
        """See ``Folder``."""
        with suppress(FileNotFoundError):
            os.unlink(self._path / name)

    def remove_all(self) -> None:
        """See ``Folder``."""
        shutil.rmtree(self._path)


class _LocalFile:
    """Writes whole pages past the page cache, where the file system can: the copy into it costs more than the rest."""

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._size = 0
        self._direct = False  # whether writes go past the page cache now
        self._refused = not hasattr(os, "O_DIRECT")  # they cannot

    def write(self, data: memoryview) -> None:
        self._set_direct(not (len(data) % PAGE or self._size % PAGE))
        while data:
            try:
                written = os.write(self._fd, data)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._refuse()
                continue
            if written % PAGE:
                self._set_direct(False)
            self._size += written
            data = data[written:]

    def _set_direct(self, direct: bool) -> None:
        if direct != self._direct and not self._refused:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_DIRECT if direct else 0)
            except OSError:
                self._refused = True
            else:
                self._direct = direct

    def _refuse(self) -> None:
        """Write through the page cache from now on: the file system wants it, or larger pages."""
        self._set_direct(False)
        self._refused, self._direct = True, False

    def close(self) -> None:
        os.fsync(self._fd)
        fd, self._fd = self._fd, -1
        os.close(fd)
        _sync_folder(self._folder)

    def abandon(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(fd)


class FileReader(RangeReader):
    """Reads with ``pread``: a mapping would end the process (SIGBUS) where the file becomes shorter meanwhile.

    ``file`` is closed when this object dies; ``name`` is for messages.
    """

    survives = True

    def __init__(self, file: io.FileIO, name: str) -> None:
        self._file, self._name = file, name
        self.size = os.fstat(file.fileno()).st_size

    def read(self, start: int, stop: int) -> bytearray:
        """See ``RangeReader``."""
        data = bytearray(stop - start)
        self.read_into(start, memoryview(data))
        return data

    def read_into(self, start: int, out: memoryview) -> None:
        """See ``RangeReader``."""
        at, stop = start, start + len(out)
        while out:
            got = os.preadv(self._file.fileno(), [out], at)
            if not got:
                raise OSError(f"{self._name} has ended at byte {at}; {stop} bytes were expected")
            out, at = out[got:], at + got

    @property
    def version(self) -> Hashable:
        """See ``RangeReader``."""
        now = os.fstat(self._file.fileno())
        return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


class _LocalReader(FileReader):
    reopens = True

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path), str(path))


class RemoteFolder:
    """See ``Folder``: through fsspec.  A file exists when it was written as a whole, as object stores do it."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs, self._root, self.path = fs, root.rstrip("/"), url.rstrip("/")

    def sub(self, name: str) -> RemoteFolder:
        """See ``Folder``."""
        return RemoteFolder(self._fs, self._of(name), f"{self.path}/{name}")

    def make(self) -> None:
        """See ``Folder``."""
        self._try(lambda: self._fs.makedirs(self._root, exist_ok=True))

    def files(self) -> dict[str, int]:
        """See ``Folder``."""
        return {_last(e["name"]): int(e["size"] or 0) for e in self._entries() if e["type"] == "file"}

    def folders(self) -> list[str]:
        """See ``Folder``."""
        return sorted(_last(entry["name"]) for entry in self._entries() if entry["type"] == "directory")

    def create(self, name: str) -> NewFile:
        """See ``Folder``."""
        return _RemoteFile(self._try(lambda: self._fs.open(self._of(name), "wb")), self._try)

    def put(self, name: str, data: bytes) -> None:
        """See ``Folder``."""
        self._try(lambda: self._fs.pipe_file(self._of(name), data))

    def get(self, name: str) -> bytes:
        """See ``Folder``."""
        found: bytes = self._try(lambda: self._fs.cat_file(self._of(name)))
        return found

    def open(self, name: str) -> RangeReader:
        """See ``Folder``."""
        return _RemoteReader(self._fs, self._of(name), self._try)

    def remove(self, name: str) -> None:
        """See ``Folder``."""
        with suppress(FileNotFoundError):
            self._try(lambda: self._fs.rm_file(self._of(name)))

    def remove_all(self) -> None:
        """See ``Folder``."""
        self._try(lambda: self._fs.rm(self._root, recursive=True))

    def _of(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _entries(self) -> list[dict[str, Any]]:
        try:
            self._fs.invalidate_cache(self._root)  # other ranks write
            found: list[dict[str, Any]] = self._try(lambda: self._fs.ls(self._root, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return found

    def _try(self, do: Callable[[], Any]) -> Any:
        """Do it; errors of the storage's library become OSErrors."""
        try:
            return do()
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.path}: {type(error).__name__}: {error}") from error


class _RemoteFile:
    def __init__(self, file: Any, attempt: Callable[[Callable[[], Any]], Any]) -> None:
        self._file, self._try = file, attempt

    def write(self, data: memoryview) -> None:
        self._try(lambda: self._file.write(data))

    def close(self) -> None:
        self._try(self._file.close)

    def abandon(self) -> None:
        with suppress(Exception):  # not every kind of file can throw away what it has
            self._file.discard()


class _RemoteReader(RangeReader):
    def __init__(self, fs: Any, path: str, attempt: Callable[[Callable[[], Any]], Any]) -> None:
        self._fs, self._path, self._try = fs, path, attempt
        self.size = int(attempt(lambda: fs.size(path)))

    def read(self, start: int, stop: int) -> bytearray:
        data = self._try(lambda: self._fs.cat_file(self._path, start=start, end=stop))
        if len(data) != stop - start:
            raise OSError(f"{self._path} gave {len(data)} bytes from byte {start} on; {stop - start} were expected")
        return bytearray(data)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
