"""Train a model that does not fit into one process's memory in four stages of no more memory each.

python benchmarks/memory.py                          a GPT of 101M parameters, 1.2 GB for each process
python benchmarks/memory.py --limit 600 --width 512  megabytes for each process; the model's sizes

The limit is RLIMIT_DATA: what a process has mapped for itself to write to.  That is its tensors, Python's objects and
the stacks of its threads, and malloc fails where it would be passed.  (RLIMIT_AS counts torch's code and what is
reserved and never used as well; a limit on resident memory is one that Linux does not keep.)  Tensors that pass
between processes of one host may lie in memory that they share, which the limit leaves out: the peak of resident
memory (VmHWM), which holds shared memory and code as well, is therefore printed too.

Four trainings with the same seed and batches: eager without a limit, which is the reference; eager with it, over one
micro-batch at a time; actorflow on one device with it; actorflow in four stages with it.  The second and third have to
fail, the fourth has to end with the losses of the first.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

LOSSES = 1e-4  # how far losses may differ
BESIDES = 520  # MB beside what a plan counts: Python, torch and threads' stacks (390 to 440), and malloc's holes
NO_MEMORY = re.compile(r"MemoryError|[Cc]annot allocate memory|can't allocate memory|bad_alloc")


@dataclass(frozen=True, slots=True)
class Training:
    """One of the four, and what came of it."""

    name: str
    losses: tuple[float, ...]  # empty: it failed
    peaks: tuple[float, ...]  # MB of resident memory, by rank
    error: str = ""


def train_eagerly(model: Any, micro_batches: int, batches: list[Any]) -> list[float]:
    """Train in this process, with gradients that add up over micro-batches."""
    import torch
    import torch.nn.functional as F

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for tokens, targets in batches:
        total = 0.0
        for x, y in zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train_planned(model: Any, micro_batches: int, stages: int, limit: int, batches: list[Any]) -> list[float]:
    """Train on the devices of the run, in stages if there are several."""
    import torch
    import torch.nn.functional as F

    import actorflow as flow

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    budget = None
    if stages > 1:
        flow.place(model, stages=stages)
        budget = (limit - BESIDES) * 10**6

    @flow.global_function(type="train", micro_batches=micro_batches, memory_budget=budget)
    def train_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return [float(train_step(*batch)) for batch in batches]


@click.group(invoke_without_command=True)
@click.option("--limit", default=1200, show_default=True, help="MB for each process.")
@click.option("--layers", default=8, show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--context", default=128, show_default=True)
@click.option("--batch", default=16, show_default=True)
@click.option("--micro-batches", default=8, show_default=True)
@click.option("--stages", default=4, show_default=True)
@click.option("--steps", default=3, show_default=True)
@click.pass_context
def main(click_context: click.Context, /, **sizes: int) -> None:
    """Train a model in four stages that one process has no memory for."""
    click_context.obj = sizes
    if click_context.invoked_subcommand is None:
        sys.exit(demonstrate(sizes))


@main.command()
@click.argument("how", type=click.Choice(["eager", "planned"]))
@click.option("--micro-batches", required=True, type=int)
@click.option("--limit", default=0, help="MB; 0: none.")
@click.pass_obj
def train(sizes: dict[str, int], how: str, micro_batches: int, limit: int) -> None:
    """One of the trainings, on one rank."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit * 10**6, limit * 10**6))
    import torch

    import actorflow as flow
    from gpt import GPT, draw_batch, stdlib_bytes

    text, generator = stdlib_bytes(), torch.Generator().manual_seed(0)
    batches = [draw_batch(text, sizes["batch"], sizes["context"], generator) for _ in range(sizes["steps"])]
    torch.manual_seed(0)
    shape = (sizes["layers"], sizes["width"], sizes["width"] // 64, sizes["context"])
    if how == "eager":
        losses = train_eagerly(GPT(*shape), micro_batches, batches)
    else:
        with flow.deferred_init():
            model = GPT(*shape)
        losses = train_planned(model, micro_batches, int(os.environ["WORLD_SIZE"]), limit, batches)
    print(json.dumps({"losses": losses, "peak": _peak()}))


def demonstrate(sizes: dict[str, int]) -> int:
    """Run and print all four; 0 if they end as they should."""
    limit, micro = sizes["limit"], sizes["micro_batches"]
    parameters = 12 * sizes["width"] ** 2 * sizes["layers"]
    print(
        f"A GPT of {parameters / 1e6:.0f}M parameters, {parameters * 16 / 1e6:.0f} MB with what AdamW keeps, "
        f"batch {sizes['batch']} × {sizes['context']}, {sizes['steps']} steps",
        flush=True,
    )
    runs = [
        run("eager, no limit", sizes, "eager", 1, 0, devices=0),
        run(f"eager, M = {micro}", sizes, "eager", micro, limit, devices=0),
        run(f"one device, M = {micro}", sizes, "planned", micro, limit, devices=1),
        run(f"{sizes['stages']} stages, M = {micro}", sizes, "planned", micro, limit, devices=sizes["stages"]),
    ]
    reference, *alone, staged = runs
    equal = bool(staged.losses) and all(
        abs(a - b) <= LOSSES for a, b in zip(reference.losses, staged.losses, strict=True)
    )
    failed = all(NO_MEMORY.search(r.error) for r in alone)
    print(
        f"{'as it should be' if equal and failed else 'NOT as it should be'}: one process "
        f"{'cannot' if failed else 'can'} train it with {limit} MB, {sizes['stages']} stages "
        f"{'can, with the losses of the reference' if equal else 'cannot'}"
    )
    return 0 if equal and failed else 1


def run(name: str, sizes: dict[str, int], how: str, micro_batches: int, limit: int, devices: int) -> Training:
    """Run a training, with ``devices`` ranks of actorflow or (0) in a process without it; print what came of it."""
    shape = [x for key, value in sizes.items() for x in (f"--{key.replace('_', '-')}", str(value))]
    rest = [*shape, "train", how, "--micro-batches", str(micro_batches), "--limit", str(limit)]
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, __file__, *rest]
        if devices:
            flags = ["--devices", str(devices), "--log-dir", logs]
            command = [sys.executable, "-m", "actorflow", "run", __file__, *flags, "--", *rest]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        others = [Path(logs, f"rank{rank}.stdout.log") for rank in range(1, devices)]
        outputs = [done.stdout, *(path.read_text() for path in others if path.exists())]
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if NO_MEMORY.search(line)]
        made = Training(name, (), (), (lines or done.stderr.splitlines() or ["no message"])[-1])
        print(f"  {name:24} fails: {made.error.strip()[:160]}", flush=True)
    else:
        told = [json.loads(output.splitlines()[-1]) for output in outputs]
        made = Training(name, tuple(told[0]["losses"]), tuple(t["peak"] for t in told))
        peaks = ", ".join(f"{peak:.0f}" for peak in made.peaks)
        print(f"  {name:24} losses {' '.join(f'{x:.5f}' for x in made.losses)}; peak of {peaks} MB", flush=True)
    return made


def _peak() -> float:
    """The most resident memory that this process has had, in MB."""
    (kib,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024 / 1e6


if __name__ == "__main__":
    main()
