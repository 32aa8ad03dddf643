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


@pytest.mark.matrix(every=2)
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


def sliced(memory: Tensor, i: int, x: Tensor) -> Any:
    memory[:, i : i + 2] = x[:4, None]
    memory[i * 1, (i + 1) - 1 : 1 + i] += 1.0
    part = torch.narrow(x, 0, i, 3).sum() + x.narrow(0, i + 1, 2).square().sum() + x.select(0, i).sum()
    part = part + (torch.roll(x, i, 0) * x).sum() + (x.roll(shifts=-i, dims=1) * x).sum() + (x.roll(i) * x).sum()
    return part + (x[i : i + 2] * x[-1 - i]).sum() + memory[i, i : i + 2].sum() + x[2 * i - i + 1 : 3 + i].sum()


def clipped(memory: Tensor, i: int, x: Tensor) -> Any:
    rows = x[i : i + 4]
    return rows.sum() + rows.shape[0] + memory.sum()


def aged_view(memory: Tensor, i: int, x: Tensor) -> Any:
    old = memory[i : i + 2]
    memory[i : i + 2] = x[:2].unsqueeze(1)
    memory[i].mul_(0.5)
    return old + 1


def called(function: Any, numbers: list[int], job: bool) -> tuple[list[Tensor], int]:
    memory = torch.zeros(4, 3, 2)

    def step(i: int, x: Tensor) -> Any:
        return function(memory, i, x)

    run: Any = flow.global_function(step) if job else step
    g = torch.Generator().manual_seed(1)
    found = [run(i, torch.randn(6, 2, generator=g)) + 0 for i in numbers]
    return [*found, memory + 0], len(run.plans) if job else 0


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("function", "numbers", "plans"),
    [(sliced, [0, 1, 0, 1], 1), (clipped, [0, 1, 2, 3, 4, -2, -6, 1], 5), (aged_view, [0, 1, 2, 1], 3)],
)
def test_slices_between_numbers_that_calls_change_follow_pythons_rules(
    function: Any, numbers: list[int], plans: int
) -> None:
    found, made = called(function, numbers, job=True)
    for mine, one in zip(found, called(function, numbers, job=False)[0], strict=True):
        torch.testing.assert_close(mine, one)
    assert made <= plans


def test_a_slice_that_only_the_device_knows_raises_at_its_line_where_it_leaves_the_tensor() -> None:
    memory, at = torch.zeros(6, 2), torch.zeros(1, dtype=torch.long)

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        i = int(at)
        memory[i : i + 2] = x
        at[0] = i + 2
        return memory.sum() + i % 3 + i // 2

    x = torch.ones(2, 2)
    assert [float(step(x)) for _ in range(3)] == [4.0, 8 + 2 + 1, 12 + 1 + 2]
    with pytest.raises(flow.ActorflowError, match=r"memory\[i : i \+ 2\] = x: IndexError"):
        float(step(x))
    assert len(step.plans) == 1


def test_a_view_by_a_number_that_a_step_keeps_is_refused() -> None:
    class Kept:
        memory, last = torch.zeros(4, 2), torch.zeros(2)

    kept = Kept()

    @flow.global_function
    def step(i: int, x: Tensor) -> Tensor:
        kept.memory[i] = x
        kept.last = kept.memory[i]
        return kept.last.sum()

    with pytest.raises(flow.CaptureError, match=r"last.* would be one tensor after the step.*clone"):
        step(1, torch.ones(2))
