"""Cases of ``models`` on a real GPU, and their training there without a plan."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from actorflow.devices import Device, make_device
from models import Case, reference

STEPS = 3
# trains until it is ended; tells its process by a file in the folder that is its first argument, and fails where
# tensors go another way than the second one says, if there is one
ENDLESS = """
import os, sys
from pathlib import Path
import torch
import actorflow as flow

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())

@flow.global_function(type="train")
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for number in range(10**9):
    loss = float(step(torch.randn(16, 64, generator=torch.Generator().manual_seed(number))).detach())
    if number == 5:
        planes = {a.comm.plane for a in step.last.plan.actors if a.comm is not None}
        assert sys.argv[2:] in ([], [*planes]), planes
        here = Path(sys.argv[1], os.environ["RANK"])
        here.with_suffix(".new").write_text(str(os.getpid()))
        here.with_suffix(".new").rename(here)
"""


def here(rank: int) -> Device:
    """The GPU, for every rank."""
    return make_device(torch.device("cuda"))


def on_gpu(case: Case) -> Case:
    """The case with its model on the GPU, as a script for one device has it."""
    return replace(case, make=lambda: case.make().cuda())


def eagerly(case: Case, pieces: int, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of eager PyTorch there."""
    model = case.model()
    batches = [tuple(t.cuda() for t in batch) for batch in case.batches([16] * steps)]
    scaler = case.scaler() if case.scaler else None
    losses, state = reference(
        model, case.optimizer(model), case.loss, batches, pieces if case.batch_norm else 1, case.clip, scaler
    )
    return losses, {name: value.cpu() for name, value in state.items()}
