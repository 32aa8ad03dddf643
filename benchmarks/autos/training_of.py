"""Train a subject under one strategy, and note what a step takes: for ``actorflow run`` and ``actorflow plan``.

The subject's name may begin with "tiny ": then it is a model of the same ops with next to no parameters.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import actorflow as flow

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "pipelines")]
from resident import STATUS, memory, start_peak_anew  # noqa: E402  # isort: skip
from subjects import SUBJECTS, TINY, loss_of  # noqa: E402  # isort: skip

WARM = 3  # steps before those that are measured

name, asked, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
subject = TINY[name.removeprefix("tiny ")] if name.startswith("tiny ") else SUBJECTS[name]
model = subject.make()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
options: dict[str, Any] = {key: asked[key] for key in ("parallel", "micro_batches") if key in asked}
if asked.get("stages", 1) > 1:
    flow.place(model, stages=asked["stages"])
if asked.get("zero"):
    flow.zero(model, stage=asked["zero"])


@flow.global_function(type="train", **options)
def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
    """A step of the subject."""
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


generator = torch.Generator().manual_seed(0)
batches = [subject.batch(generator) for _ in range(4)]
times: list[float] = []
for n in range(WARM + steps):
    if n == 1:
        start_peak_anew()
    begun = time.perf_counter()
    float(train_step(*batches[n % len(batches)]))
    times.append(time.perf_counter() - begun)
rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
others = memory("RssShmem") * (world - 1) // world if STATUS.exists() else 0  # they leave it in memory that all map
found = {"seconds": statistics.median(times[WARM:]), "peak": memory("VmHWM") - others}
(Path(sys.argv[4]) / f"{rank}.json").write_text(json.dumps(found))
