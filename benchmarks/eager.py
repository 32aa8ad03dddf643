"""Measure what global tensors cost op by op, beside plain tensors and torch's DTensor on one rank.

python benchmarks/eager.py          both, each in a process of its own
python benchmarks/eager.py add      one addition of small tensors, without and with gradients
python benchmarks/eager.py gpt      forward and backward pass of a small GPT

One rank holds all of every tensor, so that nothing is sent and what is seen is the price of an op.  The three are
measured in turns, best of many short ones; overhead is time beyond that of plain tensors.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

import actorflow as flow

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT

PARTS = ("add", "gpt")
PLAIN, OURS, THEIRS = "plain", "actorflow", "DTensor"


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Measure what an op on global tensors costs."""
    if context.invoked_subcommand is not None:
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
    for part in PARTS:
        print(flush=True)
        subprocess.run([sys.executable, __file__, part], check=True)


@main.command()
@click.option("--rounds", default=200, help="Times that each is measured, in turns.")
@click.option("--times", default=500, help="Additions in one measurement.")
def add(rounds: int, times: int) -> None:
    """One addition of two tensors of 4 × 5."""
    _alone()
    for gradients in (False, True):
        x = torch.randn(4, 5)
        mesh = init_device_mesh("cpu", (1,))
        tensors = {
            PLAIN: x,
            OURS: flow.to_global(x, flow.placement("cpu", [0]), flow.sbp.broadcast),
            THEIRS: DTensor.from_local(x, mesh, [Replicate()]),
        }

        def adding(t: Tensor) -> Callable[[], object]:
            def run() -> None:
                for _ in range(times):
                    t + t

            return run

        cases = {name: adding(t.detach().requires_grad_(gradients)) for name, t in tensors.items()}
        seconds = _in_turns(cases, rounds)
        what = "one addition" + (", gradients recorded" if gradients else "")
        _report(what, {name: min(s) / times * 1e6 for name, s in seconds.items()}, "µs")


@main.command()
@click.option("--rounds", default=40, help="Times that each is measured, in turns.")
@click.option("--width", default=64)
@click.option("--layers", default=4)
@click.option("--context", default=32)
@click.option("--batch", default=2)
def gpt(rounds: int, width: int, layers: int, context: int, batch: int) -> None:
    """Forward and backward pass of a GPT that is so small that its ops cost more than their work."""
    _alone()
    tokens = torch.randint(0, 256, (batch, context), generator=torch.Generator().manual_seed(0))

    def make() -> GPT:
        torch.manual_seed(0)
        return GPT(layers, width, 4, context)

    mesh, place = init_device_mesh("cpu", (1,)), flow.placement("cpu", [0])
    ours: nn.Module = flow.to_global(make(), place, flow.sbp.broadcast)
    theirs = distribute_module(make(), mesh)
    inputs = {
        PLAIN: (make(), tokens),
        OURS: (ours, flow.to_global(tokens, place, flow.sbp.broadcast)),
        THEIRS: (theirs, DTensor.from_local(tokens, mesh, [Replicate()])),
    }
    losses: dict[str, float] = {}

    def stepping(name: str, model: nn.Module, given: Tensor) -> Callable[[], object]:
        def run() -> None:
            logits = model(given)
            loss = F.cross_entropy(logits.flatten(0, 1), given.flatten())
            loss.backward()
            model.zero_grad()
            loss = loss.detach()
            losses[name] = float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

        return run

    cases = {name: stepping(name, *given) for name, given in inputs.items()}
    with implicit_replication(), sdpa_kernel(SDPBackend.MATH):  # DTensor knows no other attention of a CPU
        seconds = _in_turns(cases, rounds)
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    ms = {name: min(s) * 1e3 for name, s in seconds.items()}
    _report(f"forward and backward pass of a GPT of {layers} layers", ms, "ms")


def _in_turns(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, after a few that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds + 3):
        for name, run in cases.items():
            begin = time.perf_counter()
            run()
            if i >= 3:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def _report(what: str, took: Mapping[str, float], unit: str) -> None:
    over = {name: t - took[PLAIN] for name, t in took.items()}
    print(what)
    for name, t in took.items():
        print(f"  {name:10} {t:8.2f} {unit}" + (f"   overhead {over[name]:8.2f} {unit}" if name != PLAIN else ""))
    print(f"  overhead of actorflow / of DTensor: {over[OURS] / over[THEIRS]:.2f}")


def _alone() -> None:
    """A process group of one rank, which DTensor needs."""
    torch.set_num_threads(1)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")


if __name__ == "__main__":
    main()
