"""Tensors without dims as indices are data in a step, and do what they do eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow

STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {}


def step(function: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """A step of a memory [4, 3, 2], the row it is at, and a batch [6, 2]."""
    STEPS[function.__name__] = function
    return function


@step
def row(memory: Tensor, t: Tensor, x: Tensor) -> Any:
    memory[t] = x[:3]
    return memory[t].sum() + memory.sum() * 2


@step
def column(memory: Tensor, t: Tensor, x: Tensor) -> Any:
    memory[:, t % 3] = x[:4]
    memory[..., -t % 2] += 1.0
    return memory[:, t % 3, 0]


@step
def several(memory: Tensor, t: Tensor, x: Tensor) -> Any:
    memory[t, 1:, t % 2] = x[:2, 0]
    memory[t, None, 2] = 7.0
    return memory[t, [0, 2]] * memory[-t - 1, t % 3, t % 2]


@step
def masked(memory: Tensor, t: Tensor, x: Tensor) -> Any:
    memory[t, torch.tensor([True, False, True])] = 3.0
    return memory[t].clone()


@step
def added(memory: Tensor, t: Tensor, x: Tensor) -> Any:
    memory[t] += x[0]
    memory[t][1:] = memory[t][1:] + 0  # a copy of a copy is not what it is for
    return memory + x[t] * x[t]


def eagerly(function: Callable[[Tensor, Tensor, Tensor], Any], job: Callable[..., Any]) -> list[Tensor]:
    """What calls give, what they leave in the memory, and a gradient's effect."""
    torch.manual_seed(0)
    memory, layer = torch.zeros(4, 3, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    @job
    def train(t: Tensor, x: Tensor) -> Any:
        found = function(memory, t, x)
        loss = layer(x)[t].square().sum() + layer.weight[t % 2].sum() + (layer(x)[:, t % 2] ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    g = torch.Generator().manual_seed(1)
    found = [train(torch.tensor(t), torch.randn(6, 2, generator=g)) + 0 for t in (0, 3, -1, 1)]
    return [*found, memory.detach() + 0, layer.weight.detach() + 0]


@pytest.mark.parametrize("name", ["row", "column", "several", "masked"])
def test_reading_and_writing_by_numbers_that_are_data(name: str) -> None:
    wanted = eagerly(STEPS[name], lambda f: f)
    for found, one in zip(eagerly(STEPS[name], flow.global_function), wanted, strict=True):
        torch.testing.assert_close(found, one)


def test_a_view_that_is_changed_is_refused() -> None:
    with pytest.raises(flow.CaptureError, match=r"memory\[t\]\[1:\] = .*\n.*is changed in place, and so x would be"):
        eagerly(added, flow.global_function)


def test_a_view_that_changes_is_refused_and_a_copy_of_it_is_not() -> None:
    def aged(memory: Tensor, t: Tensor, x: Tensor) -> Tensor:
        old = memory[t]
        memory[t] = x[:3]
        return old + 1

    def kept(memory: Tensor, t: Tensor, x: Tensor) -> Tensor:
        old = memory[t].clone()
        memory[t] = x[:3]
        return old + 1

    with pytest.raises(flow.CaptureError, match=r"old = memory\[t\]\n.*is used after x has changed"):
        eagerly(aged, flow.global_function)
    for found, one in zip(eagerly(kept, flow.global_function), eagerly(kept, lambda f: f), strict=True):
        torch.testing.assert_close(found, one)
