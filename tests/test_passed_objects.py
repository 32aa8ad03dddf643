"""Objects as arguments: a step looks into modules, optimizers, settings and functions that it is given."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow


@dataclasses.dataclass
class Settings:
    kl: float = 1.0


class Weights:
    kl = 1.0


class Memory:
    def __init__(self) -> None:
        self.x = torch.ones(3)
        self.calls = 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    loss = measure(model(x))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def test_models_and_optimizers_that_are_passed_are_trained_as_eagerly() -> None:
    def losses(step: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        found = []
        for measure in (lambda h: h.square().mean(), nn.Flatten(0)):
            model = nn.Linear(3, 1)
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
            batches = [torch.randn(1 if isinstance(measure, nn.Module) else 4, 3) for _ in range(3)]
            found += [step(model, optimizer, x, lambda h, m=measure: m(h).sum()) + 0 for x in batches]
            found += [p.detach() + 0 for p in model.parameters()]
        return found

    for mine, wanted in zip(losses(flow.global_function(train)), losses(train), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


def test_a_parameter_is_trained_by_hand_and_read_by_another_job() -> None:
    @flow.global_function
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad  # type: ignore[operator]
                p.grad = None
        return loss.detach()

    @flow.global_function(type="predict")
    def predict(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    assert step(model, torch.ones(1, 2)).item() == 2
    assert predict(model, torch.ones(1, 2)).item() == 1


@pytest.mark.parametrize("make", [Settings, Weights, lambda: types.SimpleNamespace(kl=1.0)])
def test_a_setting_that_changed_makes_another_plan(make: Callable[[], Any]) -> None:
    @flow.global_function
    def step(x: Tensor, settings: Any) -> Tensor:
        return x.sum() * settings.kl

    settings = make()
    assert step(torch.ones(3), settings).item() == 3
    settings.kl = 2.0
    assert step(torch.ones(3), settings).item() == 6


def test_what_a_function_reads_is_guarded() -> None:
    scale = 2.0

    def scaled(x: Tensor) -> Tensor:
        return x * scale

    @flow.global_function
    def step(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x).sum()

    assert step(torch.ones(3), scaled).item() == 6
    scale = 3.0
    assert step(torch.ones(3), scaled).item() == 9


def test_a_tensor_of_an_object_is_a_variable() -> None:
    @flow.global_function
    def step(x: Tensor, memory: Memory) -> Tensor:
        memory.calls += 1
        memory.x = memory.x + x
        return memory.x.sum() * memory.calls

    memory = Memory()
    assert step(torch.ones(3), memory).item() == 6
    assert step(torch.ones(3), memory).item() == 18
    memory.x = torch.zeros(3)
    assert step(torch.ones(3), memory).item() == 9
    assert memory.calls == 3
