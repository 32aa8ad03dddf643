"""One rank of actorflow: pipeline.py starts it with ``actorflow run``, and before that with ``actorflow plan``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

import torch
from setting import GPT, Setting, cut, loss_of, ranks_of
from torch import Tensor
from turns import Notes, Steps, take_turns

import actorflow as flow
from actorflow.runtime.measured_costs import here
from actorflow.session.process import current
from actorflow_scheduler.timeline import simulate

# name → (schedule, stages on each rank, whether they go there and back)
SCHEDULES = {
    "gpipe": ("gpipe", 1, False),
    "1f1b": ("1f1b", 1, False),
    "interleaved": ("interleaved", 2, False),
    "zb-h1": ("zb-h1", 1, False),
    "zb-h2": ("zb-h2", 1, False),
    "zb-v": ("zb-v", 2, True),
    "auto": ("auto", 1, False),
    "auto, interleaved": ("auto", 2, False),
    "auto, there and back": ("auto", 2, True),
}


def place_by_hand(model: GPT, setting: Setting, ranks: list[int]) -> None:
    """Cut the model where the other side cuts it, stage i on ``ranks[i]``."""
    places = {}
    for number, layers in enumerate(cut(setting.layers, ranks)):
        modules = [rf"blocks\.{i}" for i in layers]
        modules += ["embed", "positions"] if number == 0 else []
        modules += ["norm", "head"] if number == len(ranks) - 1 else []
        places["|".join(modules)] = flow.placement("cpu", [ranks[number]])
    flow.place(model, places)


def stepping(job: Callable[..., Any], batches: Iterable[tuple[Tensor, Tensor]]) -> Steps:
    """Steps of a training job over these batches, again and again."""
    given = cycle(batches)

    def steps(count: int) -> float:
        for _ in range(count):
            loss = job(*next(given))
        worker = current().worker
        assert worker is not None
        worker.wait_all()  # the loss is there before the optimizer is done
        return float(loss)

    return steps


def planned(name: str, setting: Setting) -> tuple[Steps, Notes]:
    """The step under a schedule of ours; the master notes its forecast of a turn."""
    name, setting = setting.of(name)
    schedule, each, bent = SCHEDULES[name]
    model = setting.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr)
    ranks = ranks_of(setting.processes, each, bent)
    if schedule == "auto" or bent:  # patterns would join the two stages at the bend, which are neighbours on one rank
        flow.place(model, [flow.placement("cpu", [rank]) for rank in ranks])
    else:
        place_by_hand(model, setting, ranks)

    @flow.global_function(
        type="train", micro_batches=setting.micro_batches, schedule=schedule, compile=setting.compiled
    )
    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def notes() -> dict[str, float]:
        plan = train_step.plan
        if os.environ["RANK"] != "0" or plan is None:
            return {}
        timeline = simulate(plan, setting.steps, here("cpu"))
        busy = sum(share for (_, queue), share in timeline.busy.items() if queue == "compute")
        each = timeline.seconds / setting.steps
        return {"forecast": each, "work": busy * each}  # seconds of a step, on the clock and of all ranks' computing

    return stepping(train_step, setting.batches()), notes


def main() -> None:
    """Serve the referee; under ``actorflow plan``, with the name of a contender for an address, make only its plan."""
    setting = Setting.from_json(sys.argv[2])
    torch.set_num_threads(1)
    if sys.argv[1] in SCHEDULES:
        step, _ = planned(sys.argv[1], setting)
        step(1)
    take_turns(sys.argv[1], int(os.environ["RANK"]), lambda name: planned(name, setting))


if __name__ == "__main__":
    main()
