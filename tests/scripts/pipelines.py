"""Train pipelines, named by titles, on the four devices of a run, and save what each ended with.

A title is "MODEL, LAYOUT, SCHEDULE, M": "gpt, data 2 × pipeline 2, zb-h1, 8".
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import actorflow as flow
from models import CASES, DEEP_GPT, Case
from trained import in_float64

BATCH, STEPS = 16, 3
BENT = {"interleaved": (0, 1, 0, 1), "zb-v": (0, 1, 1, 0)}  # two stages for each half of the devices: which has which
LAYOUTS = {  # devices of each half of a pipeline, or none: a stage on each; the axis of a job that asks for stages
    "pipeline 4": (None, None),
    "pipeline 2": (([0], [3]), None),  # the other two have nothing to do
    "data 2 × pipeline 2": (([0, 1], [2, 3]), None),
    "tensor 2 × pipeline 2": (([0, 1], [2, 3]), "tensor"),
}


def case_of(name: str) -> Case:
    """A model of ``models`` or one that is promised, in float64."""
    if name in CASES:
        return in_float64(DEEP_GPT if name == "gpt" else CASES[name])  # to cut eight stages of
    from hf import PROMISED  # transformers takes seconds to import, in each process

    return in_float64(PROMISED[name](0.0))


Ended = dict[str, Any]  # what a training is compared by


def train(title: str) -> Ended | None:
    """Train what a title says; what it ended with, on the master."""
    name, layout, schedule, micro_batches = title.split(", ")
    case = case_of(name)
    model = case.model()
    optimizer = case.optimizer(model)
    halves, axis = LAYOUTS[layout]
    parallel: str | dict[str, int] | None = axis
    if axis is None or schedule in BENT:  # stages that go round the halves have to be placed
        place(model, halves, schedule)
    else:
        parallel = {"pipeline": 2, axis: 2}

    @flow.global_function(type="train", micro_batches=int(micro_batches), schedule=schedule, parallel=parallel)
    def step(*batch: Tensor) -> Tensor:
        loss = case.loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @flow.global_function(type="predict")
    def look(*batch: Tensor) -> Tensor:
        """A job that asks for no stages, and finds its parameters in some."""
        return case.loss(model, *batch)

    losses = [step(*batch) for batch in case.batches([BATCH] * STEPS)]
    model.eval()
    look(*case.batches([BATCH])[0])
    if not flow.env.is_master():
        return None
    plan = step.plan
    return {
        "losses": [loss.item() for loss in losses],
        "state": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "stages": list(plan.summary.stages),
        "pieces": plan.pieces,
        "told": [note for note in look.plan.notes if "scope" in note],
        "planes": sorted({str(a.comm.plane) for a in plan.actors if a.kind == "send"}),
    }


def place(model: nn.Module, halves: tuple[list[int], list[int]] | None, schedule: str) -> None:
    """Cut a model into stages: one on each device, or for each half of them, or twice as many."""
    if halves is None:
        flow.place(model, stages=8 if schedule in BENT else 4)
    else:
        of = [flow.placement("cpu", ranks) for ranks in halves]
        flow.place(model, [of[half] for half in BENT.get(schedule, (0, 1))])


if __name__ == "__main__":
    path, *titles = sys.argv[1:]
    found = {title: train(title) for title in titles}
    if flow.env.is_master():
        torch.save(found, path)
