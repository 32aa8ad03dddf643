"""Train with a Keeper: kept.py FOLDER STEPS [HOLD …]; before a step HOLD all ranks wait for a file FOLDER/HOLD."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import actorflow as flow

folder, steps, *holds = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


@flow.global_function(type="train")
def train_step(inputs):
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


keeper = flow.checkpoint.Keeper(folder, model=model, optimizer=optimizer, every=3)
for step in keeper.steps(int(steps)):
    while str(step) in holds and not Path(folder, str(step)).exists():
        time.sleep(0.05)
    loss = float(train_step(torch.randn(16, 64)))
    if flow.env.rank() == 0:
        print(f"step {step}, {os.environ['WORLD_SIZE']} ranks, loss {loss:.9f}", flush=True)
