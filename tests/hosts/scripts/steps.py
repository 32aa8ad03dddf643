"""Train a small model for so many steps: steps.py STEPS [RANK: raises at its third step]; the master says each step."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import actorflow as flow

steps = int(sys.argv[1])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rank = flow.env.rank()


@flow.global_function(type="train")
def train_step(inputs, targets):
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


print(f"rank {rank} prints this to its output", flush=True)
print(f"rank {rank} prints this to its errors", file=sys.stderr, flush=True)
for step in range(1, steps + 1):
    loss = float(train_step(torch.randn(16, 64), torch.randint(0, 10, (16,))))
    if step == 3 and sys.argv[2:] == [str(rank)]:
        raise ValueError("this rank has had enough")
    if rank == 0:
        print(f"step {step}, loss {loss:.6f}", flush=True)
