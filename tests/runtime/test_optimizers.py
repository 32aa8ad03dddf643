"""Optimizer steps in place, over many tensors at once, are what PyTorch's own do one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow

KINDS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}
SIZE = 40  # more than one vector of a processor, and not a multiple of it


def steps(kind: str, dtype: torch.dtype, job: bool) -> list[Tensor]:
    """A parameter, and what is kept of it, behind some steps."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(2, SIZE).to(dtype))
    optimizer = KINDS[kind]([parameter])

    def step(x: Tensor) -> Tensor:
        loss = (parameter * x).sum().abs()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return parameter.detach() + 0

    run: Any = flow.global_function(step) if job else step
    for _ in range(4):
        after = run(torch.randn(2, SIZE).to(dtype))
    return [after + 0, *(t for t in optimizer.state_dict()["state"][0].values() if t.ndim)]


def test_settings_of_an_optimizer_are_as_they_were() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))], 0.1)
    plain = torch.optim.SGD([parameter], 0.1)
    before = [dict(of.param_groups[0]) for of in (optimizer, plain)]

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss = (optimizer.param_groups[0]["params"][0] @ (parameter * x)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
        return loss

    step(torch.ones(2))
    assert [of.param_groups[0].keys() for of in (optimizer, plain)] == [of.keys() for of in before]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_of_16_bits_it_is_no_further_from_float32(kind: str, dtype: torch.dtype) -> None:
    exact, eager, found = (steps(kind, t, job) for t, job in ((torch.float32, False), (dtype, False), (dtype, True)))
    for a, b, c in zip(exact, eager, found, strict=True):
        assert c.dtype == b.dtype
        scale = a.abs().max()
        assert (c - a).abs().max() / scale <= 2 * max((b - a).abs().max() / scale, 1e-3)


def test_of_complex_numbers() -> None:
    for found, wanted in zip(*(steps("SGD", torch.complex128, job) for job in (True, False)), strict=True):
        torch.testing.assert_close(found, wanted)
