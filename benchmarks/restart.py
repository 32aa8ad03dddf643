"""Measure the time from the loss of a rank to the next finished step, beside torchrun's restart of the same training.

python benchmarks/restart.py                   a GPT of 12 layers on 2 ranks, a few minutes
python benchmarks/restart.py --layers 2 --rounds 5

Each round runs both trainings: `actorflow run --max-restarts 1` with a Keeper, and `torchrun --max-restarts 1` with
DistributedDataParallel and torch.distributed.checkpoint, which saves at the same steps.  Rank 1 kills itself, as
kill -9 would.  "start" is the time from the command to the end of the first step, in a new folder.  A figure is the
median of the rounds.
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

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import actorflow as flow
from gpt import GPT, draw_batch, stdlib_bytes

WIDTH, HEADS, CONTEXT, BATCH = 256, 4, 64, 8
EVERY, KILLED, STEPS = 5, 12, 15  # steps between checkpoints, the step behind which rank 1 is lost, and all
TITLES = {"ours": "actorflow run --max-restarts, Keeper", "theirs": "torchrun --max-restarts, DDP, DCP"}


@click.command()
@click.option("--layers", default=12, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--neighbours", is_flag=True, help="Ours also keeps checkpoints in memory, and goes on from there.")
@click.option("--train", type=(click.Choice(list(TITLES)), str), help="Be a rank of one of the trainings.", hidden=True)
def main(layers: int, rounds: int, neighbours: bool, train: tuple[str, str] | None) -> None:
    """Measure, or train."""
    if train is not None:
        kind, folder = train
        (ours if kind == "ours" else theirs)(layers, folder, neighbours)
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    print(f"A GPT of {layers} layers, width {WIDTH}, on 2 ranks; saved every {EVERY} steps", flush=True)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in TITLES}
    for _ in range(rounds):
        for kind, seen in found.items():
            with tempfile.TemporaryDirectory(prefix="restart-") as folder:
                seen.append(run(kind, layers, folder, neighbours))
    for kind, seen in found.items():
        start, again = (statistics.median(one[at] for one in seen) for at in (0, 1))
        then = f"from kill -9 to the next step {again:6.2f} s, ratio {again / start:.2f}"
        print(f"{TITLES[kind]:38} start {start:6.2f} s; {then}")


def run(kind: str, layers: int, folder: str, neighbours: bool) -> tuple[float, float]:
    """Run a training: the seconds of its start, and those from the loss of a rank to the next finished step."""
    if kind == "ours":
        command = ["-m", "actorflow", "run", __file__, "--devices", "2", "--max-restarts", "1", "--"]
    else:
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
        command += ["--monitor-interval", "0.1", "--standalone", __file__]
    options = ["--layers", str(layers), "--train", kind, folder, *(["--neighbours"] if neighbours else [])]
    begun = time.time()
    done = subprocess.run([sys.executable, *command, *options], capture_output=True, text=True,
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


def ours(layers: int, folder: str, neighbours: bool) -> None:
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
    memory = {"neighbours": 1, "disk_every": 1000} if neighbours else {}
    keeper = flow.checkpoint.Keeper(
        f"{folder}/checkpoints", model=model, optimizer=optimizer, every=EVERY, **memory
    )
    for step in keeper.steps(STEPS):
        float(train_step(*draw_batch(data, BATCH, CONTEXT, torch.Generator().manual_seed(step))))
        finished(folder, rank, step)


def theirs(layers: int, folder: str, _neighbours: bool) -> None:
    """Train with DistributedDataParallel, and torch's own distributed checkpoints."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(GPT(layers, WIDTH, HEADS, CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, start = stdlib_bytes(), 0
    saved = sorted(Path(folder).glob("step-*/.metadata"), key=lambda path: int(path.parent.name[5:]))
    if saved:
        start = int(saved[-1].parent.name[5:]) + 1
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step in range(start, STEPS):
        tokens, targets = draw_batch(data, BATCH, CONTEXT, torch.Generator().manual_seed(step))
        tokens, targets = (x.chunk(world)[rank] for x in (tokens, targets))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if step % EVERY == EVERY - 1:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/step-{step}")
        finished(folder, rank, step)


if __name__ == "__main__":
    main()
