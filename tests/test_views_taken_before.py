"""Views of parameters that a script took before the first call share memory with them afterwards, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow


def train(decorate: Callable[[Any], Any], take: Callable[[nn.Module], Any], change: Any = None) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = take(model)

    @decorate
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found: list[Any] = []
    for i in range(4):
        if change is not None and i == 2:
            change(kept, model)
        found.append(step(torch.randn(5, 3, dtype=torch.float64)).detach().clone())
        found += [t.clone() for t in (kept.values() if isinstance(kept, dict) else kept)]
    return found


def alike(take: Callable[[nn.Module], Any], change: Any = None) -> bool:
    found, wanted = train(flow.global_function, take, change), train(lambda function: function, take, change)
    return all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(found, wanted, strict=True))


def views(model: nn.Module) -> list[Tensor]:
    first = next(model.parameters()).data
    return [first, first[1:3], first.t(), first.view(-1)[2:], first[0]]


def flat(model: nn.Module) -> list[Tensor]:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return [vector, vector[3:20]]


TAKE: dict[str, Callable[[nn.Module], Any]] = {
    "data": lambda model: [p.data for p in model.parameters()],
    "detach": lambda model: [p.detach() for p in model.parameters()],
    "a state dict": lambda model: model.state_dict(),
    "views of views": views,
    "a vector of which they are parts": flat,
    "buffers": lambda model: [b.detach() for b in model.buffers()],
}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("take", TAKE)
def test_views_show_what_calls_have_made_of_parameters(take: str) -> None:
    assert alike(TAKE[take])


def test_what_is_written_into_a_view_is_written_into_the_parameter() -> None:
    def change(kept: list[Tensor], model: nn.Module) -> None:
        kept[0].mul_(0.5)
        kept[1].zero_()
        kept[4][1] = 3.0

    assert alike(views, change)


def test_a_state_dict_that_was_taken_before_changes_nothing_when_it_is_loaded() -> None:
    assert alike(lambda model: model.state_dict(), lambda kept, model: model.load_state_dict(kept))


def test_a_copy_stays_what_it_was() -> None:
    assert alike(lambda model: [p.detach().clone() for p in model.parameters()])


def test_a_mean_of_weights_may_be_kept_by_views_outside() -> None:
    def mean(kept: list[Tensor], model: nn.Module) -> None:
        for tensor in kept:
            tensor.lerp_(torch.ones_like(tensor), 0.5)

    assert alike(lambda model: [p.data for p in model.parameters()], mean)


def made_of_another(optimizer_too: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(torch.ones(2, 3))
    weight = model[0].weight
    if not optimizer_too:
        model[0].weight = nn.Parameter(torch.ones(3, 3))
    model[1].weight = nn.Parameter(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(torch.ones(2, 3))
    step(torch.ones(2, 3))


def test_a_parameter_that_is_made_of_one_that_steps_change_is_refused() -> None:
    with pytest.raises(flow.CaptureError, match=r"before\.py:\d+.*(?s:.*)was made of model(_\d+)?\.0\.weight"):
        made_of_another(optimizer_too=True)


def test_it_may_take_the_place_of_that_one() -> None:
    made_of_another(optimizer_too=False)
