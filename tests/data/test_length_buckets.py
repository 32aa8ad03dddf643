"""Samples of variable length are padded to a few shapes, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import actorflow as flow
import warm
from actorflow.data import lengths as lengths_module
from actorflow.data.lengths import RowLengths
from actorflow_compiler.core.errors import DataError
from fewer import fewer
from scripts.sequences import BATCH, BUCKETS, CASES, EPOCHS, ROWS, Texts, epoch_of_buckets, shuffled

SCRIPT = Path(__file__).parent.parent / "scripts" / "sequences.py"
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=30)


def of(sizes: list[int]) -> list[Tensor]:
    """Samples that are told apart by what they hold."""
    return [torch.full((size,), index + 1) for index, size in enumerate(sizes)]


def tokens(batch: Tensor) -> list[list[int]]:
    return batch.tolist()  # type: ignore[no-any-return]


def padded(size: int, index: int, bucket: int, padding: int = 0) -> list[int]:
    return [index + 1] * size + [padding] * (bucket - size)


class Measured(Dataset[Any]):
    """Samples of these sizes, which count how often each is read."""

    def __init__(self, sizes: list[int]) -> None:
        self.samples, self.reads = of(sizes), Counter[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        return {"input": self.samples[index], "labels": self.samples[index].tolist(), "fixed": torch.ones(3)}


# -- order ---------------------------------------------------------------------------------------------


@settings(max_examples=fewer(80), deadline=None)
@given(
    LENGTHS, st.sets(st.integers(1, 11), max_size=3), st.integers(1, 9), st.booleans(), st.booleans(),
    st.integers(0, 5), st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_has_every_row_once_in_the_smallest_bucket_that_holds_it(
    sizes: list[int], some: set[int], batch: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    buckets = tuple(sorted(some | {12}))
    loader = flow.data.loader(
        of(sizes), batch, shuffle=shuffle, seed=seed, drop_last=drop_last, buckets=buckets, lengths=sizes
    )
    order = shuffled(len(sizes), seed, epoch) if shuffle else list(range(len(sizes)))
    wanted = [
        [padded(sizes[index], index, bucket) for index in rows]
        for bucket, rows in epoch_of_buckets(sizes, order, buckets, batch, drop_last)
    ]
    loader.set_epoch(epoch)
    found = [*loader]
    assert [x.shape for x in found] == [(len(rows), len(rows[0])) for rows in wanted]  # known without reading
    assert [tokens(x) for x in found] == wanted
    assert len(loader) == len(wanted)
    assert (loader.epoch, loader.position) == (epoch + 1, (epoch + 1) * len(sizes))
    if not drop_last:
        assert sum(map(len, wanted)) == len(sizes)


@settings(max_examples=fewer(60), deadline=None)
@given(LENGTHS, st.integers(1, 6), st.booleans(), st.booleans(), st.data())
def test_a_position_among_buckets_is_taken_up_in_the_middle_of_an_epoch(
    sizes: list[int], batch: int, drop_last: bool, given_: bool, data: Any
) -> None:
    def source() -> Any:
        return flow.data.loader(
            of(sizes), batch, shuffle=True, seed=2, drop_last=drop_last, buckets=(4, 8, 12),
            lengths=sizes if given_ else None,
        )  # fmt: skip

    loader = source()
    every = [tokens(x) for _ in range(2) for x in loader]
    if not every:
        return
    at = data.draw(st.integers(0, len(every) - 1))
    first, second = source(), source()
    taken = [tokens(x) for x in itertools.islice(first.repeat(), at)]
    state = first.state_dict()
    assert pickle.loads(pickle.dumps(state)) == state
    second.load_state_dict(state)
    assert (second.position, second.state_dict()) == (first.position, {**state})
    assert taken + [tokens(x) for epoch in second.epochs(2) for x in second if epoch < 2] == every


def drawing(sizes: list[int]) -> Any:
    class Drawing(Dataset[Any]):
        def __len__(self) -> int:
            return len(sizes)

        def __getitem__(self, index: int) -> Tensor:
            return torch.randn(sizes[index]) + random.random() + np.random.rand()

    return Drawing()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_samples_of_buckets_draw_depends_on_their_place_in_the_epoch(workers: int) -> None:
    sizes = [3, 7, 2, 5, 8, 1, 4, 6, 6, 2]
    options: dict[str, Any] = {"shuffle": True, "buckets": (4, 8), "lengths": sizes}
    whole = [x.clone() for x in flow.data.loader(drawing(sizes), 2, **options)]
    first = flow.data.loader(drawing(sizes), 2, **options)
    for _ in zip(range(2), first, strict=False):
        pass
    again = flow.data.loader(drawing(sizes), 2, **options, workers=workers)
    again.load_state_dict(first.state_dict())
    assert again.position == 4
    before = torch.get_rng_state()
    found = [x.clone() for x in again]
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(found, whole[2:], strict=True))


@pytest.mark.parametrize("kind", ["buckets", "packed"])
def test_finding_lengths_leaves_the_scripts_random_numbers_as_they_were(kind: str) -> None:
    data = drawing([3, 7, 2, 5])

    class Whole(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            return data[index].abs().long()

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # type: ignore[index]
    if kind == "buckets":
        assert len(flow.data.loader(data, 2, buckets=(4, 8))) == 2
    else:
        assert len(flow.data.packed(Whole(), 6)) == 3
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # type: ignore[index]
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]


# -- samples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_parts_as_long_as_the_sample_are_padded_and_no_others(workers: int) -> None:
    data = Measured([3, 1, 5])  # one is as long as what has a fixed size
    loader = flow.data.loader(data, 2, buckets=(3, 6), padding={"labels": -100}, workers=workers)
    first, second = loader
    assert (first["input"].shape, first["labels"].shape, first["fixed"].shape) == ((2, 3), (2, 3), (2, 3))
    assert tokens(first["input"]) == [padded(3, 0, 3), padded(1, 1, 3)]
    assert tokens(first["labels"]) == [padded(3, 0, 3), padded(1, 1, 3, -100)]
    assert torch.equal(first["fixed"], torch.ones(2, 3))
    assert tokens(second["input"]) == [padded(5, 2, 6)]
    assert second["labels"].dtype == torch.int64


def test_samples_are_read_once_for_their_lengths_and_once_an_epoch(capfd: pytest.CaptureFixture[str]) -> None:
    data = Measured([3, 1, 5, 3, 4])
    loader = flow.data.loader(data, 2, buckets=(3, 6))
    assert not data.reads
    assert len(loader) == 3
    assert data.reads == Counter(range(5))
    assert "each of its 5 samples is read once" in (said := capfd.readouterr().err)
    assert "pass lengths=, a sequence or a function of the index" in said
    for _ in range(2):
        for batch in loader:
            assert batch["input"].sum()
    assert data.reads == Counter({0: 3, 1: 4, 2: 4, 3: 3, 4: 3})  # the shortest and the longest tell what is padded
    assert "is read once" not in capfd.readouterr().err


def test_lengths_come_from_a_function_or_the_dataset_without_reading(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = [3, 1, 5, 3, 4]
    data = Measured(sizes)
    asked: list[int] = []

    def length(index: int) -> int:
        asked.append(index)
        return sizes[index]

    assert len(flow.data.loader(data, 2, buckets=(3, 6), lengths=length)) == 3
    assert asked == [0, 1, 2, 3, 4]
    data.lengths = np.array(sizes)  # type: ignore[attr-defined]
    for given_ in (None, tuple(sizes), torch.tensor(sizes), np.array(sizes, np.int32)):
        assert len(flow.data.loader(data, 2, buckets=(3, 6), lengths=given_)) == 3
    assert not data.reads
    assert "is read once" not in capfd.readouterr().err


def squares(samples: list[Any]) -> dict[str, Tensor]:
    assert len({len(sample["input"]) for sample in samples}) == 1
    assert all(isinstance(sample["labels"], list) for sample in samples)
    rows = torch.stack([sample["input"] for sample in samples])
    return {"pairs": rows[:, :, None] * rows[:, None], "next": torch.tensor([s["labels"][1:] for s in samples])}


def test_collate_gets_padded_samples_and_may_make_other_shapes_of_them() -> None:
    sizes = [3, 1, 5, 3, 4]
    loader = flow.data.loader(Measured(sizes), 2, buckets=(3, 6), lengths=sizes, padding=9, collate=squares)
    found = [(x["pairs"].shape, x["next"].shape) for x in loader]
    assert found == [((2, 3, 3), (2, 2)), ((2, 6, 6), (2, 5)), ((1, 3, 3), (1, 2))]
    assert next(tokens(x["next"]) for x in loader) == [[1, 1], [9, 9]]


def test_whole_batches_of_buckets_are_padded_alike(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = [3, 1, 5, 3, 4]
    loader = flow.data.loader(of(sizes), 2, buckets=(3, 6), whole=True)
    assert [type(x) for x in loader] == [Tensor] * 3
    assert [tokens(x) for x in loader][1] == [padded(5, 2, 6), padded(4, 4, 6)]

    def noisy(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + torch.randn(1)

    noise = flow.data.loader(of(sizes), 2, buckets=(3, 6), collate=noisy)
    assert [x.shape for x in noise] == [(2, 3), (2, 6), (1, 3)]
    assert "draws random numbers" in capfd.readouterr().err


# -- ranks ---------------------------------------------------------------------------------------------


def test_ranks_share_the_reading_for_lengths(joined: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr(lengths_module, "current", lambda: SimpleNamespace(context=here))
    sizes = [5, 2, 9, 4, 1, 7, 3]

    def measured(cluster: Any, count: int = len(sizes), broken: int = -1) -> tuple[list[int], list[int]]:
        here.cluster, read = cluster, []

        def measure(index: int) -> dict[str, int]:
            read.append(index)
            if index == broken:
                raise OSError("gone")
            return {"tokens": sizes[index], "image": 4}

        return RowLengths("it", count, None, measure, "read").values().tolist(), read

    ranks = joined(3)
    found = ranks.each(measured)
    assert [lengths for lengths, _ in found] == [sizes] * 3
    assert [read for _, read in found] == [[0, 1], [2, 3], [4, 5, 6]]

    def refused(cluster: Any, **options: Any) -> str:
        with pytest.raises(DataError) as error:
            measured(cluster, **options)
        return str(error.value)

    said = ranks.each(lambda cluster: refused(cluster, broken=3))
    assert {*said} == {"it: the length of sample 3 cannot be found: OSError: gone"}
    said = ranks.each(lambda cluster: refused(cluster, count=7 - (cluster.rank == 2)))
    assert len({*said}) == 1
    assert "rank 0 has 7 samples; rank 2 has 6 samples; expected: the same dataset" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "devices"), [("data", 2), ("pipeline", 4)])
def test_losses_on_buckets_and_packed_rows_are_those_of_one_device(layout: str, devices: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", str(SCRIPT), "--devices", str(devices), "--", layout, str(tmp_path)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "all equal\n"
    assert f"shared by {devices} ranks" in run.stderr
    if layout != "data":
        return
    case = next(case for case in CASES if not case.resumes)
    assert not case.lengths
    sizes = Texts(ROWS, None).sizes
    batches = [
        rows for epoch in range(EPOCHS) for _, rows in epoch_of_buckets(sizes, shuffled(ROWS, 5, epoch), BUCKETS, BATCH)
    ]
    for rank in range(devices):
        needed = Counter(index for rows in batches for index in np.array_split(rows, devices)[rank].tolist())
        needed += Counter(range(ROWS * rank // devices, ROWS * (rank + 1) // devices))  # for their lengths
        if rank == 0:  # the shortest sample and the longest tell what is padded
            needed += Counter({sizes.index(min(sizes)), sizes.index(max(sizes))} - {batches[0][0]})
        read = (tmp_path / f"{case.name}.{rank}").read_text().split()
        assert Counter(map(int, read)) == needed, rank


# -- bad input -----------------------------------------------------------------------------------------


class Pairs(Dataset[Any]):
    """Samples of two sequences, each of lengths of its own."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"from": [1] * (index + 1), "to": [2] * (4 - index % 2)}


class Changing(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("lost")
        return {"x": torch.zeros(5)} if index == 2 else {"x": torch.zeros(5), "y": torch.zeros(2)}


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "too long": (
        lambda: flow.data.loader(of([2, 9, 3, 11]), 2, buckets=(4, 8), lengths=[2, 9, 3, 11]),
        r"sample 1 is 9 long, and the largest of buckets 4, 8 holds 8 \(and 1 samples more are too long\); add a "
        r"bucket of 11, or crop",
    ),
    "too long, found late": (
        lambda: next(iter(flow.data.loader(of([2, 9, 3]), 2, buckets=(4, 8)))),
        "sample 1 is 9 long, and the largest of buckets 4, 8 holds 8; add a bucket of 9",
    ),
    "no buckets": (lambda: flow.data.loader(of([2]), 2, buckets=()), r"buckets=\(\) was found; different"),
    "a bucket twice": (lambda: flow.data.loader(of([2]), 2, buckets=(4, 4)), r"buckets=\(4, 4\) was found; different"),
    "a bucket of 0": (lambda: flow.data.loader(of([2]), 2, buckets=(0, 4)), r"buckets=\(0, 4\) was found; different"),
    "one bucket": (lambda: flow.data.loader(of([2]), 2, buckets=4), "buckets=4 was found"),
    "lengths alone": (lambda: flow.data.loader(of([2]), 2, lengths=[2]), r"lengths=\[2\] was found without buckets="),
    "padding alone": (lambda: flow.data.loader(of([2]), 2, padding=1), "padding=1 was found without buckets="),
    "few lengths": (
        lambda: flow.data.loader(of([2, 3]), 2, buckets=(4,), lengths=[2]), "1 lengths were found for 2 samples",
    ),
    "broken lengths": (
        lambda: flow.data.loader(of([2, 3]), 2, buckets=(4,), lengths=[2, 2.5]), "2.5 is that of sample 1",
    ),
    "negative lengths": (
        lambda: flow.data.loader(of([2, 3]), 2, buckets=(4,), lengths=[2, -3]), "length of sample 1 is -3; a number",
    ),
    "a number of lengths": (lambda: flow.data.loader(of([2]), 2, buckets=(4,), lengths=3), "lengths=3 was found"),
    "a function": (
        lambda: len(flow.data.loader(of([2, 3]), 2, buckets=(4,), lengths=lambda index: index or None)),
        r"lengths\(0\) returned None; a whole number",
    ),
    "other lengths": (
        lambda: next(iter(flow.data.loader(of([2, 3, 4]), 3, buckets=(4,), lengths=[2, 2, 4]))).sum(),
        r"sample 1 is of shape \[3\]; 2 along dim 0 was expected, which is the length of the sample",
    ),
    "no such part": (
        lambda: next(iter(flow.data.loader(of([3, 3]), 2, buckets=(4,), lengths=[2, 2]))),
        r"no tensor of a sample is as long as the sample: sample 0 is 2 long and has it: \[3\]",
    ),
    "padding elsewhere": (
        lambda: next(iter(flow.data.loader(Measured([2, 3]), 2, buckets=(4,), lengths=[2, 3], padding={"label": 1}))),
        "padding has 'label'; expected: paths of what is padded, which are 'input', 'labels'",
    ),
    "padding of another kind": (
        lambda: next(iter(flow.data.loader(of([2, 3]), 2, buckets=(4,), lengths=[2, 3], padding=0.5))),
        r"padding of 'samples' with 0.5 was asked for, which torch.int64 cannot hold",
    ),
    "padding that is text": (
        lambda: flow.data.loader(of([2]), 2, buckets=(4,), padding="0"), "padding='0' was found; a number was expected",
    ),
    "two lengths": (
        lambda: len(flow.data.loader(Pairs(), 2, buckets=(4,))),
        "sample 0 has 1 along dim 0 of 'from', and 4 of 'to': which of them is its length is not known",
    ),
    "numbers": (lambda: len(flow.data.loader([1, 2, 3], 2, buckets=(4,))), r"sample 0 \(int\) has no tensor, array"),
    "other samples": (
        lambda: len(flow.data.loader(Changing(), 2, buckets=(4,))),
        "sample 2 has tensors at 'x', and sample 0 at 'x', 'y'",
    ),
    "a sample that raises": (
        lambda: [*flow.data.loader(Changing(), 2, buckets=(5,), lengths=[5] * 4)][1]["x"].sum(),
        r"reading sample 3 \(row 3 of epoch 0\) raised KeyError: 'lost'",
    ),
    "a dictionary": (lambda: flow.data.loader({"x": [1]}, 2, buckets=(4,)), "a dict with 'x' was found; a dataset"),
    "a stream": (
        lambda: flow.data.loader(iter(of([2])), 2, buckets=(4,)),
        "buckets was given for a list_iterator, which is iterated over",
    ),
    "taken over": (
        lambda: flow.data.loader(torch.utils.data.DataLoader(of([2])), buckets=(4,)),  # type: ignore[arg-type]
        "a DataLoader was given together with buckets",
    ),
}  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_for_its_length_is_named(workers: int) -> None:
    class Lost(Measured):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 3:
                raise KeyError("lost")
            return super().__getitem__(index)

    with pytest.raises(DataError, match=r"the loader of .*: reading sample 3 .* raised KeyError: 'lost'\n"):
        len(flow.data.loader(Lost([1, 2, 3, 4, 5]), 2, buckets=(5,), workers=workers))


@pytest.mark.parametrize("case", BAD)
def test_bad_input_of_buckets_is_named(case: str) -> None:
    make, said = BAD[case]
    with pytest.raises(DataError, match=said):
        make()


def test_positions_of_other_buckets_lengths_and_batches_are_refused() -> None:
    def source(batch: int = 2, buckets: Any = (4, 8), sizes: Any = (2, 5, 3, 8, 1), given_: bool = True) -> Any:
        return flow.data.loader(of([*sizes]), batch, buckets=buckets, lengths=sizes if given_ else None)

    one = source()
    next(iter(one))
    state = one.state_dict()
    refused = {
        r"with buckets=\[4, 8\] was loaded; this one has buckets=\[4, 9\]": source(buckets=(4, 9)),
        "samples have other lengths was loaded": source(sizes=(2, 5, 3, 8, 2)),
        "row 2 of an epoch in batches of 2 was loaded, and .* batch_size=3: .* pass batch_size=2": source(3),
        r"with rows=5 was loaded; this one has rows=4": source(sizes=(2, 5, 3, 8)),
        r"with buckets=\[4, 8\] was loaded; this one has none": flow.data.loader(of([3] * 5), 2),
    }
    for said, other in refused.items():
        with pytest.raises(DataError, match=said):
            other.load_state_dict(state)
    late = source(sizes=(2, 5, 3, 8, 2), given_=False)  # whose lengths are not known yet
    late.load_state_dict(state)
    assert late.state_dict() == state
    with pytest.raises(DataError, match="samples have other lengths was loaded"):
        next(iter(late))
    with pytest.raises(DataError, match="row 1 was loaded, at which no batch begins"):
        source().load_state_dict({**state, "row": 1})
    source(3).load_state_dict({**state, "row": 0, "epoch": 1})  # where an epoch begins, any size goes
    with pytest.raises(DataError, match=r"with buckets=None was loaded; this one has buckets=\[4, 8\]"):
        source().load_state_dict(flow.data.loader(of([3] * 5), 2).state_dict())


def test_rows_of_a_tensor_dataset_are_of_one_bucket() -> None:
    loader = flow.data.loader(TensorDataset(torch.arange(6).view(3, 2)), 2, buckets=(4,), lengths=[2, 2, 2])
    assert [tokens(x[0]) for x in loader] == [[[0, 1, 0, 0], [2, 3, 0, 0]], [[4, 5, 0, 0]]]


@pytest.mark.filterwarnings("error")
def test_arrays_that_are_padded_may_be_read_only_or_of_another_byte_order() -> None:
    samples = [np.arange(1, n).astype(">i4") for n in (3, 5, 4)]
    for sample in samples:
        sample.flags.writeable = False
    for known in (None, [2, 4, 3]):
        loader = flow.data.loader(samples, 3, buckets=(4,), lengths=known)
        assert [batch.tolist() for batch in loader] == [[[1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 3, 0]]]
