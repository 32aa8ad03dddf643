"""Seeds of jobs: which calls draw the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.script_state.seeds import call_seeds


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No seed has been set; afterwards all is as it was."""
    monkeypatch.setattr(call_seeds, "seed", None)
    monkeypatch.setattr(call_seeds, "_calls", 0)
    with torch.random.fork_rng():
        yield


def job(size: int = 50) -> flow.Job:
    return flow.global_function(lambda: (torch.rand(size), torch.randn(size)))


def both(drawing: flow.Job) -> Tensor:
    return torch.cat(drawing())


def test_a_seed_starts_the_numbers_anew():
    drawing = job()
    flow.manual_seed(3)
    first, second = both(drawing), both(drawing)
    flow.manual_seed(3)
    again = both(drawing)
    flow.manual_seed(4)
    other = both(drawing)
    assert torch.equal(first, again)
    assert len(torch.cat([first, second, other]).unique()) == 300


def test_jobs_do_not_share_numbers():
    first, second = job(), job()
    flow.manual_seed(0)
    assert len(torch.cat([both(first), both(second)]).unique()) == 200


def test_without_a_seed_every_call_draws_anew():
    drawing = job()
    found = torch.cat([both(drawing) for _ in range(4)])
    assert len(found.unique()) == 400


def test_torch_is_seeded_too_and_calls_of_jobs_do_not_touch_its_numbers():
    drawing = job()
    torch.manual_seed(7)
    expected = torch.rand(5)
    assert flow.manual_seed(7) is torch.default_generator
    both(drawing)
    both(drawing)
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_every_seed_of_torch_is_one(seed: int):
    flow.manual_seed(seed)
    numbers = [call_seeds.next(0) for _ in range(5)]
    assert all(0 <= n < 2**53 and n.is_integer() for n in numbers)
    assert len(set(numbers)) == 5
    flow.manual_seed(torch.initial_seed())
    assert call_seeds.next(0) == numbers[0]


def test_neighbouring_seeds_are_far_apart():
    starts = []
    for seed in range(200):
        flow.manual_seed(seed)
        starts.append(call_seeds.next(0))
    starts.sort()
    assert min(b - a for a, b in itertools.pairwise(starts)) > 2**30
