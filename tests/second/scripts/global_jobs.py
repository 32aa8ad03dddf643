"""Trains a module of global tensors in a job without nn.Graph, and writes what it found to a file for each rank.

usage: global_jobs.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actorflow as flow

WORLD = flow.env.get_world_size()
EVERYWHERE = flow.placement("cpu", list(range(WORLD)))
LAST = flow.placement("cpu", [WORLD - 1])
S, B = flow.sbp.split, flow.sbp.broadcast
BATCHES = [(torch.randn(8, 8, generator=torch.Generator().manual_seed(n)), torch.arange(8) % 4) for n in range(4)]


class Scaled(nn.Module):
    """Two layers, and a buffer by which the result is scaled."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        """The scaled result."""
        return self.second(torch.tanh(self.first(x))) * self.scale  # type: ignore[no-any-return]


def states() -> dict[str, Any]:
    """What becomes of the state of a module that a job has taken over, and of one that is loaded into it."""
    model: Any = Scaled()
    flow.to_global(model, EVERYWHERE, B)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    @flow.global_function(type="train")
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    before = float(step(*BATCHES[0]))
    weight = model.first.weight
    owned = {
        "parameter": weight, "detached": weight.detach(), "in a state": model.state_dict()["first.weight"],
        "of Adam": optimizer.state_dict()["state"][0]["exp_avg"], "copied": weight.detach().clone(),
        "copied as it is": weight.clone(), "in another dtype": weight.detach().double(),
    }  # fmt: skip
    parts = {name: list(t.to_global(EVERYWHERE, S(0)).to_local().shape) for name, t in owned.items()}
    with torch.no_grad():
        rows = model(BATCHES[1][0].to_global(EVERYWHERE, B).to_global(sbp=S(0)))
        eager = bool(torch.allclose(torch.from_numpy(rows.numpy()), model(BATCHES[1][0]), atol=1e-6))
    same = bool((weight.to_global(EVERYWHERE, S(0)).numpy() == weight.detach().numpy()).all())
    other: Any = flow.to_global(Scaled(), EVERYWHERE, S(0))
    model.load_state_dict(other.state_dict())
    return {"parts": parts, "same": same, "eager": [str(rows.sbp), eager], "again": [before, float(step(*BATCHES[0]))]}


def trained(model: Any, before: int) -> dict[str, Any]:
    """The losses of a training whose first ``before`` steps are eager, and what the plan keeps where."""
    weight = model.first.weight  # is reached by the step as well, as a variable of its own
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + weight.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    lie: Any = (weight.placement, B)
    losses = [float(step(x, y.to_global(*lie))) for x, y in BATCHES[:before]]  # type: ignore[operator]
    F.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1].to_global(*lie)).backward()  # type: ignore[operator]
    job = flow.global_function(type="train")(step)
    losses += [float(job(x, y)) for x, y in BATCHES[before:]]
    assert job.plan is not None
    lies = {v.name: [list(v.placement.ranks), ",".join(map(str, v.sbp))] for v in job.plan.variables}
    first = model.first.weight
    again = first.to_global()  # lies as it did
    still = [first.is_global, first.is_local, str(first.sbp), list(first.placement.ranks)]
    part = bool(torch.equal(first.to_local(), again.to_local()) and (again.numpy() == first.detach().numpy()).all())
    return {
        "losses": losses, "lies": lies, "kinds": sorted({type(p).__name__ for p in model.parameters()}),
        "still": [*still, str(again.sbp), part, list(first.to_local().shape)],
    }  # fmt: skip


def plainly(before: int) -> list[float]:
    """The losses on one device."""
    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for number, (x, y) in enumerate(BATCHES):
        if number == before:
            F.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
        loss = F.cross_entropy(model(x), y) + model.first.weight.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def loose() -> str:
    """What is said of a global tensor that is in no module."""
    table = flow.ones(4, 4, placement=EVERYWHERE, sbp=S(0))
    try:
        flow.global_function(type="predict")(lambda x: x @ table)(torch.ones(2, 4))
    except flow.CaptureError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    found: dict[str, Any] = {"loose": loose(), "states": states()}
    for before in (0, 2):
        split = flow.to_global(Scaled(), EVERYWHERE, {".*": B, r"first\.weight": S(0)})
        found[f"split {before}"] = trained(split, before) | {"expected": plainly(before)}
    found["on one"] = trained(flow.to_global(Scaled(), LAST, B), 1) | {"expected": plainly(1)}
    (Path(sys.argv[1]) / f"{flow.env.get_rank()}.json").write_text(json.dumps(found))
