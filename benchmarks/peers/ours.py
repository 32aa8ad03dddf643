"""One rank of actorflow: suite.py starts it with ``actorflow run``, or by itself for one device."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training import Task, loss_of, noting_memory
from turns import Steps, take_turns

import actorflow as flow

sys.path.append(str(Path(__file__).resolve().parents[1]))
from pipelines.ours import SCHEDULES, planned, stepping  # isort: skip


def two_stages(model: Any, task: Task) -> None:
    """Place half of the layers on the first two of four ranks, and the other half on the others."""
    half = task.layers // 2
    first = "|".join(["embed", "positions", *(rf"blocks\.{i}" for i in range(half))])
    last = "|".join(["norm", "head", *(rf"blocks\.{i}" for i in range(half, task.layers))])
    flow.place(model, {first: flow.placement("cpu", [0, 1]), last: flow.placement("cpu", [2, 3])})


def training(name: str, task: Task) -> Steps:
    """The steps of a contender."""
    if task.of(name)[0] in SCHEDULES:
        return planned(name, task)[0]
    name, task = task.of(name)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    options: dict[str, Any] = {"micro_batches": task.micro_batches, "compile": task.compiled}
    if name.startswith("zero"):
        flow.zero(model, int(name.split()[1]))
    elif name == "data-tensor":
        options["parallel"] = {"data": 2, "tensor": 2}
    elif name in ("data-pipeline", "tensor-pipeline"):
        two_stages(model, task)
        options["parallel"] = name.split("-")[0]
    else:
        options["parallel"] = {"data": "data", "tensor": "tensor", "parallel auto": "auto"}[name]

    @flow.global_function(type="train", **options)
    def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return stepping(train_step, task.batches())


if __name__ == "__main__":
    task, rank = Task.from_json(sys.argv[2]), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(task.threads)
    take_turns(sys.argv[1], rank, lambda name: noting_memory(rank, lambda: training(name, task)))
