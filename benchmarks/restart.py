"""Measure the time from the loss of a rank to the next finished step, against that of a start to its first step.

python benchmarks/restart.py                   a GPT of 12 layers on 2 ranks, a few minutes
python benchmarks/restart.py --layers 2 --rounds 5

`actorflow run --max-restarts 1` runs a training with a Keeper, in which rank 1 kills itself, as kill -9 would.  "start"
is the time from the command to the end of the first step, in a new folder.  A figure is the median of the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import actorflow as flow
from gpt import GPT, draw_batch, stdlib_bytes

WIDTH, HEADS, CONTEXT, BATCH = 256, 4, 64, 8
EVERY, KILLED, STEPS = 5, 12, 15  # steps between checkpoints, the step behind which rank 1 is lost, and all


@click.command()
@click.option("--layers", default=12, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--neighbours", is_flag=True, help="Keep checkpoints in memory, and go on from there.")
@click.option("--train", help="Be a rank of the training: its folder.", hidden=True)
def main(layers: int, rounds: int, neighbours: bool, train: str | None) -> None:
    """Measure, or train."""
    if train is not None:
        run_training(layers, train, neighbours)
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    print(f"A GPT of {layers} layers, width {WIDTH}, on 2 ranks; saved every {EVERY} steps", flush=True)
    found: list[tuple[float, float]] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="restart-") as folder:
            found.append(start(layers, folder, neighbours))
    begun, again = (statistics.median(one[at] for one in found) for at in (0, 1))
    print(f"start {begun:.2f} s; from kill -9 to the next finished step {again:.2f} s, ratio {again / begun:.2f}")


def start(layers: int, folder: str, neighbours: bool) -> tuple[float, float]:
    """Run the training: the seconds of its start, and those from the loss of a rank to the next finished step."""
    command = [sys.executable, "-m", "actorflow", "run", __file__, "--devices", "2", "--max-restarts", "1", "--"]
    options = ["--layers", str(layers), "--train", folder, *(["--neighbours"] if neighbours else [])]
    begun = time.time()
    done = subprocess.run([*command, *options], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    if done.returncode:
        raise click.ClickException(f"the training failed:\n{done.stdout}\n{done.stderr}")
    steps = [json.loads(line) for line in Path(folder, "steps").read_text().splitlines()]
    killed = float(Path(folder, "killed").read_text())
    first = next(when for attempt, _, when in steps if attempt == 0)
    again = next(when for attempt, _, when in steps if attempt == 1)
    return first - begun, again - killed


def finished(folder: str, rank: int, step: int) -> None:
    """A step has ended on this rank: note when, and be lost if it is time."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 0:
        with Path(folder, "steps").open("a") as file:
            file.write(json.dumps([attempt, step, time.time()]) + "\n")
    elif attempt == 0 and step == KILLED:
        Path(folder, "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def run_training(layers: int, folder: str, neighbours: bool) -> None:
    """Train with a Keeper."""
    torch.manual_seed(0)
    model = GPT(layers, WIDTH, HEADS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @flow.global_function(type="train", parallel="data")
    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    data, rank = stdlib_bytes(), flow.env.get_rank()
    memory: dict[str, Any] = {"neighbours": 1, "disk_every": 1000} if neighbours else {}
    keeper = flow.checkpoint.Keeper(f"{folder}/checkpoints", model=model, optimizer=optimizer, every=EVERY, **memory)
    for step in keeper.steps(STEPS):
        float(train_step(*draw_batch(data, BATCH, CONTEXT, torch.Generator().manual_seed(step))))
        finished(folder, rank, step)


if __name__ == "__main__":
    main()
