"""What a script changes of a model, its optimizer's state and its tensors' attributes between calls is taken over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from scripts.between_calls import CASES, cases, difference
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "between_calls.py"


@pytest.fixture(autouse=True)
def dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize(("change", "kind"), CASES)
def test_a_job_goes_on_with_what_the_script_has_put_there(change: str, kind: str) -> None:
    assert difference(change, kind) < 1e-9


def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["tensor", "pipeline", "zero"], how)


def test_a_state_of_another_shape_is_refused() -> None:
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    @flow.global_function
    def step(x: Tensor) -> None:
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.ones(2, 4))
    optimizer.state[layer.weight]["momentum_buffer"] = torch.zeros(2)
    with pytest.raises(flow.StateError, match=r"momentum_buffer was replaced by torch.float64\[2\]"):
        step(torch.ones(2, 4))


def test_an_attribute_that_a_step_gives_a_tensor_is_refused() -> None:
    layer: Any = nn.Linear(4, 3)

    @flow.global_function
    def step(x: Tensor) -> None:
        layer.weight.count = getattr(layer.weight, "count", 0) + 1
        (layer(x).square().mean() * layer.weight.count).backward()

    with pytest.raises(flow.CaptureError, match=r"sets the attribute 'count' of layer\w*\.weight"):
        step(torch.ones(2, 4))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("change", ["groups", "parameters"])
def test_groups_that_change_places_keep_their_settings(kind: Any, change: str) -> None:
    def train(decorate: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        one, other = ([*layer.parameters()] for layer in layers)
        optimizer = kind([{"params": one, "lr": 0.01}, {"params": other, "lr": 0.1, "weight_decay": 0.5}])

        @decorate
        def step(x: Tensor) -> None:
            layers(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for i in range(4):
            if i == 2 and change == "groups":
                optimizer.param_groups.reverse()
            if i == 2 and change == "parameters":
                first, second = optimizer.param_groups
                first["params"], second["params"] = second["params"], first["params"]
            step(torch.ones(2, 3))
        with torch.no_grad():
            return [p.clone() for p in layers.parameters()]

    found, wanted = train(flow.global_function), train(lambda function: function)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, wanted, strict=True))
