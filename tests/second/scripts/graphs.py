"""Train by ``nn.Graph`` as OneFlow's pages write it, and by plain torch; print what each case comes to."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import actorflow as flow
import actorflow.nn as nn
from actorflow.nn.graph import GraphModule

warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
B, S = flow.sbp.broadcast, flow.sbp.split
WORLD = flow.env.get_world_size()
LINE = flow.placement("cpu", list(range(WORLD)))
STEPS = 4


def half(number: int) -> Any:
    """The first or the second half of the ranks."""
    return flow.placement("cpu", list(range(number * WORLD // 2, (number + 1) * WORLD // 2)))


class Net(nn.Module):
    """Two layers; the second may be on other devices."""

    def __init__(self, placement: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.placement = placement

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.placement is not None:
            hidden = hidden.to_global(placement=self.placement, sbp=B)  # type: ignore[operator]
        logits: torch.Tensor = self.second(hidden)
        return logits


class Train(nn.Graph):
    """A training step; ``change`` has the last word on how it is compiled."""

    def __init__(self, model: Any, optimizer: Any, schedule: Any, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, nn.CrossEntropyLoss()
        self.add_optimizer(optimizer, lr_sch=schedule)
        change(self)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


class Evaluate(nn.Graph):
    """Logits of the same model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor) -> Any:
        """The logits of a batch."""
        return self.model(x)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(STEPS)
    ]


def made(placement: Any = None) -> Net:
    torch.manual_seed(0)
    return Net(placement)


def optimizer_of(model: Net, **group: float) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = flow.optim.AdamW([{"params": list(model.parameters()), **group}], lr=0.05)
    return optimizer, flow.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def plainly(amp: torch.dtype | None = None, clip: float = 0.0) -> tuple[list[float], Net]:
    """What one device comes to."""
    model = made()
    optimizer, schedule = optimizer_of(model)
    losses = []
    for x, y in batches():
        with torch.autocast("cpu", amp or torch.bfloat16, enabled=amp is not None):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, model


def farthest(model: Any, others: list[Any]) -> float:
    """The largest difference between a model's parameters and other ones."""
    return max(float((a - b).abs().max()) for a, b in zip(model.parameters(), others, strict=True))


def nothing(_: Any) -> None:
    """A graph as it is."""


def micro_batches(graph: Any) -> None:
    graph.config.set_gradient_accumulation_steps(2)


def zero(stage: int) -> Callable[[Any], None]:
    return lambda graph: graph.config.enable_zero(True, stage=stage)


def amp(graph: Any) -> None:
    graph.config.enable_amp(True, dtype=torch.bfloat16)


def scaled(graph: Any) -> None:
    graph.set_grad_scaler(flow.amp.GradScaler("cpu", init_scale=1024.0))


def again(graph: Any) -> None:
    graph.model.first.to(GraphModule).activation_checkpointing = True


def staged(graph: Any) -> None:
    for number, module in enumerate((graph.model.first, graph.model.second)):
        module.to(GraphModule).set_stage(number, half(number))
    micro_batches(graph)


def data() -> tuple[Net, Any]:
    model = made()
    return model.to_global(placement=LINE, sbp=B), (LINE, S(0))  # type: ignore[operator]


def tensor() -> tuple[Net, Any]:
    model: Any = made()
    model.first.to_global(placement=LINE, sbp=S(0))
    model.second.to_global(placement=LINE, sbp={"weight": S(1), "bias": B})
    return model, (LINE, B)


def pipeline() -> tuple[Net, Any]:
    model: Any = made(half(1))
    model.first.to_global(placement=half(0), sbp=B)
    model.second.to_global(placement=half(1), sbp=B)
    return model, (half(0), B)


def mesh() -> tuple[Net, Any]:
    model: Any = made()
    grid = flow.placement("cpu", [[0, 1], [2, 3]] if WORLD == 4 else [[0], [1]])
    model.first.to_global(placement=grid, sbp=[B, S(0)])
    model.second.to_global(placement=grid, sbp={"weight": [B, S(1)], "bias": [B, B]})
    return model, (grid, [S(0), B])


def plain() -> tuple[Net, Any]:
    return made(), None


CASES: dict[str, tuple[Callable[[], tuple[Net, Any]], Callable[[Any], object], dict[str, float]]] = {
    "plain": (plain, nothing, {}),
    "micro-batches": (plain, micro_batches, {}),
    "zero 1": (plain, zero(1), {}),
    "zero 2": (data, zero(2), {}),
    "zero 3": (plain, zero(3), {}),
    "amp": (plain, amp, {}),
    "scaled": (plain, scaled, {}),
    "again": (plain, again, {}),
    "clipped": (plain, nothing, {"clip_grad_max_norm": 0.1, "clip_grad_norm_type": 2.0}),
    "scaled and clipped": (data, scaled, {"clip_grad_max_norm": 0.1}),
    "staged": (plain, staged, {}),
    "data": (data, nothing, {}),
    "tensor": (tensor, nothing, {}),
    "pipeline": (pipeline, staged, {}),
    "mesh": (mesh, nothing, {}),
}


def case(name: str) -> dict[str, Any]:
    """Train one case, and compare it with one device."""
    make, change, group = CASES[name]
    model, lies = make()
    optimizer, schedule = optimizer_of(model, **group)
    graph = Train(model, optimizer, schedule, change)
    losses = []
    for x, y in batches():
        args = (x, y) if lies is None else [t.to_global(LINE, B).to_global(*lies) for t in (x, y)]  # type: ignore[operator]
        losses.append(float(graph(*args)))
    expected, other = plainly(torch.bfloat16 if name == "amp" else None, group.get("clip_grad_max_norm", 0.0))
    assert graph.compiled_plan is not None
    x = batches()[0][0]
    ours = Evaluate(model)(x)
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "parameters": farthest(model, list(other.parameters())),
        "logits": float(abs(ours.numpy() - other(x).detach().numpy()).max()),
        "rate": optimizer.param_groups[0]["lr"],
        "layouts": {
            v.name: [list(v.placement.ranks), ",".join(map(str, v.sbp))]
            for v in graph.compiled_plan.variables
            if v.name.endswith("weight")
        },
        "trained": losses,
        "text": repr(graph),
    }  # fmt: skip


def state() -> dict[str, Any]:
    """A graph goes on where another one has stopped."""
    one, two = (made(), made())
    graphs = [Train(model, *optimizer_of(model), nothing) for model in (one, two)]
    for x, y in batches()[:2]:
        float(graphs[0](x, y))
    saved = copy.deepcopy(graphs[0].state_dict())
    graphs[1].load_state_dict(saved)
    both = [[float(graph(x, y)) for x, y in batches()[2:]] for graph in graphs]
    return {"keys": list(saved), "both": both}


def overflow() -> dict[str, Any]:
    """Steps whose scaled gradients overflow are left out, and the scale goes down."""
    model: Any = nn.Linear(8, 4)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    scaler = flow.amp.GradScaler("cpu", init_scale=1e38)
    graph = Train(model, optimizer, None, lambda graph: graph.set_grad_scaler(scaler))
    x, y = batches()[0]
    for _ in range(3):
        float(graph(100 * x, y))
    return {"moved": farthest(model, before), "scale": scaler.get_scale()}


if __name__ == "__main__":
    found = {name: case(name) for name in sys.argv[2:]} | {"state": state(), "overflow": overflow()}
    (Path(sys.argv[1]) / f"{flow.env.get_rank()}.json").write_text(json.dumps(found))
