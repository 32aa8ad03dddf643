"""Streams give every rank whole batches, and go on where they were, by their own state or by passing batches over."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import actorflow as flow
import warm
from actorflow.live import observer
from scripts.streamed import StatefulBatches

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(script: str, devices: int, *arguments: str) -> str:
    """What a script printed.  Raises AssertionError if it failed."""
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", str(SCRIPTS / script), "--devices", str(devices), "--", *arguments],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_losses_on_two_devices_are_those_of_one(tmp_path: Path) -> None:
    assert run("streamed.py", 2, "streams", "data", str(tmp_path)) == "all equal\n"


@pytest.mark.slow  # shards and loaders go on at other numbers of ranks in test_shards.py and test_kept_position.py
def test_losses_are_those_of_one_device_and_it_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    assert run("streamed.py", 2, "streams", "data", str(tmp_path)) == "all equal\n"
    assert run("streamed.py", 3, "streams", "tensor", str(tmp_path), "data") == "all equal\n"


def test_ranks_that_get_different_batches_are_told_why() -> None:
    said = run("different_streams.py", 2).splitlines()
    assert len(said) == 3
    first, length, told = said
    assert "a Told gives a share of its samples (its distributed_env.world_size is 2)" in told
    assert "ranks got different batches of a StatefulBatches: of batch 0 of epoch 0, rank 0 has x float64[4,6]" in first
    assert "flow.data.sharded(make, shards=...)" in first
    assert "of the end of epoch 0, rank 0 has 2 batches; rank 1 has 3 batches" in length


class Counting(IterableDataset[Any]):
    """The numbers up to some, as samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(number) for number in range(self.count))


class SizedCounting(Counting):
    def __len__(self) -> int:
        return self.count


def numbers(source: Any) -> list[list[int]]:
    return [batch.tolist() for batch in source]


WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: flow.data.loader(Counting(10), 4),
        lambda: flow.data.loader(DataLoader(Counting(10), 4)),
        lambda: flow.data.loader(DataLoader([torch.tensor(rows) for rows in WHOLE], batch_size=None)),  # type: ignore[arg-type]
        lambda: flow.data.loader(_Plain(WHOLE)),
    ],
    ids=["stream", "taken over", "without batch_size", "of batches"],
)
def test_a_stream_gives_epochs_and_goes_on_in_the_middle_of_one(make: Any) -> None:
    source = make()
    assert [numbers(source) for _ in source.epochs(2)] == [WHOLE, WHOLE]
    assert (source.epoch, source.position) == (2, 6)
    next(iter(source))
    state = source.state_dict()
    again = make()
    again.load_state_dict(state)
    assert (again.epoch, again.position) == (2, 7)
    assert again.state_dict()["batch"] == 1  # before its first batch, too
    assert [numbers(again) for _ in again.epochs(4)] == [WHOLE[1:], WHOLE]


class _Plain:
    """Batches, in a class that is no dataset of torch."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, self.rows)


def test_a_loop_that_is_left_ends_its_epoch_and_set_epoch_begins_another() -> None:
    source = flow.data.loader(Counting(10), 4)
    next(iter(source))
    next(iter(source))
    assert (source.epoch, source.position) == (1, 2)
    source.set_epoch(5)
    assert (source.epoch, len(numbers(source))) == (5, 3)
    endless = source.repeat()
    assert [next(endless).tolist() for _ in range(4)] == [*WHOLE, WHOLE[0]]
    source.load_state_dict({**source.state_dict(), "epoch": 9, "batch": 2})
    assert next(endless).tolist() == WHOLE[2]  # an iteration that is under way is moved


def test_an_older_loop_over_a_stream_does_not_move_its_position() -> None:
    source = flow.data.loader(Counting(10), 4)
    first, second = iter(source), iter(source)
    next(second)
    state = source.state_dict()
    assert (state["epoch"], state["batch"], state["position"]) == (1, 1, 1)
    assert numbers(first) == WHOLE
    assert {**source.state_dict(), "start": None} == {**state, "start": None}
    assert numbers(second) == WHOLE[1:]
    assert (source.epoch, source.position) == (2, 3)


def test_its_length_is_that_of_the_stream_if_it_has_one() -> None:
    assert len(flow.data.loader(SizedCounting(10), 4)) == 3
    assert len(flow.data.loader(SizedCounting(10), 4, drop_last=True)) == 2
    assert numbers(flow.data.loader(Counting(10), 4, drop_last=True)) == WHOLE[:2]
    with pytest.raises(TypeError, match="Counting does not say how many"):
        len(flow.data.loader(Counting(10), 4))


@pytest.mark.parametrize("of_iterator", [False, True])
def test_what_a_stream_with_a_state_has_given_is_not_read_again(of_iterator: bool) -> None:
    source = flow.data.loader(StatefulBatches(of_iterator))
    rest = iter(source)
    next(rest), next(rest)
    state = source.state_dict()
    other = StatefulBatches(of_iterator)
    again = flow.data.loader(other)
    again.load_state_dict(state)
    assert again.state_dict() == state
    for found, wanted in zip(again, rest, strict=True):
        torch.testing.assert_close(found, wanted)
    assert other.read == [2, 3, 4, 5]
    assert again.epoch == source.epoch == 1
    assert len([*again]) == 6  # after its end, a whole epoch
    replayed = StatefulBatches(of_iterator)
    passing = flow.data.loader(replayed, replay=True)
    passing.load_state_dict(state)
    assert len([*passing]) == 4
    assert replayed.read == [0, 1, 2, 3, 4, 5]


def test_the_state_at_the_end_of_an_epoch_is_that_of_the_next_ones_beginning() -> None:
    source = flow.data.loader(StatefulBatches())
    assert len([*source]) == 6
    again = flow.data.loader(StatefulBatches())
    again.load_state_dict(source.state_dict())
    (found, *_), (wanted, *_) = again, source
    torch.testing.assert_close(found, wanted)


def test_random_numbers_of_the_script_are_as_if_nothing_was_passed_over() -> None:
    def shuffled() -> Any:
        return flow.data.loader(DataLoader([*range(6)], None, shuffle=True))  # type: ignore[arg-type]

    torch.manual_seed(1)
    source = shuffled()
    rest = iter(source)
    next(rest), next(rest)
    state, drawn = source.state_dict(), torch.get_rng_state()
    torch.manual_seed(2)
    again = shuffled()
    again.load_state_dict(state)
    torch.set_rng_state(drawn)  # as flow.checkpoint does
    taken = iter(again)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [*taken] == [*rest]


class _TiedToWorkers(StatefulBatches):
    def __init__(self, workers: int) -> None:
        super().__init__()
        self.num_workers = workers
        self.state_dict = lambda: {**self.state, "workers": workers}

    def __iter__(self) -> Iterator[Any]:
        assert self.loaded is None or self.loaded["workers"] == self.num_workers
        return super().__iter__()


def test_a_state_that_is_tied_to_workers_is_refused_in_plain_words() -> None:
    source = flow.data.loader(_TiedToWorkers(2))
    next(iter(source))
    again = flow.data.loader(_TiedToWorkers(3))
    again.load_state_dict(source.state_dict())
    with pytest.raises(flow.DataError, match=r"(?s)saved with 2 workers and has 3 \(AssertionError.*replay=True"):
        next(iter(again))
    again = flow.data.loader(_TiedToWorkers(3), replay=True)
    again.load_state_dict(source.state_dict())
    assert len([*again]) == 5


def test_streams_and_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(flow.DataError, match="shuffle=True was given for a Counting"):
        flow.data.loader(Counting(3), 2, shuffle=True)
    with pytest.raises(flow.DataError, match="workers=2 was given for a _Plain: each worker would give all"):
        flow.data.loader(_Plain(WHOLE), workers=2)
    with pytest.raises(flow.DataError, match="drop_last was given for a Counting without batch_size"):
        flow.data.loader(Counting(3), drop_last=True)
    with pytest.raises(flow.DataError, match="together with batch_size"):
        flow.data.loader(DataLoader(Counting(3)), 2)
    once = flow.data.loader(iter(Counting(3)), 2)
    assert numbers(once) == [[0, 1], [2]]
    with pytest.raises(flow.DataError, match="can be iterated over once"):
        next(iter(once))
    source = flow.data.loader(StatefulBatches())
    next(iter(source))
    with pytest.raises(flow.DataError, match="a state of a StatefulBatches was loaded; this source has a Counting"):
        flow.data.loader(Counting(3), 2).load_state_dict(source.state_dict())
    shorter = flow.data.loader(Counting(3), 2)
    shorter.load_state_dict({"epoch": 0, "batch": 5, "position": 5})
    with pytest.raises(flow.DataError, match="ended after 2 batches; 5 had been given"):
        iter(shorter)
    with pytest.raises(flow.DataError, match="a state without batch and position"):
        shorter.load_state_dict({"epoch": 0, "row": 5})


# -- libraries -------------------------------------------------------------------------------------------


def goes_on(make: Any, count: int) -> None:
    """Check that a source that takes up a state gives what the other one still has, and then whole epochs."""
    source = make()
    rest = iter(source)
    for _ in range(count):
        next(rest)
    again = make()
    again.load_state_dict(source.state_dict())
    for _ in range(2):
        found, wanted = [*again], [*rest]
        assert len(found) == len(wanted) > 0
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
        rest = iter(source)


def test_torchdatas_stateful_loaders_go_on() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = [torch.tensor(number) for number in range(20)]

    def make() -> Any:
        torch.manual_seed(1)  # with a generator that is passed, its own second epoch is another after a state
        return flow.data.loader(stateful.StatefulDataLoader(data, 4, shuffle=True))

    goes_on(make, 2)


def test_grains_datasets_go_on() -> None:
    grain = pytest.importorskip("grain.python")
    goes_on(lambda: flow.data.loader(grain.MapDataset.range(20).shuffle(1).batch(4).to_iter_dataset()), 2)
    goes_on(lambda: flow.data.loader(grain.MapDataset.range(20).shuffle(1).to_iter_dataset(), 4), 2)


@pytest.mark.parametrize("buffer", [0, 4])
def test_hugging_faces_streams_go_on_and_lose_nothing_of_a_shuffle_buffer(buffer: int) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [*range(20)]}).with_format("torch")

    def make() -> Any:
        stream = data.to_iterable_dataset(num_shards=2)
        return flow.data.loader(stream.shuffle(seed=1, buffer_size=buffer) if buffer else stream, 4)

    goes_on(make, 2)


class _Column:
    """A stream that gives parts of itself by name, as Hugging Face's do."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, range(10))


def test_what_is_indexed_and_has_no_length_is_iterated_over() -> None:
    assert numbers(flow.data.loader(_Column(), 4)) == WHOLE


def test_a_loop_with_a_bar_takes_a_source_whose_length_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "_show", lambda settings: None)  # a view would stay for other tests
    assert [batch.tolist() for batch in flow.progress(flow.data.loader(Counting(10), 4))] == WHOLE


_ENDED_WITH_ITS_WORKERS = """
import os, signal
import actorflow as flow

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
next(iter(flow.data.loader([*range(8)], 4)))
"""


def test_a_rank_that_is_told_to_end_with_its_workers_is_not_told_as_one_that_raised(tmp_path: Path) -> None:
    script = tmp_path / "ended.py"
    script.write_text(_ENDED_WITH_ITS_WORKERS)
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", str(script), "--devices", "2"],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode
    last = [line for line in done.stderr.splitlines() if line.startswith("actorflow: rank 1")]
    assert last
    assert all("was told to end (SIGTERM)" in line for line in last), done.stderr
