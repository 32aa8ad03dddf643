"""Iterations of one loader that begin before others have ended: each gives the rows of its own epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

import actorflow as flow
from actorflow.data import feed

ROWS = [(torch.tensor([float(i)]), torch.tensor(i)) for i in range(22)]


def rows_of(batches: Any) -> list[list[int]]:
    """The rows of each batch, which are labelled with their numbers."""
    return [labels.tolist() for _, labels in batches]


def test_two_iterations_that_begin_together_are_two_epochs() -> None:
    expected = [rows_of(flow.data.loader(ROWS, batch_size=8, shuffle=True, seed=3 + epoch)) for epoch in range(2)]

    loader = flow.data.loader(ROWS, batch_size=8, shuffle=True, seed=3)
    first, second = zip(*zip(loader, loader, strict=True), strict=True)

    assert [rows_of(first), rows_of(second)] == expected
    assert loader.epoch == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(ROWS, 8, shuffle=True),
        lambda: DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 4, drop_last=True)),
        lambda: DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, drop_last=False)),
        lambda: DataLoader(ROWS, 8, sampler=RandomSampler(ROWS, generator=torch.Generator().manual_seed(1))),
    ],
    ids=["shuffled", "sampler of batches", "sampler of batches in order", "sampler with a generator"],
)
def test_a_taken_over_loader_draws_as_before_when_two_iterations_begin_together(make: Callable[[], Any]) -> None:
    def pairs(loader: Any) -> list[Any]:
        return [rows_of(pair) for _ in range(2) for pair in zip(loader, loader, strict=True)]

    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = [*pairs(make()), torch.rand(1)]
        torch.manual_seed(1)
        found = [*pairs(flow.data.loader(make())), torch.rand(1)]

    assert found == expected


def test_batches_that_are_kept_before_workers_read_are_not_looked_through_for_each_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    class Counted(weakref.ref[Any]):
        def __call__(self) -> Any:
            nonlocal looks
            looks += 1
            return super().__call__()

    monkeypatch.setattr(feed, "weakref", SimpleNamespace(ref=Counted))
    kept = list(flow.data.loader(torch.arange(2000), 2, workers=1))
    assert looks < 2 * len(kept)
    assert [batch.tolist() for batch in kept[-2:]] == [[1996, 1997], [1998, 1999]]
