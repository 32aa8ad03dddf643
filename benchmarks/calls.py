"""Measure a small step whose script reads its loss, where a call begins at once and where it waits for all ranks.

python benchmarks/calls.py                  on 2 ranks, a minute
python benchmarks/calls.py --devices 4

A call that waits is one whose plan changes what other ranks may still read: it begins when rank 0 has said that all
have made it.  Both take turns, some calls each, in one run; a figure is the ratio of the medians of their steps.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time

import click
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.session.process import current

TURN, BEFORE = 30, 5  # calls that are measured in a turn, and those before them


@click.command()
@click.option("--devices", default=2, show_default=True)
@click.option("--turns", default=40, show_default=True, help="Turns of each of the two.")
@click.option("--rank", is_flag=True, hidden=True, help="Be a rank of the run.")
def main(devices: int, turns: int, rank: bool) -> None:
    """Measure, or train."""
    if rank:
        train(turns)
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    command = [sys.executable, "-m", "actorflow", "run", __file__, "--devices", str(devices), "--", "--rank"]
    done = subprocess.run([*command, "--turns", str(turns)], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    if done.returncode:
        raise click.ClickException(f"the training failed:\n{done.stdout}\n{done.stderr}")
    print(done.stdout, end="")


def train(turns: int) -> None:
    """Train a small model, with and without waiting for all ranks to make each call."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @flow.global_function(type="train")
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x, y = torch.randn(16, 8), torch.randn(16, 4)
    float(step(x, y))
    (job,) = current().context.jobs
    plan = job.last
    assert plan is not None
    assert plan.begins_freely
    taken: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * turns):
        plan.begins_freely = freely = turn % 2 == 0
        for call in range(BEFORE + TURN):
            start = time.perf_counter()
            float(step(x, y))
            if call >= BEFORE:
                taken[freely].append(time.perf_counter() - start)
    if flow.env.rank() == 0:
        free, waiting = (statistics.median(taken[freely]) for freely in (True, False))
        print(f"A step of {flow.env.world_size()} ranks whose calls begin at once / wait for all ranks:")
        print(f"{free / waiting:.2f} ({free * 1e3:.2f} / {waiting * 1e3:.2f} ms)")


if __name__ == "__main__":
    main()
