"""Functions of torch around which a script has put its own are called as often as in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2

    return wrapper


CASES: dict[str, tuple[Any, str, Callable[[Tensor], Tensor]]] = {
    "a loss": (F, "cross_entropy", lambda x: F.cross_entropy(x, torch.tensor([0, 1]))),
    "a function in Python": (F, "normalize", lambda x: F.normalize(x, dim=1).sum()),
    "a function in C": (F, "linear", lambda x: F.linear(x, torch.ones(2, 3)).sum()),
    "a method in Python": (Tensor, "norm", lambda x: x.norm()),
    "a method in C": (Tensor, "tanh", lambda x: x.tanh().sum()),
    "a function of torch": (torch.functional, "einsum", lambda x: torch.functional.einsum("ij->i", x).sum()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_function_of_torch_that_is_wrapped_is_called_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, function = CASES[case]
    x = torch.randn(2, 3)

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return function(x)

    plain = float(function(x))
    assert float(job(x)) == pytest.approx(plain)
    monkeypatch.setattr(owner, name, twice(getattr(owner, name)))
    assert float(job(x)) == pytest.approx(2 * plain)
    monkeypatch.undo()
    assert float(job(x)) == pytest.approx(plain)


def test_so_is_one_with_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(3, 4)
    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    plain = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda logits, target: plain(logits, target, label_smoothing=0.1))
    wanted = F.cross_entropy(layer(x), y).item()

    @flow.global_function
    def job(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(layer(x), y)
        loss.backward()
        layer.zero_grad()
        return loss

    assert float(job(x, y)) == pytest.approx(wanted)


def test_what_a_job_returns_is_given_once_to_a_wrapped_function(monkeypatch: pytest.MonkeyPatch) -> None:
    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return x * 1

    x = torch.randn(2, 3)
    plain = F.normalize(x)
    monkeypatch.setattr(F, "normalize", twice(F.normalize))
    assert torch.allclose(F.normalize(job(x)), 2 * plain)


def test_so_are_parameters_that_a_plan_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(3, 4)

    @flow.global_function(type="predict")
    def job(x: Tensor) -> Tensor:
        return layer(x)

    job(torch.randn(2, 3))
    monkeypatch.setattr(F, "normalize", twice(F.normalize))
    with torch.no_grad():
        found = F.normalize(layer.weight)
        assert torch.allclose(found.norm(dim=1), torch.full((4,), 2.0))
