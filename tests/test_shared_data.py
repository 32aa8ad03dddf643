"""Parameters whose ``.data`` a script sets to other tensors: in PyTorch they share memory with these from then on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
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


def check(run: Callable[[Callable[..., Any]], list[Tensor]]) -> None:
    """Compare what a script finds with jobs and without."""
    for found, wanted in zip(run(flow.global_function), run(plainly), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


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

    check(run)


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

    check(run)


def kept(one: Trained, kept: list[Tensor]) -> None:
    one.a.weight.data = kept[0]
    one.b.bias.data = kept[1][1]


def as_a_vector(one: Trained, kept: list[Tensor]) -> None:
    nn.utils.vector_to_parameters(kept[2], one.a.parameters())


def changed_at_once(one: Trained, kept: list[Tensor]) -> None:
    one.a.weight.data = kept[0]
    kept[0].mul_(0.5)
    one.b.weight.data = kept[3]
    with torch.no_grad():
        one.b.weight.add_(1.0)


def copied(one: Trained, kept: list[Tensor]) -> None:
    one.a.weight.data = kept[0].clone()


@pytest.mark.parametrize("give", [kept, as_a_vector, changed_at_once, copied])
def test_tensors_that_the_script_keeps_show_what_calls_make_of_parameters_that_lie_in_them(
    give: Callable[[Trained, list[Tensor]], None],
) -> None:
    def run(decorate: Callable[..., Any]) -> list[Tensor]:
        one = Trained(decorate)
        kept = [torch.eye(3), torch.ones(2, 3), torch.arange(12) / 12, torch.full((3, 3), 0.25)]
        kept = [tensor.double() for tensor in kept]
        found = []
        for i in range(6):
            found.append(one.step(one.x).detach().clone())
            if i in (1, 3):  # the second time they have what the first training has left
                give(one, kept)
            if i == 4:
                one.a.weight.data = torch.ones(3, 3, dtype=torch.float64)
            found += [tensor.clone() for tensor in kept]
            found += [p.detach().clone() for p in one.optimizer.param_groups[0]["params"]]
        return found

    check(run)


def test_a_tensor_that_another_job_reads_cannot_take_a_parameter_that_is_trained() -> None:
    one, other = Trained(flow.global_function), torch.eye(3, dtype=torch.float64)

    @flow.global_function(type="predict")
    def reads(x: Tensor) -> Tensor:
        return x @ other

    one.step(one.x)
    reads(one.x)
    one.a.weight.data = other
    with pytest.raises(flow.StateError, match=r"a\w*.weight.data was set to memory of a tensor that a job reads"):
        one.step(one.x)


def test_a_vector_that_the_step_could_read_and_does_not_shows_it_too() -> None:
    def run(decorate: Callable[..., Any]) -> list[Tensor]:
        one = Trained(decorate)
        one.mean = torch.arange(12, dtype=torch.float64) / 12  # type: ignore[attr-defined]  # whose name the step has
        found = []
        for i in range(4):
            found.append(one.step(one.x).detach().clone())
            if i == 1:
                nn.utils.vector_to_parameters(one.mean, one.a.parameters())  # type: ignore[attr-defined]
            found.append(one.mean.clone())  # type: ignore[attr-defined]
        return found

    check(run)


def reading(decorate: Callable[..., Any], trains: bool) -> list[Any]:
    """What jobs give that read a tensor in whose place the script puts the memory of a weight."""
    one, s = Trained(decorate), SimpleNamespace(taken=torch.ones(3, 3, dtype=torch.float64))

    @decorate(type="train")
    def step(x: Tensor) -> Tensor:
        loss: Tensor = one.b(one.a(x)).square().mean()
        loss.backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        return loss + s.taken.sum() if trains else loss

    @decorate(type="predict")
    def look(x: Tensor) -> Tensor:
        return x + (s.taken if not trains else 0)

    found = []
    for i in range(5):
        found += [step(one.x).detach().clone(), look(torch.eye(3, dtype=torch.float64)).clone()]
        if i == 1:
            s.taken = one.a.weight.data
        if i == 3:
            s.taken.mul_(0.5)
    return found


def test_a_job_that_predicts_reads_the_memory_of_a_weight_as_it_is_in_each_call() -> None:
    check(lambda decorate: reading(decorate, False))


def test_a_job_that_changes_the_weight_may_not_read_it_beside() -> None:
    with pytest.raises(flow.CaptureError, match=r"s.taken\w* and one.a\w*.weight share memory"):
        reading(flow.global_function, True)
