"""Check that ranks in processes of their own, which share one device, train as one device does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpus.tell import tell, told

SCRIPT = Path(__file__).with_name("ranked.py")
RUNS = ((2, "data"), (2, "tensor"), (2, "zero"), (4, "data × pipeline"))
SECONDS = {"cuda": 60, "cpu": 300}  # for one of them, processes and compiling among it


def launch(kind: str, ranks: int, plan: str, over: str = "") -> list[float]:
    """The losses of a training that the launcher starts."""
    command = [
        sys.executable, "-m", "actorflow", "run", str(SCRIPT), "--devices", str(ranks), "--device-type", kind,
        *(["--oversubscribe"] if kind == "cuda" else []), "--", plan, kind, over,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS[kind])
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def eagerly(kind: str) -> list[float]:
    """The losses of the same training without a plan."""
    command = [sys.executable, str(SCRIPT), "eager", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS[kind])
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(what: str, kind: str, ranks: int, plan: str, wanted: list[float], over: str = "") -> None:
    """Train by a plan, and say how far its losses are from those wanted."""
    with told(what):
        found = launch(kind, ranks, plan, over)
        gap = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
        tell(what, f"losses {gap:.0e} apart", "≤ 1e-05", gap <= 1e-5)


def main(kind: str) -> None:
    """Train by every plan and compare with one device."""
    wanted = eagerly(kind)
    for ranks, plan in RUNS if kind == "cuda" else RUNS[-1:]:
        where = "that share the GPU" if kind == "cuda" else "of the CPU"
        compare(f"{plan}, {ranks} processes {where}", kind, ranks, plan, wanted)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr[-2000:]}")
