"""Of a branch on a value that a step computes both sides, and what the side that is not taken makes reaches nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow

Side = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """A layer, and a number below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)
        self.below = nn.Parameter(torch.tensor(-1.0))


def operand(model: Model) -> Side:
    return lambda h: (h - 1e9).sqrt().mean()


def parameter(model: Model) -> Side:
    return lambda h: h.mean() * model.below.sqrt()


def module(model: Model) -> Side:
    return lambda h: (model.second(h) - 1e9).sqrt().mean()


def several(model: Model) -> Side:
    return lambda h: torch.stack([model.below, h.mean()]).sub(1e9).sqrt().sum()


def inside(model: Model) -> Side:
    return lambda h: torch.cond(h.sum() > 0, lambda h: model.below.sqrt(), lambda h: model.below.log(), (h,))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("side", [operand, parameter, module, several, inside])
def test_a_side_that_gives_nan_changes_nothing_where_it_is_not_taken(side: Callable[[Model], Side]) -> None:
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    not_taken = side(model)

    def other(h: Tensor) -> Tensor:
        return model.second(h).square().mean() + model.below  # type: ignore[no-any-return]

    def step(x: Tensor, branches: bool) -> Tensor:
        h = model.first(x)
        loss: Tensor = torch.cond(h.detach().sum() > 1e6, not_taken, other, (h,)) if branches else other(h)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def trained(run: Callable[[Tensor, bool], Tensor], branches: bool) -> list[float]:
        model.load_state_dict(start)
        losses = [run(torch.full((2, 4), 0.1 * i + 0.1, dtype=torch.float64), branches).item() for i in range(3)]
        return losses + [v for t in model.state_dict().values() for v in t.flatten().tolist()]

    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = trained(step, False)
    assert trained(flow.global_function(step), True) == pytest.approx(wanted, abs=1e-12)
