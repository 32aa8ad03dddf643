"""What a script holds of an optimizer's state is what PyTorch would have there, whatever becomes of the state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.variables import optimizer_slots

Optimizer = torch.optim.Optimizer


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def put_another(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def take_out(optimizer: Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][0]]


def replace(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.ones_like(state["exp_avg"])


def load(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def train(decorate: Callable[[Any], Any], change: Callable[[Optimizer], None]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    held: list[Tensor] = []

    @decorate
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = []
    for i in range(5):
        if i == 2:
            held = [state["exp_avg"] for state in optimizer.state.values()]
            change(optimizer)
        found += [step(torch.randn(4, 3, dtype=torch.float64)).detach().clone(), *(t.clone() for t in held)]
    return found


@pytest.mark.parametrize("change", [clear, put_another, take_out, replace, load])
def test_a_tensor_that_the_script_has_taken_out_keeps_its_value(change: Callable[[Optimizer], None]) -> None:
    found, wanted = train(flow.global_function, change), train(lambda function: function, change)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, wanted, strict=True))


def test_of_what_nobody_holds_no_other_stand_in_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    left = optimizer_slots.OptimizerStates._left

    def watched(self: Any, optimizer: Any, name: str, one: Any) -> Any:
        other = left(self, optimizer, name, one)
        made.extend([name] if other is not one else [])
        return other

    monkeypatch.setattr(optimizer_slots.OptimizerStates, "_left", watched)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())

    @flow.global_function
    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.ones(4, 3))
    step(torch.ones(4, 3))
    optimizer.state.clear()
    step(torch.ones(4, 3))
    assert made == []
