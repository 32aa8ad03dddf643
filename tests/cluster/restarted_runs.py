"""Launchers of ``scripts/restarted.py`` as nodes of one run on this machine, and the losses that it has found."""

from __future__ import annotations

from pathlib import Path

import warm
from cluster.runs import Run

SCRIPT = Path(__file__).parent.parent / "scripts" / "restarted.py"


def launched(
    tmp_path: Path, port: int, *options: str, script: tuple[str, ...], nodes: str, token: str = "secret"
) -> Run:
    place = ["--nodes", nodes, "--devices", "1", "--master-addr", "127.0.0.1", "--master-port", str(port), *options]
    return Run(
        tmp_path, SCRIPT, *place, "--", str(tmp_path / "checkpoints"), str(tmp_path / "losses"), *script,
        env={"ACTORFLOW_TOKEN": token, "OMP_NUM_THREADS": "1"}, python=warm.python(),
    )  # fmt: skip


def losses(tmp_path: Path) -> dict[int, set[tuple[str, int]]]:
    """Step → what attempts have found: the loss and the number of ranks."""
    found: dict[int, set[tuple[str, int]]] = {}
    for line in (tmp_path / "losses").read_text().splitlines() if (tmp_path / "losses").exists() else ():
        number, loss, _, world = line.split()
        found.setdefault(int(number), set()).add((loss, int(world)))
    return found
