"""The text of a function by which two processes tell whether it does the same; None where that is not known."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import relu

import models
from actorflow_compiler.core.function_source import function_source
from actorflow_compiler.core.torch_internals import python_source

DIM = 1
TABLE = {"dim": 1}


def uses_a_number(x: torch.Tensor) -> torch.Tensor:
    return relu(x.cumsum(DIM)) * math.pi


def calls_another(x: torch.Tensor) -> torch.Tensor:
    return uses_a_number(x) if len(x.shape) > 1 else calls_another(x[None])


def uses_an_object(x: torch.Tensor) -> torch.Tensor:
    return x.sum(TABLE["dim"])


def uses_another_module(x: torch.Tensor) -> Any:
    return models.CASES, x


def calls_what_uses_an_object(x: torch.Tensor) -> torch.Tensor:
    return uses_an_object(x)


def reads_the_environment(x: torch.Tensor) -> torch.Tensor:
    return x * len(os.environ)


def imports_inside(x: torch.Tensor) -> torch.Tensor:
    import random

    return x * random.random()


def imports_torch_inside(x: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.relu(x)


def with_a_default(x: torch.Tensor, dim: int = DIM) -> torch.Tensor:
    return x.sum(dim)


def with_an_inner_function(x: torch.Tensor) -> torch.Tensor:
    return sum((TABLE["dim"] * row for row in x), x)


def made_with(dim: Any) -> Callable[..., Any]:
    def reduce(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim)

    return reduce


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum(0, keepdim=True)


def calls_scripted(x: torch.Tensor) -> Any:
    return scripted(x)


def calls_a_numpy_function(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.exp(1.0))


@torch.library.custom_op("function_source::share", mutates_args=(), device_types="cuda")
def share(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@share.register_kernel("cpu")
def share_on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum(DIM, keepdim=True)


@pytest.mark.parametrize(
    "function",
    [uses_a_number, calls_another, imports_torch_inside, with_a_default, made_with(1), calls_a_numpy_function],
)
def test_what_refers_to_plain_values_and_known_packages_has_a_text(function: Callable[..., Any]) -> None:
    assert function_source(function) is not None
    assert function_source(function) == function_source(function)


@pytest.mark.parametrize(
    "function",
    [
        uses_an_object, uses_another_module, calls_what_uses_an_object, reads_the_environment, imports_inside,
        with_an_inner_function, made_with({"dim": 1}), torch.relu, len, calls_scripted,
    ],
)  # fmt: skip
def test_what_refers_to_anything_else_has_none(function: Callable[..., Any]) -> None:
    assert function_source(function) is None


def test_another_value_is_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [function_source(function) for function in (uses_a_number, calls_another)]
    monkeypatch.setitem(globals(), "DIM", 0)
    assert all(function_source(f) != text for f, text in zip((uses_a_number, calls_another), before, strict=True))
    assert function_source(made_with(0)) != function_source(made_with(1))
    monkeypatch.setattr(with_a_default, "__defaults__", (0,))
    assert "0" in str(function_source(with_a_default))


def test_the_text_of_a_custom_op_has_all_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.function_source.share.default
    before = python_source(op)
    assert "DIM" in str(before)
    monkeypatch.setitem(globals(), "DIM", 0)
    assert python_source(op) != before
    monkeypatch.setitem(globals(), "DIM", {"dim": 1})
    assert python_source(op) is None
