"""What the runs of these tests have in common: the script, what it prints, and what one device makes of it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

import warm

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
ACTORFLOW = (sys.executable, "-m", "actorflow")
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
LIMIT = 400.0  # seconds for one run, on a machine that does other things, too


def run(
    command: Sequence[str], env: dict[str, str] | None = None, limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, both outputs in one text."""
    return subprocess.run(
        command,
        env={**ENV, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )


def losses(text: str) -> list[float]:
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss ")]


def places(text: str) -> list[tuple[int, ...]]:
    """For each rank that says so: its number, how many there are, its node, how many of these."""
    return [tuple(map(int, line.split()[1:5])) for line in text.splitlines() if line.startswith("place ")]


@functools.cache
def expected() -> list[float]:
    """The losses of one device."""
    done = run([warm.python(), "-m", "actorflow", "run", str(SCRIPT), "--on", "none"])
    assert done.returncode == 0, done.stdout
    return losses(done.stdout)


def written(folder: Path, world: int) -> dict[int, str]:
    """What the ranks other than 0 have printed, from their log files."""
    return {rank: (folder / f"rank{rank}.stdout.log").read_text() for rank in range(1, world)}


def processes_left() -> list[int]:
    """The processes that run the script."""
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if str(SCRIPT) in " ".join(process.info["cmdline"] or ())]
