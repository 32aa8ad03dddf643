"""Watch a run whose ranks write lines into files of a folder: end it where it stands still, and read the lines."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["lines_of", "watched"]


def watched(process: subprocess.Popen[bytes], folder: Path, patience: float) -> bool:
    """Wait for the end of a run; whether it came by itself, and not because nothing happened for some seconds."""
    seen, since = 0, time.monotonic()
    while True:
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            size = sum(path.stat().st_size for path in folder.glob("rank *"))
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > patience:
                process.terminate()
                process.wait()
                return False
        else:
            return True


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
