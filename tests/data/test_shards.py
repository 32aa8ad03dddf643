"""Shards give the same batches under every plan, and a rank reads those shards alone that its part needs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.test_streams import run
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import actorflow as flow
from scripts.streamed import SHARDS, StatefulBatches


def read_by(path: Path) -> Counter[tuple[int, ...]]:
    """How often a rank has read each (epoch, shard, batch)."""
    return Counter(tuple(map(int, line.split())) for line in path.read_text().splitlines())


def expected(shards: range, begun: int = 0, left: int = 0) -> Counter[tuple[int, ...]]:
    """All batches of shards, from batch ``left`` of epoch ``begun`` on."""
    whole = [(epoch, shard, batch) for epoch in range(3) for shard in shards for batch in range(5)]
    return Counter(one for one in whole if (one[0], one[2]) >= (begun, left) and (one[0] > begun or one[2] >= left))


@pytest.mark.slow
def test_losses_are_those_of_one_device_and_ranks_read_only_their_shards_also_where_they_go_on(tmp_path: Path) -> None:
    assert run("streamed.py", 2, "shards", "data", str(tmp_path)) == "all equal\n"
    assert run("streamed.py", 4, "shards", "pipeline", str(tmp_path), "data") == "all equal\n"
    for name in ("passed", "started"):
        for rank in range(2):
            shards = range(rank * 2, rank * 2 + 2)
            assert read_by(tmp_path / f"data.{name}.{rank}") == expected(shards), (name, rank)
    for rank in range(4):  # two micro-batches of four rows: a rank of a stage takes the first or second half of each
        shards = range(rank % 2, SHARDS, 2)
        assert read_by(tmp_path / f"pipeline.passed.{rank}") == expected(shards, 1), rank
        assert read_by(tmp_path / f"pipeline.started.{rank}") == expected(shards, 1, 2), rank


def test_shares_of_ranks_are_rows_of_a_batch_and_go_on(tmp_path: Path) -> None:
    assert run("streamed.py", 2, "shares", "micro", str(tmp_path)) == "all equal\n"
    assert run("streamed.py", 2, "shares", "data", str(tmp_path), "micro") == "all equal\n"


def test_shares_that_do_not_fit_are_refused_on_all_ranks() -> None:
    tensor, looked, uneven, other = run("unfit_shares.py", 2).splitlines()
    assert "this plan takes rows 0-7 on rank 0, whose loader gives 4 of 8 rows of each batch" in tensor
    assert "flow.data.sharded(make, shards=2)" in tensor
    assert "of which this rank has only its own share" in looked
    assert "the loader of rank 0 ended after 2 batches, and the loader of rank 1 has more" in uneven
    assert "a position in the shares of 3 ranks was loaded on 2, whose loaders give other rows" in other


class Numbered:
    """Batches of two rows that tell shard and batch; some shards are longer than others."""

    def __init__(self, shard: int, lengths: tuple[int, ...]) -> None:
        self.shard, self.length = shard, lengths[shard]

    def __iter__(self) -> Iterator[Tensor]:
        for batch in range(self.length):
            yield torch.tensor([[self.shard, batch]] * 2)


def numbered(*lengths: int, **options: Any) -> Any:
    return flow.data.sharded(lambda shard, shards: Numbered(shard, lengths), len(lengths), **options)


def read_all(source: Any) -> int:
    """How many batches a source gives that can be read."""
    return len([batch.tolist() for batch in source])


def test_a_batch_is_those_of_all_shards_one_behind_the_other() -> None:
    source = numbered(2, 2, 2)
    found = [batch.tolist() for batch in source]
    assert found == [[[shard, batch] for shard in range(3) for _ in range(2)] for batch in range(2)]
    assert (source.epoch, source.position) == (1, 2)
    first, second = source
    assert second.tolist() == found[1]
    assert first.tolist() == found[0]  # also where it is read later
    assert (first.shape, first.dtype) == ((6, 2), torch.int64)


def test_shards_of_different_length_are_an_error_or_end_the_epoch() -> None:
    with pytest.raises(flow.DataError, match="shard 1 of 3 ended after 2 batches, and shard 0 of 3 has more"):
        read_all(numbered(3, 2, 3))
    assert len([*numbered(3, 2, 3, stop="shortest")]) == 2
    source = numbered(3, 2, 3, stop="shortest")
    source.load_state_dict({"epoch": 0, "batch": 2, "position": 2, "shards": 3})
    assert [len([*source]), len([*source])] == [0, 2]
    assert len([*numbered(3, 2, 3, batches=2)]) == 2
    source = numbered(3, 2, 3, batches=3)
    assert len(source) == 3
    with pytest.raises(flow.DataError, match="ended before batch 2 of epoch 0, and batches=3 was given"):
        read_all(source)


def test_what_goes_wrong_in_a_shard_names_it_and_its_batch() -> None:
    def failing(shard: int, shards: int) -> Iterator[Tensor]:
        yield torch.zeros(2, 3)
        if shard == 1:
            raise KeyError("gone")
        yield torch.zeros(2, 3)

    assert read_all(flow.data.sharded(failing, 1)) == 2
    said = r"(?s)reading batch 1 of epoch 0 of shard 1 of 2 raised KeyError: 'gone'\n.*test_shards.py"
    with pytest.raises(flow.DataError, match=said):
        read_all(flow.data.sharded(failing, 2))
    short = flow.data.sharded(lambda shard, shards: [torch.zeros(4, 2), torch.zeros(4 - shard, 2)], 2)
    with pytest.raises(
        flow.DataError, match=r"batch 1 of epoch 0 of shard 1 of 2 has it: float32\[3,2\]; 4 rows of .*drop_last"
    ):
        read_all(short)
    with pytest.raises(flow.DataError, match=r"batch 0 of shard 0 of 1 has 0: float32\[4\]; 1: float32\[3\]; expected"):
        next(iter(flow.data.sharded(lambda shard, shards: [(torch.zeros(4), torch.zeros(3))], 1)))
    with pytest.raises(flow.DataError, match="opening shard 0 of 1 raised OSError: no file"):
        next(iter(flow.data.sharded(_no_file, 1)))


def _no_file(shard: int, shards: int) -> Any:
    raise OSError("no file")


def test_random_numbers_depend_on_the_shard_and_the_batch_alone() -> None:
    def drawing(shard: int, shards: int) -> Iterator[Any]:
        for _ in range(3):
            yield torch.rand(2), np.array([random.random(), float(np.random.rand())])

    source = flow.data.sharded(drawing, 2, seed=3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = [(x.tolist(), y.tolist()) for x, y in source]
    assert torch.equal(torch.get_rng_state(), before)
    second = [(x.tolist(), y.tolist()) for x, y in source]
    values = [value for x, y in first + second for value in [*x, *y]]
    assert len({*values}) == len(values) == 48  # by epoch, batch, shard and place in it
    seeded = flow.data.sharded(drawing, 2, seed=4)
    assert not {*values} & {value for x, y in seeded for value in [*x.tolist(), *y.tolist()]}
    torch.manual_seed(1)
    again = flow.data.sharded(drawing, 2, seed=3)
    again.load_state_dict({"epoch": 1, "batch": 1, "position": 4, "shards": 2})
    assert [(x.tolist(), y.tolist()) for x, y in again] == second[1:]


def test_states_of_shards_are_taken_up() -> None:
    made: list[StatefulBatches] = []

    def make(shard: int, shards: int, epoch: int) -> Any:
        one = StatefulBatches(part=shard, parts=shards, size=2)
        one.state["epoch"] = epoch - 1
        made.append(one)
        return one

    source = flow.data.sharded(make, 2, batches=5)
    assert len([batch["x"].tolist() for batch in source]) == 5
    rest = iter(source)
    for _ in range(2):
        next(rest)["x"].tolist()
    state = source.state_dict()
    assert {shard: one["batch"] for shard, one in state["states"].items()} == {"0": 2, "1": 2}
    made.clear()
    again = flow.data.sharded(make, 2, batches=5)
    again.load_state_dict(state)
    assert again.state_dict() == state
    for found, wanted in zip(again, rest, strict=True):
        assert found["x"].tolist() == wanted["x"].tolist()
    assert [one.read for one in made if one.read][-2:] == [[2, 3, 4], [2, 3, 4]]


def test_a_loader_of_shares_goes_on_with_its_state_and_at_another_number_of_ranks_if_it_is_elastic() -> None:
    source = flow.data.sharded(StatefulBatches(), batches=5)
    rest = iter(source)
    next(rest), next(rest)
    state = source.state_dict()
    other = StatefulBatches()
    again = flow.data.sharded(other, batches=5)
    again.load_state_dict(state)
    for found, wanted in zip(again, rest, strict=True):
        assert found["x"].tolist() == wanted["x"].tolist()
    assert other.read == [2, 3, 4]
    of_two = {**state, "shards": 2, "states": {"0": state["states"]["0"], "1": state["states"]["0"]}}
    with pytest.raises(flow.DataError, match=r"a position in the shares of 2 ranks was loaded on 1.*elastic=True"):
        again.load_state_dict(of_two)
    elastic = flow.data.sharded(StatefulBatches(), batches=5, elastic=True)
    elastic.load_state_dict(of_two)
    assert len([*elastic]) == 3


def test_arguments_and_states_that_do_not_fit_a_sharded_source_are_refused() -> None:
    with pytest.raises(flow.DataError, match="shards=0 was found; a whole number from 1 on"):
        flow.data.sharded(lambda shard, shards: [], 0)
    with pytest.raises(flow.DataError, match="stop='longest' was found"):
        numbered(1, stop="longest")
    with pytest.raises(flow.DataError, match="a function was given without shards="):
        flow.data.sharded(lambda shard, shards: [])
    with pytest.raises(flow.DataError, match="a list was given with shards=2; make"):
        flow.data.sharded([], 2)
    with pytest.raises(flow.DataError, match="can be iterated over once; a loader was expected"):
        flow.data.sharded(iter([]))
    with pytest.raises(flow.DataError, match="a position in 3 shards was loaded, and this source has 2 shards"):
        numbered(1, 1).load_state_dict(numbered(1, 1, 1).state_dict())
    with pytest.raises(TypeError, match="pass batches="):
        len(numbered(1))


def test_a_shard_may_fill_the_same_memory_with_each_of_its_batches() -> None:
    def filling(shard: int, shards: int) -> Iterator[Any]:
        tensor, array = torch.zeros(2), np.zeros(2)
        for number in range(3):
            tensor.fill_(number), array.fill(number)
            yield tensor, array

    given = list(flow.data.sharded(filling, 2))
    for _ in range(2):  # what was read when it was passed over, and what was read anew
        assert [(x.tolist(), y.tolist()) for x, y in given] == [([i] * 4, [i] * 4) for i in (0.0, 1.0, 2.0)]


@pytest.mark.filterwarnings("error")
def test_arrays_of_shards_may_be_read_only_or_of_another_byte_order() -> None:
    array = np.arange(6.0).astype(">f8").reshape(3, 2)
    array.flags.writeable = False
    given = list(flow.data.sharded(lambda shard, shards: iter(array), 1))
    assert [(batch.dtype, batch.tolist()) for batch in given] == [(torch.float64, row) for row in array.tolist()]
    odd = flow.data.sharded(lambda shard, shards: [np.zeros(2, np.longdouble)], 1)
    with pytest.raises(flow.DataError, match="has it: an array of float128; expected: dense tensors"):
        next(iter(odd))


def test_a_batch_that_is_passed_over_is_read_once() -> None:
    read: list[tuple[int, int]] = []

    def make(shard: int, shards: int) -> Iterator[Tensor]:
        for batch in range(3):
            read.append((shard, batch))
            yield torch.full((2,), 10 * shard + batch)

    first, second, third = flow.data.sharded(make, 2, batches=3)
    assert third.tolist() == [2, 2, 12, 12]
    assert first.tolist() == [0, 0, 10, 10]
    assert second.tolist() == [1, 1, 11, 11]
    twice = [(0, 0)]  # it tells what batches look like, before any shard is needed
    assert sorted(read) == sorted([*twice, *((shard, batch) for shard in range(2) for batch in range(3))])


def test_a_loader_with_the_share_of_another_rank_is_refused() -> None:
    data = [torch.tensor(number) for number in range(8)]
    share: Any = DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1))  # type: ignore[arg-type]
    with pytest.raises(flow.DataError, match="the share of rank 1 of 2 was found on rank 0 of 1; the share of this"):
        flow.data.sharded(share)
    whole: Any = DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0, shuffle=False))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in flow.data.sharded(whole)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("runs", [((1, 3),), ((4, 5),), ((0, 1), (3, 8)), ((2, 3), (5, 6), (8, 9)), ((0, 9),)])
def test_any_rows_of_a_batch_of_shards_are_read(runs: tuple[tuple[int, int], ...]) -> None:
    source = flow.data.sharded(lambda shard, shards: [torch.arange(3 * shard, 3 * shard + 3)] * 2, 3)
    batch = next(iter(source)).batch
    assert batch.read(runs).leaf(0).tolist() == [row for lo, hi in runs for row in range(lo, hi)]


def test_a_shard_that_is_not_needed_any_more_is_read_no_further() -> None:
    read = Counter[int]()

    def make(shard: int, shards: int) -> Iterator[Tensor]:
        for _ in range(30):
            read[shard] += 1
            yield torch.full((2,), shard)

    batches = iter(flow.data.sharded(make, 2))
    assert next(batches).tolist() == [0, 0, 1, 1]
    assert len([*batches]) == 29
    assert read[1] < 15
