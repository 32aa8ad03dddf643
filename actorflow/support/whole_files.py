"""Write files whole or not at all: what was there stays until all that is new is written."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file; if that fails, what was there is as it was.  Raises OSError.

    A link stays one: the file that it leads to is written.  A pipe or a device is written to as it is.
    """
    given, file = Path(path), Path(os.path.realpath(path))
    if given.exists() and not given.is_file():
        given.write_bytes(data)
        return
    part = file.with_name(f"{os.getpid()}.part")
    try:
        try:
            part.write_bytes(data)
        except PermissionError:  # a folder in which nothing can be made may have files that can be written
            file.write_bytes(data)
            return
        if file.exists():
            shutil.copymode(file, part)
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
