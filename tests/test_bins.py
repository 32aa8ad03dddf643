"""``torch.bincount`` with a ``minlength`` has so many bins in a step, whatever values there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow


def counts(x: Tensor, weights: Tensor) -> list[Tensor]:
    return [
        torch.bincount(x, minlength=5),
        torch.bincount(x.int(), minlength=9) / x.numel(),
        torch.bincount(x, weights, 5),
        torch.bincount(x, weights.half(), minlength=6),
        torch.bincount(x, weights=x, minlength=5),
        torch.bincount(x[:0], minlength=5),
        x.bincount(minlength=25).view(5, 5),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_are_those_of_torch(dtype: torch.dtype) -> None:
    job = flow.global_function(type="predict")(counts)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 5 - seed, (12,), generator=generator)
        weights = torch.rand(12, generator=generator, dtype=dtype)
        for found, wanted in zip(job(x, weights), counts(x, weights), strict=True):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            torch.testing.assert_close(found, wanted)


def test_a_value_without_a_bin_is_an_error_of_its_call() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.global_function
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x).mean(0) * torch.bincount(y, minlength=4)).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    x = torch.ones(2, 3)
    train(x, torch.tensor([0, 3]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Exception, match=r"(?s)test_bins\.py:\d+: loss = .*index"):
        float(train(x, torch.tensor([0, 4])))
    torch.testing.assert_close(model.state_dict(), before)
    assert torch.isfinite(train(x, torch.tensor([1, 2])))
