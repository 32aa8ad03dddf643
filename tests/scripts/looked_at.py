"""Train jobs while the master looks at their plans for other clusters, at some of them before any call."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import actorflow as flow
import actorflow.typing as tp
from actorflow.jobs.job import Job

LOOKS = sys.argv[1] == "looks"


def training(seed: int) -> Job:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @flow.global_function(name="step")
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@flow.global_function(type="train")
def makes_its_own(x: tp.Numpy.Placeholder((8, 4), dtype=flow.float)) -> tp.Numpy:  # type: ignore[valid-type]
    hidden = flow.layers.dense(x, 4, name="hidden", kernel_initializer=flow.truncated_normal(0.1))
    loss = hidden.square().mean()
    flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.1]), momentum=0.9).minimize(loss)
    return loss  # type: ignore[return-value]


def look(*jobs: Job, x: Any = torch.ones(8, 4).double()) -> None:  # noqa: B008
    for job in jobs if LOOKS and flow.env.get_rank() == 0 else ():
        assert flow.plan(job, x, devices=4).plan.world == 4


first, second, late = [training(seed) for seed in range(3)]  # optimizers: of one name, and a number each
ONES = np.ones((8, 4), dtype=np.float32)
look(late)
look(makes_its_own, x=ONES)
for number in range(6):
    for step in (first, second, *([late] if number > 2 else [])):
        print(repr(float(step(torch.ones(8, 4).double() + number % 2))))
    print(repr(float(makes_its_own(ONES))))
    look(first, second)
    look(makes_its_own, x=ONES)
    if number == 4:
        look(late)
    if number > 2:  # a size that is new to the ranks, and that the master has looked at
        print(repr(float(first(torch.ones(4 * number, 4).double()))))
        look(first)
print([len(step.plans) for step in (first, second, late)])
