"""Measure how much sooner a run takes its first step where its plan is kept beside its checkpoints.

python benchmarks/kept_plan.py                 a GPT of 12 layers on 2 ranks, a few minutes
python benchmarks/kept_plan.py --layers 4 --rounds 5

Each round starts the same training twice, in a folder of its own: first without a plan there, then with the one that
the first start has kept.  Neither finds a checkpoint.  The time is that from the command to the end of the first step,
which starts of processes, imports and the new model are in; "compiling" is that of the first call alone.  A figure is
the median of the rounds.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import actorflow as flow
from actorflow.session.plan_store import KEPT
from gpt import GPT, draw_batch, stdlib_bytes

WIDTH, HEADS, CONTEXT, BATCH = 256, 4, 64, 8
LINE = "the first step: "


@click.command()
@click.option("--layers", default=12, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--parallel", type=click.Choice(["data", "tensor", "auto"]), default="data", show_default=True)
@click.option("--train", help="Be one of the trainings: the folder.", hidden=True)
def main(layers: int, ranks: int, rounds: int, parallel: str, train: str | None) -> None:
    """Measure, or train."""
    if train is not None:
        first_step(layers, parallel, train)
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    print(f"A GPT of {layers} layers, width {WIDTH}, on {ranks} ranks, parallel={parallel!r}", flush=True)
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="kept-plan-") as folder:
            for kept in found:
                whole, call, taken = start(layers, ranks, parallel, folder)
                assert taken == kept, "the plan was not kept, or not found"
                found[kept].append((whole, call))
    for title, at in (("from the command to the end of the first step", 0), ("… compiling", 1)):
        without, with_plan = (statistics.median(one[at] for one in found[kept]) for kept in (False, True))
        print(f"{title:48} {without:6.2f} s; with a kept plan {with_plan:6.2f} s, ratio {with_plan / without:.2f}")


def start(layers: int, ranks: int, parallel: str, folder: str) -> tuple[float, float, bool]:
    """Start the training: seconds until its first step has ended, those of the first call; whether a plan was there."""
    command = [sys.executable, "-m", "actorflow", "run", __file__, "--devices", str(ranks), "--"]
    options = ["--layers", str(layers), "--parallel", parallel, "--train", folder]
    begun = time.time()
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    ended, call, taken = json.loads(next(x for x in done.stdout.splitlines() if x.startswith(LINE))[len(LINE) :])
    return ended - begun, call, bool(taken)


def first_step(layers: int, parallel: str, folder: str) -> None:
    """Take one step, and say when it ended, what the call took, and how many plans were not compiled."""
    torch.manual_seed(0)
    model = GPT(layers, WIDTH, HEADS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @flow.global_function(type="train", parallel=parallel)
    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    flow.checkpoint.Keeper(folder, model=model, optimizer=optimizer, every=1000)
    batch = draw_batch(stdlib_bytes(), BATCH, CONTEXT, torch.Generator().manual_seed(0))
    begun = time.time()
    loss = train_step(*batch)
    called = time.time() - begun
    float(loss)
    if flow.env.get_rank() == 0:
        print(f"{LINE}{json.dumps([time.time(), called, KEPT.taken])}", flush=True)


if __name__ == "__main__":
    main()
