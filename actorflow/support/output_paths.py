"""Check that a file or folder for output can be written, before any work is done.

The same rule for all output whose path people give: missing folders are made, and what is in the way is named.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["why_not_writable"]


def why_not_writable(path: str | Path, *, folder: bool = False) -> str:
    """Why the file, or anything in the folder, cannot be written, as a sentence; empty where it can."""
    given = path = Path(path)
    if path.is_symlink() and not path.exists():  # it leads to a file that is yet to be made
        path = Path(os.path.realpath(path))
    inside = path if folder else path.parent
    try:
        in_the_way = next((p for p in (inside, *inside.parents) if p.exists() and not p.is_dir()), None)
        if in_the_way is not None:
            why = f"{in_the_way} is a file"
        elif not folder and path.is_dir():
            why = "it is a folder"
        else:
            inside.mkdir(parents=True, exist_ok=True)
            if not folder and path.exists():
                path.open("ab").close()
            else:
                with tempfile.TemporaryFile(dir=inside):
                    return ""
            return ""
    except OSError as e:
        why = e.strerror or str(e)
    what = f"nothing can be written to the folder {str(given)!r}" if folder else f"{str(given)!r} cannot be written"
    return f"{what}: {why}; name another one"
