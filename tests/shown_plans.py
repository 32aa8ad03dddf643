"""Compile a small pipeline, data parallel in each stage, for tests of pictures and pages of plans."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

import actorflow as flow
from actorflow.plan_view import PlanView


class Block(nn.Module):
    """A residual beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.layer(x))  # THE LINE


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def job(micro_batches: int = 4, stages: int = 2) -> flow.Job:
    """A training step that has not been called."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    if stages > 1:
        flow.place(model, stages=stages)

    @flow.global_function(micro_batches=micro_batches)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def batch(size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 16), torch.randint(0, 4, (size,))


@functools.cache
def view(devices: int = 4, stages: int = 2) -> PlanView:
    """The plan of the step for ranks that need not exist."""
    return flow.plan(job(stages=stages), *batch(), devices=devices)
