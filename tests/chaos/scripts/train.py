"""Train under one layout, tell the runner of each moment, and misbehave where it is told to.

train.py SOCKET FOLDER LAYOUT STEPS KEEPER [KIND:RANK:MOMENT:NUMBER:ATTEMPT …]

KEEPER is the folder of checkpoints, or "-".  Rank 0 adds each step's loss to FOLDER/losses.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import actorflow as flow

where, folder, layout, steps, kept, *words = sys.argv[1:]
faulthandler.register(signal.SIGUSR2, all_threads=True)
rank, attempt = flow.env.rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
teller = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
EVERY = 5  # steps from one checkpoint to the next
PAUSE = 0.01  # seconds of a step outside the job


def at(moment: str, number: int = 0) -> None:
    with suppress(OSError):  # the runner is gone
        teller.sendto(json.dumps([rank, os.getpid(), moment, number, attempt]).encode(), where)
    for word in words:
        kind, *when = word.split(":")
        if when == [str(rank), moment, str(number), str(attempt)]:
            misbehave(kind)
        if kind == "print" and when[0] == str(rank):
            print("x" * 3000, flush=True)


def misbehave(kind: str) -> None:
    if kind == "raise":
        raise ValueError("this rank has had enough")
    if kind == "exit":
        sys.exit(3)
    if kind == "slow":
        time.sleep(1.5)
    if kind == "eat":
        while not Path(folder, "limited").exists():
            time.sleep(0.01)
        eaten = []
        while True:
            eaten.append(torch.ones(1 << 22))  # 16 MiB


at("script")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
options = {}
if layout == "pipeline":
    flow.place(model, stages=2)
    options["micro_batches"] = 2
elif layout.startswith("zero"):
    flow.zero(model, stage=int(layout[-1]))
elif layout == "auto":
    options["parallel"] = "auto"


@flow.global_function(type="train", **options)
def train_step(inputs, targets):
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


objects = {"model": model, "optimizer": optimizer}
batches = None
if layout == "workers":
    rows = torch.randn(16 * int(steps), 64)
    dataset = torch.utils.data.TensorDataset(rows, torch.randint(0, 10, (len(rows),)))
    objects["loader"] = flow.data.loader(dataset, batch_size=16, shuffle=True, workers=1)
    batches = objects["loader"].repeat()
keeper = None if kept == "-" else flow.checkpoint.Keeper(kept, every=EVERY, keep=2, **objects)
todo = range(int(steps)) if keeper is None else keeper.steps(int(steps))
first = True
for step in todo:
    at("compile" if first else "step", step)
    batch = next(batches) if batches else (torch.randn(16, 64), torch.randint(0, 10, (16,)))
    loss = float(train_step(*batch))
    first = False
    if rank == 0:
        with open(f"{folder}/losses", "a") as file:
            file.write(f"{step} {loss.hex()} {attempt} {os.environ['WORLD_SIZE']}\n")
    time.sleep(PAUSE)
    if keeper is not None and step % EVERY == EVERY - 1:
        at("checkpoint", step // EVERY)
at("shutdown")
