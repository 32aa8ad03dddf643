"""A thread goes in; the line of the user's own code that it is at comes out."""

from __future__ import annotations

import faulthandler
import re
import tempfile

from actorflow.script_state.find import is_user_file

__all__ = ["line_of"]

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)  # as faulthandler writes it


def line_of(thread: int) -> str:
    """``file:line`` of the innermost line of the user's own code that a thread is at; empty where there is none.

    The stack is written out in one call, in which no thread goes on: frames of a thread that runs must not be held.
    """
    with tempfile.TemporaryFile() as dump:
        faulthandler.dump_traceback(dump, all_threads=True)
        dump.seek(0)
        text = dump.read().decode(errors="replace")
    for stack in text.split("\n\n"):
        head, _, frames = stack.partition("\n")
        if f"thread 0x{thread:016x} " not in head.lower():
            continue
        for name, line in _FRAME.findall(frames):
            if is_user_file(name):
                return f"{name}:{line}"
    return ""
