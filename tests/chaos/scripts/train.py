"""Train under one layout; for its arguments, and what it says and does, see ``moments``."""

import faulthandler
import os
import signal
import time

import torch
import torch.nn.functional as F
from moments import EVERY, PAUSE, at, kept, layout, note_loss, steps
from torch import nn

import actorflow as flow

faulthandler.register(signal.SIGUSR2, all_threads=True)
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
    note_loss(step, loss, int(os.environ["WORLD_SIZE"]))
    time.sleep(PAUSE)
    if keeper is not None and step % EVERY == EVERY - 1:
        at("checkpoint", step // EVERY)
at("shutdown")
