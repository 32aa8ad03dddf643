"""A call of one of our functions goes in; the line of the user's script that it came from comes out."""

from __future__ import annotations

import linecache
import sys

from actorflow.script_state.find import is_user_file

__all__ = ["user_line"]


def user_line() -> str:
    """``file:line: code`` of the innermost line of the user's own code on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name) and not name.startswith("<frozen"):
            return f"{name}:{frame.f_lineno}: {linecache.getline(name, frame.f_lineno).strip()}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "in the script"
