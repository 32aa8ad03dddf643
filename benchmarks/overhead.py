"""Measure actorflow's overhead: a step against eager's, its guards, compiling a GPT-2, and one firing.

python benchmarks/overhead.py          all four, each in a process of its own
python benchmarks/overhead.py step     one of them: step, guards, compile or fire
"""

from __future__ import annotations

import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
import torch.nn.functional as F

import actorflow as flow
from actorflow.control import cluster
from actorflow.rendezvous.settings import Settings
from actorflow.script_state.arguments import flatten
from actorflow.session.process import current
from actorflow.session.session import PlanReady

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, draw_batch, stdlib_bytes

PARTS = ("step", "guards", "compile", "fire")
MOST_US, MOST_SHARE = 100.0, 0.01  # that the guards of a call may cost: microseconds, and of a step


def gpt_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sizes of a GPT and of its batch as options."""
    for name, default in (("batch", 8), ("context", 128), ("layers", 6), ("width", 384)):
        command = click.option(f"--{name}", default=default)(command)
    return command


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Measure what actorflow costs on one machine."""
    if context.invoked_subcommand is not None:
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads")
    for part in PARTS:
        print(flush=True)
        subprocess.run([sys.executable, __file__, part], check=True)


@main.command()
@click.option("--rounds", default=12, help="Times that each variant is measured, one after the other.")
@click.option("--steps", default=2, help="Steps in one measurement.")
@gpt_sizes
def step(rounds: int, steps: int, width: int, layers: int, context: int, batch: int) -> None:
    """A training step of a GPT on one device, against eager PyTorch."""
    tokens, targets = draw_batch(stdlib_bytes(), batch, context, torch.Generator().manual_seed(0))

    def make(fused: bool | None) -> tuple[GPT, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        torch.manual_seed(0)
        model = GPT(layers, width, 6, context)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

        def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return model, train_step

    model, planned = make(None)
    job = flow.global_function(type="train")(planned)
    eager = {"eager": make(None)[1], "eager, fused AdamW": make(True)[1]}

    def ours() -> float:
        for _ in range(steps):
            loss = job(tokens, targets)
        worker = current().worker
        assert worker is not None
        worker.wait_all()  # the loss is there before the optimizer is done
        return float(loss)

    def plain(run: Callable[..., torch.Tensor]) -> Callable[[], float]:
        def go() -> float:
            for _ in range(steps):
                loss = run(tokens, targets)
            return loss.item()

        return go

    variants = {"actorflow": ours} | {name: plain(run) for name, run in eager.items()}
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"A step of a GPT of {size:.1f}M parameters, batch {batch} × {context} tokens, AdamW, one device")
    losses = {name: run() for name, run in variants.items()}  # compiles, allocates and warms up
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        names = list(variants) if turn % 2 else list(variants)[::-1]
        for name in names:
            start = time.perf_counter()
            losses[name] = variants[name]()
            taken[name].append((time.perf_counter() - start) / steps * 1e3)
    for name, times in taken.items():
        median, low, high = statistics.median(times), min(times), max(times)
        print(f"  {name:20} {median:8.1f} ms   ({low:.1f} … {high:.1f})   loss {losses[name]:.6f}")
    for name in eager:
        ratios = [a / b for a, b in zip(taken["actorflow"], taken[name], strict=True)]
        print(f"  actorflow / {name:20} {statistics.median(ratios):.3f}   (median of {rounds} rounds)")


class Knobs:
    """Numbers in attributes."""

    def __init__(self, count: int) -> None:
        vars(self).update({f"knob_{number}": 1.0 for number in range(count)})


@dataclass
class Configuration:
    """A configuration as scripts have it."""

    smoothing: float = 0.0
    scale: float = 1.0
    names: list[str] = field(default_factory=lambda: ["loss", "accuracy"])
    weights: dict[str, float] = field(default_factory=lambda: {"loss": 1.0})


@main.command()
@click.option("--calls", default=2000, help="Times that the guards are looked at.")
@click.option("--steps", default=20, help="Steps whose median is the step's time.")
@gpt_sizes
def guards(calls: int, steps: int, width: int, layers: int, context: int, batch: int) -> None:
    """What a call looks at before it runs its plan: of a GPT's script, and of one that reads many more objects."""
    batch_of = draw_batch(stdlib_bytes(), batch, context, torch.Generator().manual_seed(0))
    settings, knobs = Configuration(), Knobs(200)
    tables = {name: {f"entry {n}": float(n) for n in range(1000)} for name in ("costs", "counts")}

    def of_many(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(tokens).flatten(0, 1) * settings.scale
        loss = F.cross_entropy(logits, targets.flatten(), label_smoothing=settings.smoothing)
        loss = loss * settings.weights[settings.names[0]] * sum(vars(knobs).values()) / len(vars(knobs))
        loss = loss + 0 * (tables["costs"]["entry 1"] + tables["counts"]["entry 1"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def of_one(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for title, function in (("the GPT's script", of_one), ("with many objects", of_many)):
        torch.manual_seed(0)
        model = GPT(layers, width, 6, context)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        job = flow.global_function(type="train")(function)
        taken = []
        for _ in range(steps + 2):
            start = time.perf_counter()
            job(*batch_of)
            worker = current().worker
            assert worker is not None
            worker.wait_all()
            taken.append(time.perf_counter() - start)
        step_us = statistics.median(taken[2:]) * 1e6
        arguments = flatten(job.name, job.signature, batch_of, {})
        costs = []
        for _ in range(calls):
            start = time.perf_counter()
            found = current().plan_for(job, arguments)
            costs.append((time.perf_counter() - start) * 1e6)
            assert found is job.last
        median = statistics.median(costs)
        low, high = min(costs), statistics.quantiles(costs, n=20)[-1]
        if title == "the GPT's script":
            size = sum(p.numel() for p in model.parameters()) / 1e6
            print(f"The guards of a call: GPT of {size:.1f}M parameters, batch {batch} × {context} tokens, one device")
        print(f"  {title:20} {median:8.1f} µs   ({low:.1f} … {high:.1f}, 19 of 20)   of a step {step_us / 1e3:.1f} ms")
        kept = "kept" if median <= MOST_US else "NOT KEPT"
        print(f"    at most {MOST_US:.0f} µs      {kept}")
        share = median / step_us
        kept = "kept" if share <= MOST_SHARE else "NOT KEPT"
        print(f"    at most {MOST_SHARE:.0%} of it    {kept}: {share:.2%}")


@main.command(name="compile")
@click.option("--devices", default=4, help="Devices of the cluster that is pretended.")
@click.option("--layers", default=12)
@click.option("--micro-batches", default=1)
def compile_(devices: int, layers: int, micro_batches: int) -> None:
    """Compiling a training step of GPT-2 (124M parameters), as `actorflow plan` does it."""
    cluster.use(cluster.Alone(Settings(world=devices, devices=devices, pretend=True)))
    model = GPT(layers, width=768, heads=12, context=1024, vocabulary=50257)
    model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    @flow.global_function(type="train", micro_batches=micro_batches)
    def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    tokens = torch.zeros(8, 1024, dtype=torch.long)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"Compiling a GPT-2 of {layers} layers, {size:.0f}M parameters, batch 8 × 1024 tokens, for {devices} devices")
    before = _peak()
    start = time.perf_counter()
    try:
        train_step(tokens, tokens)
    except PlanReady as ready:
        taken = time.perf_counter() - start
        print(f"  time               {taken:8.1f} s   ({len(ready.made.plan.actors)} actors)")
        print(f"  peak memory        {_peak():8.0f} MB   (before compiling: {before:.0f})")


@main.command()
def fire() -> None:
    """One fire of an actor, in process."""
    subprocess.run([sys.executable, str(Path(__file__).with_name("fire.py"))], check=True)


def _peak() -> float:
    """The most memory this process has held, in MB (10⁶ bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in KiB


if __name__ == "__main__":
    main()
