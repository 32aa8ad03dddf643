"""Optimizers that people write: state that the first step makes of values, steps in two passes, wrapped optimizers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Own(torch.optim.Optimizer):
    """An optimizer with one rule, and state that is made where it is needed first."""

    def __init__(self, parameters: Any, rule: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    getattr(self, self.rule)(p, p.grad, self.state[p], group["lr"])

    def first_gradient(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """Momentum that begins with the first gradient."""
        if "mean" not in state:
            state["mean"] = grad.clone()
        state["mean"].mul_(0.9).add_(grad)
        p.sub_(state["mean"], alpha=lr)

    def slow_weights(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """A copy of the parameter that follows it, as Lookahead has."""
        if "slow" not in state:
            state["slow"] = p.clone()
        p.sub_(grad, alpha=lr)
        state["slow"].lerp_(p, 0.5)
        p.copy_(state["slow"])

    def preconditioned(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """A matrix that begins as the identity, as Shampoo's."""
        if p.ndim != 2:
            p.sub_(grad, alpha=lr)
            return
        if "scale" not in state:
            state["scale"] = torch.eye(len(p), dtype=p.dtype)
        state["scale"].lerp_(grad @ grad.T, 0.1)
        p.sub_(state["scale"] @ grad, alpha=lr)

    def difference(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """The gradient of the step before."""
        before = state.setdefault("before", torch.zeros_like(p))
        p.sub_(2 * grad - before, alpha=lr)
        before.copy_(grad)

    def late(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """State that only the second step reads."""
        p.sub_(grad, alpha=lr)
        if "grad" in state:
            p.sub_(state["grad"], alpha=0.01)
        state["grad"] = grad.clone()


class Sharpness(torch.optim.Optimizer):
    """SAM: a step up, and back, and then that of another optimizer, which only it knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base.step()


def train(make: Callable[[nn.Module], Any], job: bool) -> list[Tensor]:
    """Losses and parameters of a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    optimizer = make(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(optimizer, Sharpness):
            optimizer.first_step()
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.second_step()
        else:
            optimizer.step()
        model.zero_grad()
        return loss.detach()

    run = flow.global_function(step) if job else step
    batches = [(torch.randn(8, 6), torch.randint(0, 4, (8,))) for _ in range(5)]
    return [*(run(x, y) + 0 for x, y in batches), *(p.detach() + 0 for p in model.parameters())]


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("rule", ["first_gradient", "slow_weights", "preconditioned", "difference", "late"])
def test_the_first_step_makes_the_state_as_eagerly(rule: str) -> None:
    eager, planned = (train(lambda model: Own(model.parameters(), rule), job) for job in (False, True))
    for mine, wanted in zip(planned, eager, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-9)


def test_a_step_in_two_passes_that_ends_with_that_of_another_optimizer() -> None:
    eager, planned = (train(lambda model: Sharpness(model.parameters()), job) for job in (False, True))
    for mine, wanted in zip(planned, eager, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-9)


def test_an_optimizer_that_the_search_does_not_find_is_refused() -> None:
    model = nn.Linear(3, 1)
    hidden = ctypes.py_object(torch.optim.SGD(model.parameters(), lr=0.1))

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        hidden.value.step()
        return loss

    with pytest.raises(CaptureError, match="SGD steps that the search from the job did not find"):
        step(torch.ones(2, 3))


def test_data_that_the_script_keeps_is_refused() -> None:
    weight, other = nn.Parameter(torch.ones(3)), torch.zeros(3)

    @flow.global_function
    def share(x: Tensor) -> None:
        weight.data = other

    @flow.global_function
    def go_on(x: Tensor) -> Tensor:
        weight.data = y = x * 2
        with torch.no_grad():
            weight.add_(1)
        return y + 1

    with pytest.raises(CaptureError, match="lets two tensors of the script share memory"):
        share(torch.ones(3))
    with pytest.raises(CaptureError, match="x is used again"):
        go_on(torch.ones(3))


def test_a_vector_of_all_parameters_is_cut_into_their_data() -> None:
    def train(job: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            vector = nn.utils.parameters_to_vector(model.parameters()).detach()
            vector = vector - 0.1 * nn.utils.parameters_to_vector(gradients)
            nn.utils.vector_to_parameters(vector, model.parameters())
            for p in model.parameters():
                p.data -= 0.01 * p.data.sign()
            return loss.detach()

        run = flow.global_function(step) if job else step
        return [*(run(torch.randn(4, 3)) + 0 for _ in range(3)), *(p.detach() + 0 for p in model.parameters())]

    for mine, wanted in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


def test_data_that_is_returned_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        weight.data = y = x * 2
        return y

    with pytest.raises(CaptureError, match="x is returned, which is p's memory"):
        step(torch.ones(3))


def test_data_of_another_shape_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))

    @flow.global_function
    def step(x: Tensor) -> None:
        weight.data = x

    with pytest.raises(CaptureError, match=r"float64\[3\] is set to torch.float64\[2\]"):
        step(torch.ones(2))
