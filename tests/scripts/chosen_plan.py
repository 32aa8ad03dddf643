"""Train by a plan that is chosen, look at the results with another job, and end with a shorter batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow

path, budget = sys.argv[1:]  # where to write; of memory, or "" for none
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@flow.global_function(type="train", memory_budget=budget or None)
def train_step(x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@flow.global_function(type="predict")
def predict(x: Tensor) -> Tensor:
    made: Tensor = model(x)
    return made


generator = torch.Generator().manual_seed(1)
losses = []
for size in (16, 16, 16, 7):
    x, y = torch.randn(size, 128, generator=generator), torch.randint(10, (size,), generator=generator)
    losses.append(float(train_step(x, y)))
    losses += predict(x).sum(0).tolist()
state = {name: float(value.double().norm()) for name, value in model.state_dict().items()}
if flow.env.get_rank() == 0:
    plan = train_step.plan
    assert plan is not None
    said = {"losses": losses, "state": state, "stages": len(plan.summary.stages), "pieces": plan.pieces}
    Path(path).write_text(json.dumps(said))
