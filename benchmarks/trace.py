"""Measure what tracing costs: the same training steps and firings with a recorder and without one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.nn.functional as F
from fire import chain

import actorflow as flow
from actorflow.runtime.recorder import Recorder
from actorflow.runtime.worker import Worker
from actorflow.session.process import current
from actorflow.testing.local_cluster import LocalCluster

Taken = tuple[float, float]  # seconds on the clock, and of the process's CPU time


def compare(worker: Worker, go: Callable[[], None], rounds: int) -> tuple[list[Taken], list[Taken]]:
    """What each round took without a recorder, and with one, one after the other."""
    taken: dict[bool, list[Taken]] = {False: [], True: []}
    plans = [job.plan for _, job in sorted(worker._jobs.items())]
    for turn in range(2 * rounds):
        on = (turn + turn // 2) % 2 == 1  # off, on, on, off: neither is always the first
        record = Recorder(1 << 40)
        for number, plan in enumerate(plans):
            record.install(number, plan)
        worker.record = record if on else None
        start, used = time.perf_counter(), time.process_time()
        go()
        taken[on].append((time.perf_counter() - start, time.process_time() - used))
    worker.record = None
    return taken[False], taken[True]


def tell(what: str, unit: float, name: str, off: list[Taken], on: list[Taken]) -> None:
    """Print the medians, and the median of the ratios of neighbours, on the clock and of CPU time."""
    for i, which in enumerate(("on the clock", "of CPU time")):
        ratio = statistics.median(b[i] / a[i] for a, b in zip(off, on, strict=True))
        a, b = (statistics.median(t[i] for t in taken) * unit for taken in (off, on))
        print(f"{what:34} {a:8.2f} {name} without, {b:8.2f} {name} with, {which}: {ratio - 1:+.1%}")


@click.command()
@click.option("--rounds", default=12, help="Times that each is measured.")
@click.option("--steps", default=4, help="Steps in one measurement.")
@click.option("--width", default=128)
@click.option("--layers", default=4)
@click.option("--micro-batches", default=8)
def main(rounds: int, steps: int, width: int, layers: int, micro_batches: int) -> None:
    """Print the step time and the time of a firing with tracing and without."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = [(width, 4 * width), (4 * width, width)] * layers
    model = torch.nn.Sequential(*(m for shape in shapes for m in (torch.nn.Linear(*shape), torch.nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    @flow.global_function(micro_batches=micro_batches)
    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x, y = torch.randn(512, width), torch.randn(512, width)
    float(train_step(x, y))
    worker = current().worker
    assert worker is not None

    def step() -> None:
        for _ in range(steps):
            train_step(x, y)
        worker.wait_all()

    plan = train_step.plan
    assert plan is not None
    firings = sum(a.rate for a in plan.actors)
    tell(f"a training step of {firings} firings", 1e3 / steps, "ms", *compare(worker, step, rounds))
    with LocalCluster(chain(50, 2, body=False), in_flight=4, library={}) as cluster:
        alone = cluster.workers[0]
        z = torch.zeros(1)

        def fires() -> None:
            for _ in range(40):
                alone.issue(0, {"x": z})
            alone.wait_all(60)

        fires()
        tell("a firing that computes nothing", 1e6 / (40 * 52), "µs", *compare(alone, fires, rounds))


if __name__ == "__main__":
    main()
