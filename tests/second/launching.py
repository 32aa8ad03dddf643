"""Launchers of scripts, as commands, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster.ranks import free_port

LIMIT = 200.0  # seconds; a launch takes a few


def command(launcher: str, *arguments: str, processes: int = 2, python: str = sys.executable) -> list[str]:
    """The command line that runs a script and its arguments with one of the launchers; see ``warm`` for ``python``."""
    n = str(processes)
    port = str(free_port())
    return [
        python,
        "-m",
        *{
            "launch": ["actorflow.distributed.launch", "--nproc_per_node", n, "--master_port", port],
            "torchrun": ["torch.distributed.run", "--nproc-per-node", n, "--master-port", port],
            "run": ["actorflow", "run", "--devices", n],
        }[launcher],
        *arguments,
    ]


def run(arguments: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder until it ends."""
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**environment(), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def environment() -> dict[str, str]:
    """Variables with which a process finds the packages, as this one does, and is one of no run."""
    mine = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**mine, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
