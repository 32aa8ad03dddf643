"""Detect by the kernel's counters that a process is stopped or hangs in I/O, as it cannot report that itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["Standstill", "is_stopped"]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, Ctrl-Z)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has ended
        return False


class Standstill:
    """Looks at a process again and again: one that is stopped does not run, and one that waits for a dead disk neither.

    A process that waits for a while, or whose machine is busy, gets a core between two looks that are far enough apart.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before: int | None = None

    def runs(self) -> bool:
        """Whether it has run since the last look; the first time, and where the kernel does not tell, if it may."""
        now = _switches(self._pid)
        stood = now is not None and now == self._before
        self._before = now
        return not stood and not is_stopped(self._pid)


def _switches(pid: int) -> int | None:
    """How often threads of a process have left a core, which grows while any of them runs."""
    found = None
    with suppress(OSError):  # it has ended
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            for line in status.read_text(errors="replace").splitlines():
                if "ctxt_switches:" in line:
                    found = (found or 0) + int(line.rpartition(":")[2])
    return found
