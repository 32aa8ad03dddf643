"""Functions of torch around which a script has put its own are called as often as in PyTorch."""

from __future__ import annotations

import functools
import subprocess
import sys
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
    "an operator": (Tensor, "__add__", lambda x: (x + 0).sum()),
    "a function that chooses one of two": (F, "max_pool1d", lambda x: F.max_pool1d(x, 2).sum()),
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


REPLACED_FIRST = """
import torch, torch.nn.functional as F
T = torch.Tensor
def twice(old):
    return lambda *args, **kwargs: old(*args, **kwargs) * 2
{imported_first}
turned = T.T
T.T = property(lambda self: turned.__get__(self) * 2)
for owner, name in ((T, "relu"), (T, "norm"), (F, "relu"), (F, "max_pool1d"), (torch.functional, "einsum")):
    setattr(owner, name, twice(getattr(owner, name)))
F.silu = torch.enable_grad()(twice(F.silu))
torch.relu = twice(torch.relu)
T.__sub__ = twice(T.__sub__)
import actorflow as flow
FUNCTIONS = {{
    "relu of a tensor": lambda x: x.relu(),
    "norm": lambda x: x.norm(),
    "F.relu": lambda x: F.relu(x),
    "F.silu": lambda x: F.silu(x),
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "einsum": lambda x: torch.functional.einsum("ij->i", x),
    "T": lambda x: x.T,
    "torch.relu": lambda x: torch.relu(x),
    "minus": lambda x: x - 3.0,
}}
numbers = (torch.arange(6.0).reshape(2, 3) + 1) / 5
layer = torch.nn.Linear(3, 2)
torch.nn.init.constant_(layer.weight, 0.3)

@flow.global_function
def answered(x): return x + 0
@flow.global_function(type="predict")
def owned(x): return layer(x)
owned(numbers)
spread = flow.tensor(numbers.tolist(), placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
with flow.deferred_init():
    later = numbers + 0
for name, function in FUNCTIONS.items():
    @flow.global_function(type="predict")
    def step(x): return function(x)
    @flow.global_function
    def slope(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]
    leaf = numbers.clone().requires_grad_()
    wanted = function(numbers)
    found = {{
        "step": (step(numbers), wanted),
        "gradients": (slope(numbers), torch.autograd.grad(function(leaf).sum(), leaf)[0]),
        "results": (function(answered(numbers)), wanted),
        "parameters": (function(layer.weight.detach()), function(torch.full((2, 3), 0.3))),
        "global tensors": (function(spread).to_local(), wanted),
        "deferred tensors": (flow.materialize(function(later)), wanted),
    }}
    for what, (value, right) in found.items():
        if not torch.allclose(value, right):
            print(name, "on", what, "gives", value.tolist(), "for", right.tolist())
"""


@pytest.mark.parametrize("imported_first", ["", "import actorflow as flow"])
def test_it_does_not_matter_when_actorflow_is_imported(imported_first: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPLACED_FIRST.format(imported_first=imported_first)],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
