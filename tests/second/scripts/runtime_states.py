"""Trains graphs, keeps the runtime state of each after some steps, or goes on from it; writes what it came to.

usage: runtime_states.py whole|on FOLDER OUT CASE …
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.session.plan_store import KEPT

WORLD = flow.env.get_world_size()
EVERYWHERE = flow.placement("cpu", list(range(WORLD)))
S, B = flow.sbp.split, flow.sbp.broadcast
STEPS, KEPT_AFTER = 5, 3


class Net(nn.Module):
    """Two layers with dropout between them, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.second = nn.Linear(8, 16), nn.Dropout(0.25), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out: Tensor = self.second(self.drop(torch.tanh(self.norm(self.first(x)))))
        return out


class Train(flow.nn.Graph):
    """A training step of one of the cases."""

    def __init__(self, case: str) -> None:
        super().__init__()
        change, optimizer = CASES[case]
        model = Net()
        if case == "global":
            flow.to_global(model, EVERYWHERE, {".*": B, r"first\.(weight|bias)": S(0)})
        self.model, self.loss_fn = model, nn.CrossEntropyLoss()
        chosen = optimizer(model.parameters())
        self.add_optimizer(chosen, lr_sch=torch.optim.lr_scheduler.StepLR(chosen, 2, 0.5))
        change(self)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


def _accumulated(graph: Train) -> None:
    graph.config.set_gradient_accumulation_steps(2)


def _scaled(graph: Train) -> None:
    graph.set_grad_scaler(flow.amp.GradScaler("cpu", init_scale=1e38, growth_interval=2))


def _split(graph: Train) -> None:
    graph.config.enable_zero(stage=2)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return flow.optim.AdamW(parameters, lr=0.05)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return flow.optim.SGD(parameters, lr=0.1, momentum=0.9)


CASES: dict[str, tuple[Callable[[Train], object], Callable[[Any], torch.optim.Optimizer]]] = {
    "plain": (lambda graph: None, _adam),
    "momentum": (lambda graph: None, _momentum),
    "accumulated": (_accumulated, _adam),
    "scaled": (_scaled, _momentum),
    "split": (_split, _adam),
    "global": (lambda graph: None, _momentum),
}


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def case(name: str, whole: bool, folder: Path) -> dict[str, Any]:
    """The losses from the step on at which the state was kept, the values at the end, and how many plans were taken."""
    flow.manual_seed(1)
    graph, before = Train(name), KEPT.taken
    file = folder / f"{name}.pt"
    if not whole:
        flow.manual_seed(2)  # which the loaded state takes back
        graph.load_runtime_state_dict(flow.load(file, global_src_rank=0 if name == "momentum" else None))
    losses, noise = [], []
    for number in range(0 if whole else KEPT_AFTER, STEPS):
        losses.append(float(graph(*batch(number))))
        noise.append(float(torch.rand(())))
        if whole and number + 1 == KEPT_AFTER and flow.env.get_rank() == 0:
            flow.save(graph.runtime_state_dict(), file)
    at = KEPT_AFTER if whole else 0
    optimizer = graph._trainings[0].optimizer
    scale = 0.0 if graph._scaler is None else graph._scaler.get_scale()
    values = {key: value.tolist() for key, value in graph.model.state_dict().items()}
    return {
        "losses": losses[at:], "noise": noise[at:], "values": values, "rate": optimizer.param_groups[0]["lr"],
        "name": graph.name, "scale": scale, "taken": KEPT.taken - before, "plans": len(graph._job.plans),  # type: ignore[union-attr]
    }  # fmt: skip


if __name__ == "__main__":
    kind, folder, out, *names = sys.argv[1:]
    found = {name: case(name, kind == "whole", Path(folder)) for name in names}
    (Path(out) / f"{kind}-{flow.env.get_rank()}.json").write_text(json.dumps(found))
