"""Train with a Keeper and be killed at some steps; rank 0 of each attempt adds its losses to a file.

restarted.py FOLDER LOSSES STEPS EVERY [ATTEMPT:RANK:STEP …]; STEP may be +N, for the Nth step of the attempt, or ~S,
for S seconds after its beginning, and "save" kills a rank while a save is under way.  Before STEP in ATTEMPT:hold:STEP
all ranks wait until a file FOLDER.STEP is there; rank 0 makes FOLDER.STEP.held before, when saves are complete.
neighbours:COUNT:DISK_EVERY keeps copies in memory; a rank has none for them with full:memory:RANK, and cannot write to
it with write:memory:RANK.  in:two:stages makes a pipeline.
"""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import actorflow as flow
from actorflow.persistence.neighbour_copies import _MemoryFile

folder, losses, steps, every, *kills = sys.argv[1:]
rank, attempt = flow.env.rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
words = [word.split(":") for word in kills]
killed_at = {when for a, r, when in words if (a, r) == (attempt, str(rank))}
held_at = {when for a, r, when in words if (a, r) == (attempt, "hold")}
for when in killed_at:
    if when.startswith("~"):
        timer = threading.Timer(float(when[1:]), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 4))
if ["in", "two", "stages"] in words:
    flow.place(model, {"0": flow.placement("cpu", [0]), "3": flow.placement("cpu", [1])})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


@flow.global_function
def step(x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def die_while_writing(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: kill this rank when it has opened its file of a checkpoint."""
    if event == "open" and str(arguments[0]).startswith(folder) and int(str(arguments[2])) & os.O_WRONLY:
        os.kill(os.getpid(), signal.SIGKILL)


def refuse(*_: object) -> int:
    """In place of what writes to a file in memory: there is none left."""
    raise OSError(errno.ENOMEM, "no memory is left")


def full(name: str, *rest: int, make: Callable[..., int] = os.memfd_create) -> int:
    """In place of what makes a file in memory: there is room for what ranks send each other, and no more."""
    return make(name, *rest) if name == "actorflow" else refuse()


copies = next(({"neighbours": int(n), "disk_every": int(m)} for what, n, m in words if what == "neighbours"), {})
if ["full", "memory", str(rank)] in words:
    os.memfd_create = full
if ["write", "memory", str(rank)] in words:
    _MemoryFile.write = refuse
keeper = flow.checkpoint.Keeper(
    folder, model=model, optimizer=optimizer, scheduler=scheduler, every=int(every), keep=2, **copies
)
resumed = keeper.resume()
if rank == 0 and resumed is not None:
    print(f"goes on from {resumed.path}", flush=True)
for done, number in enumerate(keeper.steps(int(steps)), 1):
    if str(number) in held_at:
        keeper.wait()
        if rank == 0:
            Path(f"{folder}.{number}.held").touch()
        while not Path(f"{folder}.{number}").exists():
            time.sleep(0.02)
    loss = float(step(torch.randn(6, 8)))
    if {str(number), f"+{done}"} & killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if "save" in killed_at and number == 2 * int(every):
        sys.addaudithook(die_while_writing)
    scheduler.step()
    if rank == 0:
        with open(losses, "a") as file:
            file.write(f"{number} {loss.hex()} {attempt} {os.environ['WORLD_SIZE']}\n")
