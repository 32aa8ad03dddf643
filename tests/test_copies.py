"""What ``detach()`` and ``.data`` give stands for the memory of what plans own: it shows what calls have made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError


class Trained:
    """A small model, and its step."""

    def __init__(self, job: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), x[:, :3])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        self.step: Any = flow.global_function(train) if job else train
        self.step(torch.linspace(-1, 1, 8).view(2, 4).double())

    def after(self) -> list[float]:
        """The losses of two more steps."""
        return [float(self.step(torch.linspace(-2, 1 + i, 8).view(2, 4).double())) for i in range(2)]


def read_later(t: Trained) -> list[float]:
    seen = [p.data for p in t.model.parameters()] + [t.model[1].running_mean.detach()]  # type: ignore[union-attr, operator]
    return [*t.after(), *(float(one.sum()) for one in seen), *(float(one.view(-1)[0]) for one in seen)]


def a_view(t: Trained) -> list[float]:
    row, copy = t.model[0].weight.detach()[1], t.model[0].weight.detach().clone()  # type: ignore[union-attr, operator]
    return [*t.after(), *row.tolist(), *copy.flatten().tolist()]


def changed_later(t: Trained) -> list[float]:
    data, losses = t.model[0].weight.data, t.after()  # type: ignore[union-attr]
    data[0].mul_(0.5)
    data.clamp_(-0.1, 0.1)
    return [*losses, *t.after(), *data.flatten().tolist()]


def averaged(t: Trained) -> list[float]:
    """An average over parameters whose data was taken once."""
    data = [p.data for p in t.model.parameters()]
    average = [d.clone() for d in data]
    losses = []
    for _ in range(3):
        losses += t.after()
        for a, d in zip(average, data, strict=True):
            a.mul_(0.9).add_(d, alpha=0.1)
    return losses + [float(a.sum()) for a in average]


@pytest.mark.parametrize("case", [read_later, a_view, changed_later, averaged])
def test_what_was_taken_before_a_call_shows_what_it_has_made(case: Callable[[Trained], list[float]]) -> None:
    wanted, found = case(Trained(False)), case(Trained(True))
    assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < 1e-12


def test_a_job_that_comes_to_it_is_told() -> None:
    trained = Trained(True)
    anchor = trained.model[0].weight.detach()  # type: ignore[union-attr, operator]

    @flow.global_function
    def far(x: Tensor) -> Tensor:
        loss = (trained.model(x).sum() + (trained.model[0].weight - anchor).pow(2).sum()) * 1.0
        loss.backward()
        return loss.detach()

    with pytest.raises(CaptureError, match=r"anchor and .*weight share memory(.|\n)*\.clone\(\)"):
        far(torch.ones(2, 4).double())
    anchor = anchor.clone()
    far(torch.ones(2, 4).double())
