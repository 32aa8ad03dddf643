"""Whether a parameter has a gradient, which is all that a step may want to know of it, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import actorflow as flow


def run(decorate: Callable[..., Any]) -> list[float]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @decorate(type="predict")
    def has(x: Tensor) -> Tensor:
        return x.sum() * (2 if model["used"].weight.grad is not None else 3)

    @decorate(type="train")
    def backward(x: Tensor) -> Tensor:
        first = all(p.grad is None for p in model.parameters())
        loss: Tensor = model["used"](x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        without = sum(p.grad is None for p in model.parameters())
        return loss + without + 10 * first

    @decorate(type="train")
    def step(x: Tensor) -> Tensor:
        optimizer.step()
        optimizer.zero_grad()
        return x.sum() * (2 if model["used"].bias.grad is None else 3)

    x = torch.rand(4, 3, dtype=torch.float64)
    found = []
    for i in range(4):
        found += [has(x).item(), backward(x).item(), has(x).item()]
        if i == 1:
            found.append(backward(x).item())
        found += [step(x).item(), has(x).item()]
    return found


def plainly(**_: Any) -> Callable[[Any], Any]:
    return lambda function: function


def test_a_step_that_asks_whether_a_gradient_is_there_is_told_what_pytorch_says() -> None:
    for found, wanted in zip(run(flow.global_function), run(plainly), strict=True):
        assert abs(found - wanted) < 1e-9
