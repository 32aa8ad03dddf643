"""Gradients that a call leaves for later calls are variables: accumulated, clipped and stepped by as eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.values.gradients import GRADIENT_SUFFIX
from scripts.kept_gradients import CASES, cases, difference, inside
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "kept_gradients.py"


@pytest.mark.matrix(every=18)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_kept_as_eagerly(case: Any) -> None:
    assert difference(case, "micro-batches") < 1e-9


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "NAdam"])
def test_any_optimizer_steps_by_them(kind: str) -> None:
    assert difference(inside, "data", kind) < 1e-9


def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["data", "tensor", "pipeline", "zero 3"], how)


def pair() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A layer and its optimizer."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)


def test_a_step_that_clears_first_keeps_nothing_and_says_so_where_it_is_read() -> None:
    layer, optimizer = pair()

    @flow.global_function
    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = layer(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    for _ in range(3):
        train(torch.ones(2, 4))
    assert len(train.plans) == 1
    assert train.plan is not None
    assert not any(v.name.endswith(GRADIENT_SUFFIX) for v in train.plan.variables)
    assert layer.weight.grad is not None
    with pytest.raises(flow.StateError, match=r"layer\w*.weight.grad was not kept: an optimizer's step has used it"):
        float(layer.weight.grad.norm())
    optimizer.zero_grad()
    assert layer.weight.grad is None


def test_a_step_that_goes_on_with_what_was_not_kept_is_refused() -> None:
    layer, optimizer = pair()

    @flow.global_function
    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    @flow.global_function
    def more(x: Tensor) -> None:
        layer(x).sum().backward()
        optimizer.step()

    train(torch.ones(2, 4))
    with pytest.raises(flow.StateError, match=r"those of layer\w*.\w+, layer\w*.\w+\) and that were not kept"):
        more(torch.ones(2, 4))
    optimizer.zero_grad()
    more(torch.ones(2, 4))


def test_a_gradient_that_was_taken_before_a_call_is_not_that_of_after() -> None:
    layer, _ = pair()

    @flow.global_function
    def compute(x: Tensor) -> None:
        layer(x).square().mean().backward()

    compute(torch.ones(2, 4))
    grad = layer.weight.grad
    assert grad is not None
    kept = grad.clone()
    compute(torch.ones(2, 4))
    with pytest.raises(flow.StateError, match=r"take p\.grad anew"):
        grad.sum()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad + 0, 2 * kept)


def test_a_gradient_of_another_shape_is_refused() -> None:
    layer, _ = pair()

    @flow.global_function
    def compute(x: Tensor) -> None:
        layer(x).square().mean().backward()

    compute(torch.ones(2, 4))
    with pytest.raises((flow.StateError, RuntimeError), match=r"float32\[2\]"):
        layer.weight.grad = torch.ones(2)


def test_a_step_with_a_closure_outside_of_jobs_is_refused() -> None:
    layer, _ = pair()
    optimizer = torch.optim.LBFGS(layer.parameters())

    @flow.global_function
    def compute(x: Tensor) -> None:
        layer(x).square().mean().backward()

    compute(torch.ones(2, 4))
    with pytest.raises(flow.StateError, match=r"LBFGS\.step was called with a closure outside of a job"):
        optimizer.step(lambda: torch.zeros(()))
