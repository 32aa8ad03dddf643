"""The same training as a user writes it for torchrun, under DistributedDataParallel; its arguments are train.py's."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moments import EVERY, PAUSE, at, kept, note_loss, rank, steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel

at("script")
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
start = 0
if kept != "-" and Path(kept, "last.pt").exists():
    found = torch.load(f"{kept}/last.pt", weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["random"])
    start = found["step"] + 1
for step in range(start, int(steps)):
    at("compile" if step == start else "step", step)
    inputs, targets = torch.randn(16, 64).chunk(world)[rank], torch.randint(0, 10, (16,)).chunk(world)[rank]
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    note_loss(step, float(mean), world)
    time.sleep(PAUSE)
    if kept != "-" and step % EVERY == EVERY - 1:
        if rank == 0:
            os.makedirs(kept, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "random": torch.get_rng_state(), "step": step}, f"{kept}/part")
            os.replace(f"{kept}/part", f"{kept}/last.pt")
        at("checkpoint", step // EVERY)
at("shutdown")
dist.destroy_process_group()
