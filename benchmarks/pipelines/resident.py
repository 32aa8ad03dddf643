"""Resident memory of a process: what it has now, and the most it had."""

from __future__ import annotations

import re
import resource
from pathlib import Path

STATUS = Path("/proc/self/status")


def start_peak_anew() -> bool:
    """Let the peak of resident memory be what is resident now; whether the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory(name: str) -> int:
    """Bytes that are resident now (VmRSS), or at most since the peak was started anew (VmHWM).

    Without /proc it is the most of the life of the process for both.
    """
    try:
        (kib,) = re.findall(rf"{name}:\s*(\d+) kB", STATUS.read_text())
    except OSError:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(kib) * 1024


__all__ = ["STATUS", "memory", "start_peak_anew"]
