"""Train a small model whose state the script changes between calls, as a job and eagerly, and print what differs.

How to run it: ``trainings.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from scripts.trainings import main, off

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01, eps=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, eps=1e-3),
}


class Momentum(Optimizer):
    """By hand, with a count in Python."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), count=0)
                state["count"] += 1
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * state["mean"] / (1 + 0.1 * state["count"]))


OPTIMIZERS["by hand"] = Momentum


def _each(optimizer: Optimizer, change: Callable[[Tensor], Tensor]) -> None:
    for values in optimizer.state.values():
        for key in list(values):
            if isinstance(values[key], Tensor):
                values[key] = change(values[key])


def _changes() -> dict[str, Callable[[Any, Optimizer], object]]:
    def half(model: Any, _: Optimizer) -> None:
        model[0].weight.data = model[0].weight.detach() * 0.5

    def data_in_place(model: Any, _: Optimizer) -> None:
        model[0].weight.data *= 0.5
        model[0].weight.data[1] = 0.1
        model[2].weight.data[0].zero_()
        model[2].bias.data.copy_(model[2].bias.data.sin())

    def held(model: Any, _: Optimizer) -> None:
        data = model[0].weight.data
        data.mul_(0.5)
        data.clamp_(-0.1, 0.1)

    @torch.no_grad()
    def in_place(model: Any, _: Optimizer) -> None:
        for p in model.parameters():
            p.add_(0.01).mul_(p.abs() + 0.5)
        model[0].weight[0] = 0.2
        model[0].weight[1:3].mul_(2)
        torch._foreach_mul_([*model.parameters()], 0.9)

    def anew(model: Any, _: Optimizer) -> None:
        torch.manual_seed(3)
        model[0].reset_parameters()
        nn.init.xavier_uniform_(model[2].weight)
        nn.init.constant_(tensor=model[2].bias, val=0.1)

    @torch.no_grad()
    def vector(model: Any, _: Optimizer) -> None:
        given = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(given * 0.9, model.parameters())

    def moved(model: Any, _: Optimizer) -> None:
        model.cpu().double()

    def buffers(model: Any, _: Optimizer) -> None:
        model[3].running_mean.add_(0.5)
        model[3].running_var.data = model[3].running_var * 2

    def statistics(model: Any, _: Optimizer) -> None:
        model[3].reset_running_stats()

    def emptied(_: Any, optimizer: Optimizer) -> None:
        optimizer.state.clear()

    def one_emptied(model: Any, optimizer: Optimizer) -> None:
        optimizer.state.pop(model[0].weight)

    def new_state(_: Any, optimizer: Optimizer) -> None:
        optimizer.state = defaultdict(dict)

    def replaced(_: Any, optimizer: Optimizer) -> None:
        _each(optimizer, lambda t: torch.full_like(t, 0.5))

    def scaled(_: Any, optimizer: Optimizer) -> None:
        _each(optimizer, lambda t: t.mul_(0.5))

    def number(model: Any, _: Optimizer) -> None:
        model[0].weight.scale = 0.25

    def mask(model: Any, _: Optimizer) -> None:
        model[0].weight.mask = torch.full((6, 4), 0.5)

    def mask_in_place(model: Any, _: Optimizer) -> None:
        if hasattr(model[0].weight, "mask"):
            model[0].weight.mask.mul_(0.5)
        else:
            model[0].weight.mask = torch.ones(6, 4)

    return {function.__name__: function for function in [*locals().values()]}


CHANGES = _changes()
OF_STATE = ("emptied", "one_emptied", "new_state", "replaced", "scaled")
CASES = [(change, kind) for change in CHANGES for kind in (OPTIMIZERS if change in OF_STATE else ["SGD"])]


def train(change: str, kind: str, job: bool, layout: str = "") -> list[float]:
    """The losses, and what the model has at the end."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.BatchNorm1d(3))
    optimizer = OPTIMIZERS[kind](model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        weight = model[0].weight
        loss = F.mse_loss(model(x), y) * getattr(weight, "scale", 1.0)
        if hasattr(weight, "mask"):
            loss = loss + (weight * weight.mask).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options: dict[str, Any] = {"parallel": "tensor"} if layout == "tensor" else {}
    if job and layout == "zero":
        flow.zero(model, stage=3)
    if job and layout == "pipeline":
        flow.place(model, stages=2)
    run = flow.global_function(**options)(step) if job else step
    losses = []
    for number in range(6):
        g = torch.Generator().manual_seed(number)
        losses.append(run(torch.randn(8, 4, generator=g), torch.randn(8, 3, generator=g)).item())
        if number in (2, 3):
            CHANGES[change](model, optimizer)
    return losses + [v for t in model.state_dict().values() for v in t.double().flatten().tolist()]


def difference(change: str, kind: str, layout: str = "") -> float:
    """How far a job is from eager PyTorch."""
    wanted, found = train(change, kind, job=False), train(change, kind, job=True, layout=layout)
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


def cases(layout: str) -> list[tuple[str, str]]:
    """Those for a layout."""
    return [*CASES]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    main(cases, lambda layout, case: off(difference(*case, layout)), ", ".join)
