"""Measure how much sooner a run takes its first step where its plan is kept, and what its capture has found.

python benchmarks/kept_plan.py                 a GPT of 12 layers on 2 ranks, a few minutes
python benchmarks/kept_plan.py --layers 4 --rounds 5

Each round starts the same training three times, with a cache of its own: first with nothing there; then with the plan
that the first start has kept, and without what it has found when it captured the step; then with both, which captures
nothing.  The time is that from the command to the end of the first step, which starts of processes, imports and the new
model are in; "the first call" is that of the call alone, and "processor time" that of all processes until the end.  A
figure is the median of the rounds; where a machine has other work, processor time says more.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
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
STARTS = ("nothing kept", "a kept plan", "no capture")


@dataclass(frozen=True, slots=True)
class Start:
    """What one start of the training took, in seconds, and what rank 0 had imported after its first step."""

    whole: float
    call: float
    processor: float
    modules: int
    taken: int  # plans that were not compiled
    skipped: int  # steps that were not captured


@click.command()
@click.option("--layers", default=12, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--parallel", type=click.Choice(["data", "tensor", "auto"]), default="data", show_default=True)
@click.option("--train", is_flag=True, help="Be one of the trainings.", hidden=True)
def main(layers: int, ranks: int, rounds: int, parallel: str, train: bool) -> None:
    """Measure, or train."""
    if train:
        first_step(layers, parallel)
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    print(f"A GPT of {layers} layers, width {WIDTH}, on {ranks} ranks, parallel={parallel!r}", flush=True)
    found: dict[str, list[Start]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="kept-plan-") as folder:
            for number, name in enumerate(STARTS):
                one = start(layers, ranks, parallel, folder)
                assert (one.taken, one.skipped) == (int(number > 0), int(number > 1)), f"{name}: {one}"
                found[name].append(one)
                if not number:
                    for path in (Path(folder) / "plans").glob("step-*"):
                        path.unlink()
    print(f"{'':48}" + "".join(f"{name:>16}" for name in STARTS))
    for title, of in (
        ("from the command to the end of the first step", lambda one: one.whole),
        ("the first call", lambda one: one.call),
        ("processor time of the run", lambda one: one.processor),
        ("modules that rank 0 has imported", lambda one: one.modules),
    ):
        medians = [statistics.median(map(of, found[name])) for name in STARTS]
        print(f"{title:48}" + "".join(f"{median:9.2f} {median / medians[0]:5.2f}x" for median in medians))


def start(layers: int, ranks: int, parallel: str, folder: str) -> Start:
    """Start the training, with a cache in this folder."""
    command = [sys.executable, "-m", "actorflow", "run", __file__, "--devices", str(ranks), "--"]
    options = ["--layers", str(layers), "--parallel", parallel, "--train"]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "ACTORFLOW_CACHE": folder,
                               "ACTORFLOW_CACHE_PLANS": "1", "ACTORFLOW_CACHE_CAPTURES": "1"})  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended, *more = json.loads(next(x for x in done.stdout.splitlines() if x.startswith(LINE))[len(LINE) :])
    call, modules, taken, skipped = more
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(ended - begun, call, processor, modules, taken, skipped)


def first_step(layers: int, parallel: str) -> None:
    """Take one step, and say when it ended, what the call took, and what was not done anew."""
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

    batch = draw_batch(stdlib_bytes(), BATCH, CONTEXT, torch.Generator().manual_seed(0))
    begun = time.time()
    loss = train_step(*batch)
    called = time.time() - begun
    float(loss)
    if flow.env.get_rank() == 0:
        said = [time.time(), called, len(sys.modules), KEPT.taken, KEPT.skipped]
        print(f"{LINE}{json.dumps(said)}", flush=True)


if __name__ == "__main__":
    main()
