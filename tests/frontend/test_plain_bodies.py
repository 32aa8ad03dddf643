"""A session needs nothing of the first generation: a plain body will do for a plain function."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.session.body import JobBody


def test_a_plain_function_trains_with_a_plain_body() -> None:
    def losses(plain: bool, eager: bool = False) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        x = torch.linspace(-1, 1, 32).view(8, 4)
        if eager:
            return [float(step(x)) for _ in range(3)]
        job = flow.global_function(step)
        if plain:
            job.body = JobBody(step)
        return [float(job(x)) for _ in range(3)]

    expected = losses(plain=False, eager=True)
    assert losses(plain=True) == losses(plain=False)
    torch.testing.assert_close(losses(plain=True), expected)


def test_a_job_in_a_job_of_a_plain_body_is_a_function() -> None:
    model = nn.Linear(4, 2)
    inner = flow.global_function(lambda x: model(x).relu(), type="predict")
    inner.body = JobBody(inner.function)

    def outer(x: Tensor) -> Tensor:
        found: Tensor = inner(x)
        return found.sum()

    job = flow.global_function(outer, type="predict")
    job.body = JobBody(outer)
    x = torch.ones(3, 4)
    torch.testing.assert_close(job(x) + 0, model(x).relu().sum())
    assert len(inner.plans) == 0
    torch.testing.assert_close(inner(x) + 0, model(x).relu())
