"""Ranks tell each other which data they have, before the first batch: others on one of them are refused on all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import actorflow as flow
from actorflow.data import data_source, sample_source, shards
from actorflow.data.state_bytes import from_bytes, to_bytes

Ask = Callable[[Callable[[int], Any]], list[Any]]


@pytest.fixture
def ask(joined: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Iterate, on each of three ranks, over the source that a function makes for it: batches, or what was refused."""
    here = threading.local()
    for module in (data_source, sample_source, shards):
        monkeypatch.setattr(module, "current", lambda: SimpleNamespace(context=here))
    monkeypatch.setattr(data_source, "_numbers", itertools.repeat(0))  # ranks are threads of one script
    ranks = joined(3)

    def each(make: Callable[[int], Any]) -> list[Any]:
        def first(cluster: Any) -> Any:
            here.cluster = cluster
            try:
                return [batch.batch.text for batch in make(cluster.rank)]
            except flow.DataError as error:
                return str(error)

        return ranks.each(first)  # type: ignore[no-any-return]

    return each


class Numbers:
    def __init__(self, broken: bool = False) -> None:
        self.broken, self.read = broken, list[int]()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        if self.broken:
            raise OSError("no such file")
        return torch.tensor(index)


def test_ranks_with_the_same_data_have_the_same_batches_and_one_looks_at_samples(ask: Ask) -> None:
    data = [Numbers() for _ in range(3)]
    found = ask(lambda rank: flow.data.loader(data[rank], 4, shuffle=True, seed=1))
    assert len(found[0]) == 2
    assert found == [found[0]] * 3
    assert [len(one.read) for one in data] == [1, 0, 0]


def test_ranks_with_other_data_are_told_which(ask: Ask) -> None:
    makes: dict[str, Callable[[int], Any]] = {
        "rank 0 has 9 rows in order in batches of 4.*; rank 2 has 8 rows in order": lambda rank: flow.data.loader(
            torch.arange(9 - (rank == 2)), 4
        ),
        "rank 0 has .*shuffled with seed 0 .*; rank 1 has .*shuffled with seed 1 ": lambda rank: flow.data.loader(
            torch.arange(8), 4, shuffle=True, seed=rank
        ),
        r"rank 0 has .*\(0, 1, 2, 3\); rank 2 has .*\(3, 2, 1, 0\)": lambda rank: flow.data.loader(
            torch.utils.data.DataLoader(Numbers(), 4, sampler=[*range(4)][:: -1 if rank == 2 else 1])  # type: ignore[arg-type]
        ),
    }
    for said, make in makes.items():
        found = ask(make)
        assert isinstance(found[0], str)
        assert found == [found[0]] * 3
        with pytest.raises(flow.DataError, match=rf"ranks have different data: {said}"):
            raise flow.DataError(found[0])


def test_what_goes_wrong_with_the_first_sample_on_one_rank_is_told_on_all(ask: Ask) -> None:
    found = ask(lambda rank: flow.data.loader(Numbers(broken=rank == 0), 4))
    assert found == [found[0]] * 3
    assert "reading sample 0 (row 0 of epoch 0) raised OSError: no such file" in found[0]


class Share:
    """Batches of the share of a rank, which says how many they are."""

    def __init__(self, rank: int, count: int, rows: int = 2) -> None:
        self.rank, self.count, self.rows = rank, count, rows

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter([torch.full((self.rows,), self.rank)] * self.count)


def test_shares_of_ranks_that_do_not_fit_together_are_told_on_all(ask: Ask) -> None:
    found = ask(lambda rank: flow.data.sharded(Share(rank, 2)))
    assert [len(texts) for texts in found] == [2, 2, 2]
    assert found == [found[0]] * 3
    found = ask(lambda rank: flow.data.sharded(Share(rank, 2 + rank)))
    assert found == [found[0]] * 3
    assert "the loaders of ranks give 2, 3, 4 batches; expected: as many on all ranks, or stop='shortest'" in found[0]
    found = ask(lambda rank: flow.data.sharded(Share(rank, 4 - rank), stop="shortest"))
    assert [len(texts) for texts in found] == [2, 2, 2]
    found = ask(lambda rank: flow.data.sharded(Share(rank, 2, 2 + (rank == 2))))
    assert found == [found[0]] * 3
    assert "rank 0 gives 2 rows of" in found[0]
    assert "and rank 2 3 rows of" in found[0]


def test_of_a_shard_that_several_ranks_have_read_the_furthest_state_is_kept() -> None:
    said = [{"0": {"batch": 2}, "1": {"batch": 3}}, {"1": {"batch": 4}, "2": {"batch": 1}}, {"0": {"batch": 1}}]
    kept = from_bytes(shards._together([to_bytes(one, "shards") for one in said]))
    assert kept == {"0": {"batch": 2}, "1": {"batch": 4}, "2": {"batch": 1}}
