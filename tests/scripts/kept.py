"""Train with a Keeper; a process that is killed at a step is started again with the same arguments.

python kept.py FOLDER OUT [KILLED_AT]
"""

import json
import os
import signal
import sys

import torch
from torch import nn

import actorflow as flow
from actorflow.session.plan_store import KEPT

folder, out, *killed = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Dropout(0.3), nn.Linear(300, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


@flow.global_function
def step(x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


losses = {}
keeper = flow.checkpoint.Keeper(folder, model=model, optimizer=optimizer, scheduler=scheduler, every=3, keep=2)
for number in keeper.steps(20):
    if killed and number == int(killed[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    losses[number] = step(torch.randn(6, 8))  # drawn by torch's generator, whose state is in the checkpoint
    scheduler.step()
state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
with open(out, "w") as file:
    json.dump({"losses": {n: float(loss) for n, loss in losses.items()}, "state": state}, file)
if flow.env.get_rank() == 0:
    with open(f"{out}.plans", "w") as file:  # how many plans were not compiled
        json.dump(KEPT.taken, file)
