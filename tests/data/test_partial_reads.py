"""Of a batch any rows are read, each once, and given in the order of the rows, whichever part they came in."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import actorflow as flow
from actorflow.session.call_inputs import inputs_of_call
from actorflow.standins.logical_batch import ArrivingInput, BatchTensor
from actorflow_compiler.core.runs import Runs, union
from fewer import fewer

RANGES = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=3)


class Logged:
    """Samples that are their number; each reading is counted."""

    def __init__(self, rows: int) -> None:
        self.rows, self.reads = rows, Counter[int]()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads[index] += 1
        return {"x": torch.tensor([float(index), 0.5]), "y": torch.tensor(index)}


def indices(runs: Runs) -> list[int]:
    return [row for lo, hi in runs for row in range(lo, hi)]


@settings(max_examples=fewer(60), deadline=None)
@given(st.lists(RANGES.map(union), min_size=1, max_size=4))
def test_rows_of_a_batch_are_read_once_and_given_in_order(wanted: list[Runs]) -> None:
    data = Logged(16)
    first, second = flow.data.loader(data, 8)
    assert data.reads == Counter({0: 1})  # the first sample tells what batches look like
    for batch, begin in ((second["y"], 8), (first["y"], 0)):
        for rows in filter(None, wanted):
            read = batch.batch.read(rows)
            assert read.ready()
            assert read.leaf(1).tolist() == [begin + row for row in indices(rows)]
            assert read.leaf(0)[:, 0].tolist() == [begin + row for row in indices(rows)]
    every = {row for rows in wanted for row in indices(rows)}
    assert data.reads == Counter({0: 1}) + Counter({at for row in every for at in (row, 8 + row)} - {0})


def arguments(**tensors: Tensor) -> Any:
    specs = tuple(SimpleNamespace(name=name) for name in tensors)
    return SimpleNamespace(specs=specs, tensors=tuple(tensors.values()))


def test_the_arguments_of_a_call_that_are_of_one_batch_are_read_together_and_each_has_its_rows() -> None:
    data = Logged(8)
    (batch,) = flow.data.loader(data, 8)
    wanted: dict[str, Runs] = {"x": ((1, 3), (6, 7)), "y": ((2, 4),), "none": (), "plain": ((0, 2),)}
    plain = torch.ones(2)
    given_ = arguments(x=batch["x"].half().double(), y=batch["y"].int(), none=batch["y"], plain=plain, unused=plain)
    found = inputs_of_call(given_, wanted, None)
    assert [*found] == ["x", "y", "none", "plain"]
    assert data.reads == Counter({0: 1, 1: 1, 2: 1, 3: 1, 6: 1})
    x, y = (cast(ArrivingInput, found[name]) for name in ("x", "y"))
    assert x.read is y.read
    assert x.value().dtype == torch.float64
    assert x.value().tolist() == [[1.0, 0.5], [2.0, 0.5], [6.0, 0.5]]
    assert (y.value().dtype, y.value().tolist()) == (torch.int32, [2, 3])
    none = found["none"]
    assert isinstance(none, Tensor)
    assert (none.shape, none.dtype) == ((0,), torch.int64)
    assert found["plain"] is plain


def test_elements_are_converted_one_dtype_after_the_other() -> None:
    (batch,) = flow.data.loader(torch.tensor([0.1, 70000.0, 3.7]), 3)
    short = batch.half().to(torch.float64)
    assert isinstance(short, BatchTensor)
    assert torch.equal(short.whole(), torch.tensor([0.1, 70000.0, 3.7]).half().double())
    assert batch.int().float().tolist() == [0.0, 70000.0, 3.0]
    assert batch.float() is batch
    assert batch.type() == "torch.FloatTensor"


def test_a_batch_that_the_script_looks_at_and_changes_is_read_whole_and_stays_as_it_was(
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = Logged(6)
    for batch in flow.data.loader(data, 3):
        before = batch["y"].tolist()
        batch["y"].add_(10)
        assert batch["y"].tolist() == [row + 10 for row in before]
        assert np.asarray(batch["y"]).tolist() == [row + 10 for row in before]
        assert batch["y"].batch.read(((0, 3),)).leaf(1).tolist() == before  # what jobs get
    assert set(data.reads.values()) == {1}
    said = [line for line in capfd.readouterr().err.splitlines() if "looks at a batch of the loader of" in line]
    (line,) = said  # the same line looks at both batches
    assert "test_partial_reads.py:" in line
    assert "every rank reads whole batches" in line


def test_the_text_of_a_batch_tells_the_rows_and_their_order() -> None:
    """Ranks compare it, so that a job is not given different batches."""
    texts = [
        {batch.batch.text.partition(" of the loader")[0] + batch.batch.text[-10:] for batch in flow.data.loader(*some)}
        for some in ((torch.arange(8), 4), ([*range(8)], 4))
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    orders = []
    for seed in (0, 1, 1):
        loader = flow.data.loader(torch.arange(8), 4, shuffle=True, seed=seed)
        orders.append([batch.batch.text[-10:] for batch in loader])
    assert orders[0] != orders[1] == orders[2]


def test_workers_read_ahead_what_was_needed_of_batches_of_the_same_size_and_no_more() -> None:
    loader = iter(flow.data.loader(Logged(44), 8, workers=1, prefetch=2))
    first = next(loader)["y"].batch
    for rows in (((0, 2),), ((4, 5),)):  # of two jobs
        assert first.read(rows).leaf(1).tolist() == indices(rows)
    *others, last, short = [batch["y"].batch for batch in loader]
    assert len(others) == 3
    assert last.planned[0] == ((0, 2), (4, 5))
    assert short.planned[0] == ()  # what is needed of it is not known yet
    assert last.read(((1, 2), (4, 5))).leaf(1).tolist() == [33, 36]
    assert short.read(((1, 3),)).leaf(1).tolist() == [41, 42]


class Gated:
    """Four samples, the last of which is read when a gate is open."""

    def __init__(self) -> None:
        self.gate = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        assert index != 3 or self.gate.wait(100)
        return torch.tensor(index)


def test_rows_that_are_wanted_come_also_where_another_loop_takes_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Gated()
    loader: Any = flow.data.loader(data, 4, workers=1)
    first, second = (next(iter(loader)).batch for _ in range(2))
    read = first.read(((0, 4),))
    assert not read.ready()
    ahead = loader._source.ahead
    taken = ahead.begin

    def begin(owner: object) -> None:
        data.gate.set()
        taken(owner)

    monkeypatch.setattr(ahead, "begin", begin)
    other = second.read(((1, 3),))
    assert read.leaf(0).tolist() == [0, 1, 2, 3]
    assert other.leaf(0).tolist() == [1, 2]
