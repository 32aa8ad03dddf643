"""The order of rows depends on seed and epoch alone, and a position in it is taken up again anywhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import actorflow as flow
from actorflow.data.existing import options_of
from actorflow.data.workers import WorkerOptions
from actorflow_compiler.core.errors import DataError
from fewer import fewer

SIZES = st.integers(1, 40)


def numbers(batch: Any) -> list[int]:
    return batch.tolist()  # type: ignore[no-any-return]


def source(rows: int, batch: int, **options: Any) -> flow.data.DataSource:
    return flow.data.loader(torch.arange(rows), batch, **options)


@settings(max_examples=fewer(60), deadline=None)
@given(SIZES, SIZES, st.booleans(), st.booleans(), st.integers(0, 5), st.data())
def test_a_position_is_taken_up_in_the_middle_of_an_epoch(
    rows: int, batch: int, shuffle: bool, drop_last: bool, seed: int, data: Any
) -> None:
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    loader = source(rows, batch, **options)
    whole = [[numbers(x) for x in loader] for _ in range(3)]
    if not drop_last:
        assert all(sorted(itertools.chain(*epoch)) == list(range(rows)) for epoch in whole)
    every = [*itertools.chain(*whole)]
    if not every:
        return
    at = data.draw(st.integers(0, len(every) - 1))
    first = source(rows, batch, **options)
    taken = [numbers(x) for x in itertools.islice(first.repeat(), at)]
    second = source(rows, batch, **options)
    second.load_state_dict(first.state_dict())
    rest = [numbers(x) for epoch in second.epochs(3) for x in second if epoch < 3]
    assert taken + rest == every
    assert second.position == 3 * rows


@settings(max_examples=fewer(30), deadline=None)
@given(SIZES, SIZES, SIZES, st.integers(0, 3), st.data())
def test_a_position_is_taken_up_with_batches_of_another_size(
    rows: int, batch: int, other: int, epoch: int, data: Any
) -> None:
    first = source(rows, batch, shuffle=True)
    first.set_epoch(epoch)
    order = [*itertools.chain(*(numbers(x) for x in first))]
    first.set_epoch(epoch)
    given_ = data.draw(st.integers(0, (rows - 1) // batch))
    taken = [*itertools.chain(*(numbers(x) for x in itertools.islice(first, given_)))]
    second = source(rows, other, shuffle=True)
    second.load_state_dict(first.state_dict())
    assert [*taken, *itertools.chain(*(numbers(x) for x in second))] == order


def samplers(name: str, data: TensorDataset, own: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5) if own else None
    every: dict[str, dict[str, Any]] = {
        "shuffle": {"batch_size": 4, "shuffle": True, "generator": generator},
        "in order": {"batch_size": 4, "drop_last": True, "generator": generator},
        "weighted": {"batch_size": 4, "sampler": WeightedRandomSampler(torch.rand(23), 17, generator=generator)},
        "subset": {"batch_size": 4, "sampler": SubsetRandomSampler(range(3, 20), generator=generator)},
        "replacement": {"batch_size": 4, "sampler": RandomSampler(data, True, 40, generator=generator)},
        "batches": {"batch_sampler": Pairs(BatchSampler(RandomSampler(data, generator=generator), 5, False))},
    }
    return every[name]


class Pairs:
    """A batch sampler of the user's: batches of two sizes."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        for batch in self.batches:
            yield batch[:2]
            if batch[2:]:
                yield batch[2:]

    def __len__(self) -> int:
        return 2 * len(self.batches)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", [False, True], ids=["default generator", "own generator"])
@pytest.mark.parametrize("name", ["shuffle", "in order", "weighted", "subset", "replacement", "batches"])
def test_a_dataloader_that_is_taken_over_gives_its_batches_and_draws_its_numbers(
    name: str, own: bool, workers: int
) -> None:
    data = TensorDataset(torch.arange(23))

    def run(taken: bool) -> tuple[list[list[int]], list[float]]:
        torch.manual_seed(11)
        loader: Any = DataLoader(data, num_workers=workers, **samplers(name, data, own))
        if taken:
            loader = flow.data.loader(loader)
        found, draws = [], []
        for _ in range(2):
            for (x,) in loader:
                found.append(numbers(x))
                draws.append(torch.rand(1).item() if workers == 0 else 0.0)
            draws.append(torch.rand(1).item())
        return found, draws

    assert run(True) == run(False)


@pytest.mark.parametrize("at", [0, 1, 3, 100])
@pytest.mark.parametrize("own", [False, True], ids=["of the script", "of the sampler"])
@pytest.mark.parametrize("name", ["shuffle", "weighted", "subset", "replacement", "batches"])
def test_the_position_of_a_taken_over_loader_is_taken_up_in_another_process(name: str, own: bool, at: int) -> None:
    data = TensorDataset(torch.arange(23))

    def made() -> flow.data.DataSource:
        torch.manual_seed(11)
        return flow.data.loader(DataLoader(data, **samplers(name, data, own)))

    undisturbed = made()
    every = [[numbers(x) for (x,) in undisturbed] for _ in range(3)]
    first = made()
    for _ in first:
        pass
    taken = [numbers(x) for (x,) in itertools.islice(iter(first), at)]
    state, script = first.state_dict(), torch.get_rng_state()
    second = made()
    torch.set_rng_state(script)  # as a checkpoint does
    second.load_state_dict(state)
    if 0 < at < len(every[1]):
        torch.manual_seed(77)
        before = torch.get_rng_state()
        assert taken + [numbers(x) for (x,) in second] == every[1]
        assert torch.equal(torch.get_rng_state(), before)
        torch.set_rng_state(script)
    elif at == 0:
        assert [numbers(x) for (x,) in second] == every[1]
        return
    assert second.epoch == 2 or name == "batches"  # whose sampler does not say where it ends
    rest = [numbers(x) for epoch in second.epochs(3) for (x,) in second if epoch < 3]
    assert rest == every[2]


def test_the_state_of_another_order_is_refused() -> None:
    state = source(20, 4, shuffle=True, seed=1).state_dict()
    for other, said in (
        (source(21, 4, shuffle=True, seed=1), "rows=20"),
        (source(20, 4, shuffle=True, seed=2), "seed=1"),
        (source(20, 4), "shuffle=True"),
    ):
        with pytest.raises(DataError, match=said):
            other.load_state_dict(state)
    with pytest.raises(DataError, match="a state without epoch and row"):
        source(20, 4).load_state_dict({"position": 3})


def test_an_iteration_that_is_left_is_followed_by_the_next_epoch() -> None:
    loader = source(12, 4, shuffle=True)
    whole = [[numbers(x) for x in loader] for _ in range(3)]
    again = source(12, 4, shuffle=True)
    assert [numbers(next(iter(again))) for _ in range(3)] == [epoch[0] for epoch in whole]
    again.set_epoch(1)
    assert [numbers(x) for x in again] == whole[1]
    both = source(12, 4, shuffle=True)
    pairs = [(numbers(a), numbers(b)) for a, b in zip(both, both, strict=True)]
    assert pairs == [*zip(whole[0], whole[1], strict=True)]


def test_a_rank_without_rows_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks say of their data is compared by rank 0, also where one of them has no batch."""
    said: list[bytes] = []

    def decided(self: Any, about: str, mine: bytes, decide: Any) -> bytes:
        said.append(mine)
        answer: bytes = decide([b"10 rows in order in batches of 4, beginning at row 0", mine])
        return answer

    monkeypatch.setattr(flow.data.DataSource, "_decided", decided)
    monkeypatch.setattr("actorflow.data.sample_source.Alone", int)
    with pytest.raises(DataError, match="rank 1 has 0 rows in order in batches of 4, beginning at no rows"):
        next(iter(source(0, 4)))
    assert said == [b"0 rows in order in batches of 4, beginning at no rows"]


def test_set_epoch_begins_an_epoch_anew_that_is_under_way() -> None:
    loader = source(12, 4, shuffle=True)
    whole = [[numbers(x) for x in loader] for _ in range(2)]
    again = source(12, 4, shuffle=True)
    next(iter(again))
    again.set_epoch(0)
    assert [numbers(x) for x in again] == whole[0]
    again.set_epoch(1)
    assert [numbers(x) for x in again] == whole[1]


def test_a_position_that_is_loaded_moves_the_iteration_that_is_under_way() -> None:
    loader = source(12, 4, shuffle=True)
    whole = [[numbers(x) for x in loader] for _ in range(6)]
    begun = iter(loader)
    assert numbers(next(begun)) not in whole[0]
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "row": 4})
    assert [numbers(next(begun)) for _ in range(1)] == whole[1][1:2]
    assert (loader.epoch, loader.position) == (1, 20)
    assert numbers(next(iter(loader))) == whole[2][0]  # the loop before has left the epoch that was loaded


def test_an_older_iteration_does_not_move_the_position_back() -> None:
    loader = source(12, 4, shuffle=True)
    first, second = iter(loader), iter(loader)
    next(second)
    assert (loader.epoch, loader.position) == (1, 16)
    assert len([*first]) == 3
    assert (loader.epoch, loader.position) == (1, 16)


@pytest.mark.parametrize("own", [False, True], ids=["of the script", "of the sampler"])
@pytest.mark.parametrize("name", ["shuffle", "weighted", "subset", "replacement", "batches"])
def test_the_position_behind_the_last_batch_is_taken_up_before_the_loop_has_ended(name: str, own: bool) -> None:
    data = TensorDataset(torch.arange(24))  # at the end of whole batches a sampler of torch draws once more

    def made() -> flow.data.DataSource:
        torch.manual_seed(11)
        return flow.data.loader(DataLoader(data, **samplers(name, data, own)))

    every = made()
    whole = [[numbers(x) for (x,) in every] for _ in range(2)]
    first = made()
    taken = [numbers(x) for (x,) in itertools.islice(iter(first), len(whole[0]))]
    state, script = first.state_dict(), torch.get_rng_state()
    second = made()
    torch.set_rng_state(script)
    second.load_state_dict(state)
    endless = second.repeat()  # a sampler of batches does not say that its epoch has ended: one that is empty follows
    assert taken + [numbers(next(endless)[0]) for _ in whole[1]] == [*itertools.chain(*whole)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rows", [8, 10])
def test_epochs_are_those_of_torchs_sampler_and_end_with_their_last_batch(
    rows: int, drop_last: bool, workers: int
) -> None:
    data = TensorDataset(torch.arange(rows))
    sampler = DistributedSampler(data, 1, 0, seed=3)
    loader = source(rows, 4, shuffle=True, seed=3, drop_last=drop_last, workers=workers)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected = [numbers(x) for (x,) in DataLoader(data, 4, sampler=sampler, drop_last=drop_last)]
        begun = iter(loader)
        assert [numbers(next(begun)) for _ in expected] == expected
        assert (loader.epoch, loader.position) == (epoch + 1, (epoch + 1) * rows)
        assert next(begun, None) is None
        assert len(loader) == len(expected)


def test_a_sampler_that_is_taken_over_is_told_the_epoch() -> None:
    data = TensorDataset(torch.arange(10))
    sampler, theirs = (DistributedSampler(data, 1, 0, seed=3) for _ in range(2))
    loader = flow.data.loader(DataLoader(data, 4, sampler=sampler))
    theirs.set_epoch(5)
    loader.set_epoch(5)
    assert [numbers(x) for (x,) in loader] == [numbers(x) for (x,) in DataLoader(data, 4, sampler=theirs)]


def test_a_taken_over_loader_whose_workers_stay_draws_as_torchs() -> None:
    def run(taken: bool) -> tuple[list[list[int]], torch.Tensor]:
        torch.manual_seed(11)
        data = TensorDataset(torch.arange(12))
        loader: Any = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
        loader = flow.data.loader(loader) if taken else loader
        return [numbers(x) for _ in range(3) for (x,) in loader], torch.rand(1)

    assert run(True) == run(False)


@pytest.mark.parametrize("other", [3, 4, 5, 16])
def test_a_taken_over_loader_goes_on_with_batches_of_another_size(other: int) -> None:
    data = TensorDataset(torch.arange(23))

    def made(batch: int) -> flow.data.DataSource:
        torch.manual_seed(11)
        return flow.data.loader(DataLoader(data, batch, shuffle=True))

    order = [*itertools.chain(*(numbers(x) for (x,) in made(4)))]
    first = made(4)
    taken = [numbers(x) for (x,) in itertools.islice(first, 2)]
    second = made(other)
    second.load_state_dict(first.state_dict())
    rest = [numbers(x) for (x,) in second]
    assert [*itertools.chain(*taken, *rest)] == order
    assert (second.epoch, second.position) == (1, 23)


def test_workers_of_a_loader_are_taken_over_as_they_are() -> None:
    loader: Any = DataLoader(
        TensorDataset(torch.arange(8)), 2, num_workers=2, prefetch_factor=3, timeout=9.0, pin_memory=True,
        worker_init_fn=print, multiprocessing_context="spawn",
    )  # fmt: skip
    found = options_of(loader)
    assert (found.workers, found.prefetch, found.ahead, found.timeout, found.pin_memory) == (2, 6, 6, 9.0, True)
    assert found.worker_init_fn is print
    assert found.multiprocessing_context is loader.multiprocessing_context
    sizes = [WorkerOptions(workers, prefetch).ahead for workers, prefetch in ((0, 4), (2, 1), (2, 3), (3, 6))]
    assert sizes == [0, 2, 4, 6]


def test_epochs_that_are_left_or_not_begun_are_followed_by_the_next() -> None:
    loader = source(12, 4, shuffle=True)
    whole = [[numbers(x) for x in loader] for _ in range(4)]
    again = source(12, 4, shuffle=True)
    found = {}
    for epoch in again.epochs(4):
        found[epoch] = [] if epoch == 1 else [numbers(x) for x in itertools.islice(again, 1 + (epoch == 3))]
    assert found == {0: whole[0][:1], 1: [], 2: whole[2][:1], 3: whole[3][:2]}
    assert (again.epoch, again.position) == (4, 48)
