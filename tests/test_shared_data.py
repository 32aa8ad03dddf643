"""Parameters between calls whose ``.data`` is set to that of others: PyTorch has them share memory from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow


class Trained:
    """Two layers that a job trains, and another job that uses them."""

    def __init__(self, decorate: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.optimizer = torch.optim.SGD([*self.a.parameters(), *self.b.parameters()], 0.1)
        self.x = torch.randn(4, 3, dtype=torch.float64)

        @decorate(type="train")
        def step(x: Tensor) -> Tensor:
            loss: Tensor = self.b(self.a(x)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        @decorate(type="predict")
        def evaluate(x: Tensor) -> Tensor:
            with torch.no_grad():
                result: Tensor = self.b(self.a(x))
                return result

        self.step, self.evaluate = step, evaluate


def plainly(**_: Any) -> Callable[[Any], Any]:
    return lambda function: function


def shared() -> Trained:
    one = Trained(flow.global_function)
    one.step(one.x)
    one.a.weight.data = one.b.weight.data
    return one


def test_a_job_that_trains_them_is_refused() -> None:
    one = shared()
    with pytest.raises(flow.StateError, match=r"a\w*.weight and .*b\w*.weight share memory.*data.clone\(\)"):
        one.step(one.x)


def test_so_is_a_change_by_the_script_of_either() -> None:
    one = shared()
    for layer in (one.a, one.b):
        with torch.no_grad(), pytest.raises(flow.StateError, match="share memory"):
            layer.weight.mul_(2)


def test_it_is_seen_where_the_parameter_itself_is_set_and_where_its_data_is_held() -> None:
    one = Trained(flow.global_function)
    one.step(one.x)
    one.a.weight.data = one.b.weight
    with pytest.raises(flow.StateError, match="share memory"):
        one.step(one.x)
    held = one.b.bias.data
    one.a.weight.data = one.a.weight.data.clone()
    one.a.bias.data = held
    with pytest.raises(flow.StateError, match=r"a\w*.bias and .*b\w*.bias share memory"):
        one.step(one.x)


def test_weights_that_are_lent_for_an_evaluation_and_given_back_are_right() -> None:
    def run(decorate: Callable[..., Any]) -> list[Tensor]:
        one = Trained(decorate)
        found = []
        for _ in range(3):
            found.append(one.step(one.x).detach().clone())
            own = one.a.weight.data
            one.a.weight.data = one.b.weight.data
            found.append(one.evaluate(one.x).clone())
            one.a.weight.data = own
        return found

    for found, wanted in zip(run(flow.global_function), run(plainly), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("again", ["copied", "the other"])
def test_it_ends_where_either_gets_memory_of_its_own(again: str) -> None:
    def run(decorate: Callable[..., Any]) -> list[Tensor]:
        one = Trained(decorate)
        one.step(one.x)
        one.a.weight.data = one.b.weight.data
        if again == "copied":
            one.a.weight.data = one.a.weight.data.clone()
        else:
            one.b.weight.data = torch.eye(3, dtype=torch.float64)
        return [one.step(one.x).detach().clone() for _ in range(3)]

    for found, wanted in zip(run(flow.global_function), run(plainly), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
