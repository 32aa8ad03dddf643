"""Measure the time from the command to the end of the first step, against torchrun with DistributedDataParallel.

python benchmarks/start.py                       a GPT of 5 million parameters on 2 ranks, then on 4; some minutes
python benchmarks/start.py --ranks 8 --layers 12 --rounds 9

Both take one step of the same batch, with one thread in each rank, and must find the same loss.  They take turns, in
another order each round, and a figure is the median of the rounds.  "first start" is with no plan kept, and "second
start" is the same script again, with the plans of the first one kept in a folder (ACTORFLOW_CACHE), where this version
keeps any.  "CPU" is what all processes of the command take together, which other work on the machine changes less.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from pipelines.turns import fitting, turned
from starts.common import LAYERS, LINE

FOLDER = Path(__file__).resolve().parent / "starts"
PEER, FIRST, SECOND = "torchrun + DDP", "first start", "second start"


@dataclass(frozen=True, slots=True)
class Start:
    """One run of a command; all in seconds, but for the loss."""

    step: float  # from the command to the end of the first step
    end: float  # from the command to its own end
    cpu: float  # of all its processes
    loss: float


@click.command()
@click.option("--layers", default=6, show_default=True)
@click.option("--ranks", multiple=True, default=[2, 4], show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--seconds", default=600.0, show_default=True, help="Begin no round that would end later than this.")
def main(layers: int, ranks: tuple[int, ...], rounds: int, seconds: float) -> None:
    """Measure, and print the medians and their ratios to the peer's."""
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    end = time.monotonic() + seconds
    for at, count in enumerate(ranks):
        measure(layers, count, rounds, time.monotonic() + (end - time.monotonic()) / (len(ranks) - at))


def measure(layers: int, ranks: int, rounds: int, end: float) -> None:
    """Start both on so many ranks, round after round, and print a table."""
    found = take_turns(layers, ranks, fitting(rounds, end))
    print(f"\nA GPT of {layers} layers on {ranks} ranks, medians of {len(found[PEER])} rounds")
    print(f"{'':18}{'to the first step':>24}{'to the end':>24}{'CPU':>24}")
    for name, runs in found.items():
        cells = []
        for field in ("step", "end", "cpu"):
            value, peer = (statistics.median(getattr(run, field) for run in some) for some in (runs, found[PEER]))
            cells.append(f"{value:10.2f} s, ratio {value / peer:4.2f}")
        print(f"{name:18}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


def take_turns(layers: int, ranks: int, rounds: Iterable[int]) -> dict[str, list[Start]]:
    """Start both on so many ranks, in each of the rounds; the runs of each."""
    found: dict[str, list[Start]] = {PEER: [], FIRST: [], SECOND: []}
    for number in rounds:
        for name in turned([PEER, FIRST], number):
            if name == PEER:
                found[PEER].append(start(torchrun(ranks), layers, {}))
                continue
            with tempfile.TemporaryDirectory(prefix="plans-") as plans:
                for again in (FIRST, SECOND):
                    found[again].append(start(ours(ranks), layers, {"ACTORFLOW_CACHE": plans}))
        losses = [runs[-1].loss for runs in found.values()]
        assert all(math.isclose(loss, losses[0], rel_tol=1e-5) for loss in losses), losses
    return found


def torchrun(ranks: int) -> list[str]:
    """The command of the peer."""
    return [*(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)), str(FOLDER / "ddp.py")]


def ours(ranks: int) -> list[str]:
    """Our command."""
    return [*(sys.executable, "-m", "actorflow", "run", "--devices", str(ranks)), str(FOLDER / "ours.py")]


def start(command: list[str], layers: int, variables: dict[str, str]) -> Start:
    """Run a command, and take its times."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", LAYERS: str(layers), **variables}
    cpu, begun = children_cpu(), time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    ended, used = time.time(), children_cpu() - cpu
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}\n{done.stderr[-3000:]}")
    step, loss = json.loads(next(x for x in done.stdout.splitlines() if x.startswith(LINE))[len(LINE) :])
    return Start(step - begun, ended - begun, used, loss)


def children_cpu() -> float:
    """Seconds of CPU that processes below this one have taken which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
