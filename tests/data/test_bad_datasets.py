"""Datasets, numbers and loaders that no source can be made of are refused at once, and what to do is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import actorflow as flow

SAMPLES: Any = [torch.tensor(number) for number in range(10)]


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


class Fetching:
    """Fetches many samples at once, and of each list of indices ``lost`` too few."""

    def __init__(self, lost: int = 1) -> None:
        self.lost = lost

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        if 7 in indices:
            raise KeyError("seven")
        return [torch.tensor(index) for index in indices][: len(indices) - self.lost * (len(indices) > 1)]


def for_ranks(**options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(SAMPLES, 4, 1, **options)


def whole(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no len": (lambda: flow.data.loader(Unsized(), 2), "a Unsized without __len__ was found; a dataset that says how"),
    "a text": (lambda: flow.data.loader("words", 2), r"'words' was found \(str\); a dataset with __getitem__ and"),
    "a class": (lambda: flow.data.loader(Unsized, 2), "a dataset with __getitem__ and __len__ was expected"),
    "no rows in a batch": (lambda: flow.data.loader(SAMPLES, 0), "batch_size=0 was found; a whole number from 1 on"),
    "half a row": (lambda: flow.data.loader(SAMPLES, 0.5), "batch_size=0.5 was found"),  # type: ignore[arg-type]
    "a negative seed": (lambda: flow.data.loader(SAMPLES, 2, seed=-1), "seed=-1 was found; a whole number from 0 on"),
    "True workers": (lambda: flow.data.loader(SAMPLES, 2, workers=True), "workers=True was found; a whole number"),
    "no prefetch": (lambda: flow.data.loader(SAMPLES, 2, prefetch=0), "prefetch=0 was found; a whole number from 1"),
    "replay of rows": (lambda: flow.data.loader(SAMPLES, 2, replay=True), "replay=True was given for a list, whose"),
    "a loader and a size": (
        lambda: flow.data.loader(DataLoader(SAMPLES, 2), 4, shuffle=True),
        r"a DataLoader was given together with batch_size, shuffle; .*flow.data.loader\(existing.dataset, ...\)",
    ),
    "a sampler of ranks": (
        lambda: flow.data.loader(DataLoader(SAMPLES, 2, sampler=for_ranks(seed=3))),
        r"a DistributedSampler was found \(rank 1 of 4\): .*with batch_size=8: .*shuffle=True, seed=3\)",
    ),
    "a sampler of ranks, in batches": (
        lambda: flow.data.loader(DataLoader(SAMPLES, batch_sampler=BatchSampler(for_ranks(), 2, False))),
        "a DistributedSampler was found .*with batch_size=the whole batch's",
    ),
    "a sampler of ranks, of a stream": (
        lambda: flow.data.loader(DataLoader(SAMPLES, None, sampler=for_ranks())), "a DistributedSampler was found",
    ),
    "one number": (lambda: flow.data.loader(torch.tensor(1.0), 2), "the dataset is one number; a tensor or an array"),
    "one number among columns": (
        lambda: flow.data.loader({"x": torch.ones(2), "y": torch.tensor(1.0)}, 2), "'y' of the dataset is one number",
    ),
    "words": (lambda: flow.data.loader(np.array(["a", "b"]), 2), "the dataset is an array of <U1; numbers were"),
    "columns of different length": (
        lambda: flow.data.loader((torch.ones(4), np.ones((3, 2))), 2),
        "'1' of the dataset has 3 rows, and the first tensor 4; as many were expected",
    ),
    "an empty epoch": (
        lambda: next(flow.data.loader(SAMPLES, 16, drop_last=True).repeat()), "an epoch has no batches; a dataset with",
    ),
    "few of many": (
        lambda: whole(flow.data.loader(Fetching(), 4)),
        r"__getitems__ of Fetching returned 2 samples for 3 indices \(1, 2, 3\); one for each was expected",
    ),
    "many that raise": (
        lambda: whole(flow.data.loader(Fetching(0), 4)), r"reading samples 4, 5, 6, 7 raised KeyError: 'seven'",
    ),
    "a sample of another shape": (
        lambda: whole(flow.data.loader([torch.ones(2), torch.ones(2), torch.ones(3)], 3)),
        r"sample 2 has another form than the first .*: a batch of it alone has it: float32\[1,3\]; the batch: "
        r"float32\[rows,2\] was expected \(pad or crop",
    ),
    "a sample of another dtype": (
        lambda: whole(flow.data.loader([torch.ones(2), torch.ones(2, dtype=torch.int64)], 2)),
        r"sample 1 has another form .*: int64\[1,2\]; the batch: float32\[rows,2\]",
    ),
    "a sample of other parts": (
        lambda: [b["x"].sum() for b in flow.data.loader([*[{"x": torch.ones(2)}] * 3, {"z": torch.ones(2)}], 2)],
        r"sample 3 has another form than the first .*: a batch of it alone has z: float32\[1,2\]; x: float32",
    ),
    "a sample that raises": (
        lambda: whole(flow.data.loader(_Broken(), 2, shuffle=True, seed=1)),
        r"(?s)reading sample 3 \(row \d of epoch 0\) raised OSError: no such file\n.*test_bad_datasets.py:\d+",
    ),
}  # fmt: skip


class _Broken:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if index == 3:
            raise OSError("no such file")
        return torch.tensor(index)


@pytest.mark.parametrize("case", BAD)
def test_what_no_source_can_be_made_of_is_named(case: str) -> None:
    make, said = BAD[case]
    with pytest.raises(flow.DataError, match=said):
        make()


def test_the_position_of_another_sampler_is_refused() -> None:
    def source(sampler: Any) -> Any:
        return flow.data.loader(DataLoader(SAMPLES, 2, sampler=sampler))

    shuffled = source(RandomSampler(SAMPLES))
    next(iter(shuffled))
    with pytest.raises(flow.DataError, match="sampler='RandomSampler' was loaded; this one has 'SequentialSampler'"):
        source(SequentialSampler(SAMPLES)).load_state_dict(shuffled.state_dict())
    own = source(RandomSampler(SAMPLES, generator=torch.Generator()))
    with pytest.raises(flow.DataError, match="drew from other generators: 0 generators were saved, and 1 are here"):
        own.load_state_dict(shuffled.state_dict())


def test_the_seed_of_rows_in_order_and_a_sampler_of_one_rank_are_no_reason_to_refuse() -> None:
    state = flow.data.loader(SAMPLES, 4, seed=1).state_dict()
    flow.data.loader(SAMPLES, 4, seed=2).load_state_dict(state)
    sampler = DistributedSampler(SAMPLES, 1, 0, shuffle=False)
    assert whole(flow.data.loader(DataLoader(SAMPLES, 5, sampler=sampler))) == [[*range(5)], [*range(5, 10)]]
