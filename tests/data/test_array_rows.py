"""Rows of tensors, arrays and memory maps are those of the samples, in memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import actorflow as flow

ROWS = 11


def numbers(folder: Path) -> np.ndarray[Any, Any]:
    return np.arange(ROWS * 3).reshape(ROWS, 3)


def mapped(folder: Path) -> np.ndarray[Any, Any]:
    np.save(folder / "rows.npy", numbers(folder).astype(np.int64))
    return np.load(folder / "rows.npy", mmap_mode="r")  # type: ignore[no-any-return]


def mapped_tensor(folder: Path) -> Tensor:
    numbers(folder).astype(np.int64).tofile(folder / "rows.bin")
    return torch.from_file(str(folder / "rows.bin"), False, ROWS * 3, dtype=torch.int64).view(ROWS, 3)


KINDS: dict[str, Callable[[Path], Any]] = {
    "tensor": lambda folder: torch.from_numpy(numbers(folder)),
    "array": numbers,
    "memory map": mapped,
    "tensor of a file": mapped_tensor,
    "big endian": lambda folder: numbers(folder).astype(">i8"),
    "columns of an array": lambda folder: np.tile(numbers(folder), 2)[:, 3:],
}


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_arrays_are_those_of_their_indices(kind: str, shuffle: bool, tmp_path: Path) -> None:
    data, expected = KINDS[kind](tmp_path), torch.from_numpy(numbers(tmp_path))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2)) if shuffle else torch.arange(ROWS)
    found = [batch.whole() for batch in flow.data.loader(data, 4, shuffle=shuffle, seed=2)]
    assert [len(batch) for batch in found] == [4, 4, 3]
    assert {batch.dtype for batch in found} == {torch.int64}
    assert torch.equal(torch.cat(found), expected[order])


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_what_is_read_of_an_array_is_not_changed_with_it(kind: str, tmp_path: Path) -> None:
    data = KINDS[kind](tmp_path)
    (batch,) = flow.data.loader(data, ROWS)
    read = batch.batch.read(((0, ROWS),)).leaf(0)
    data[:] = 0
    assert torch.equal(read, torch.from_numpy(numbers(tmp_path)))


def test_columns_come_in_the_containers_that_the_dataset_has() -> None:
    x, y = torch.arange(6.0).view(3, 2), np.arange(3, dtype=np.int32)
    (pair,) = flow.data.loader((x, y), 3)
    assert type(pair) is tuple
    assert torch.equal(pair[0].whole(), x)
    assert (pair[1].dtype, pair[1].tolist()) == (torch.int32, [0, 1, 2])
    (named,) = flow.data.loader({"x": x, "y": y}, 3)
    assert ([*named], named["y"].tolist()) == (["x", "y"], [0, 1, 2])
    (listed,) = flow.data.loader(TensorDataset(x, x + 1), 3)
    assert type(listed) is list  # as torch's default_collate makes it
    assert torch.equal(listed[1].whole(), x + 1)


def test_a_long_tuple_of_tensors_is_a_dataset_of_samples_and_a_collate_gets_samples() -> None:
    many = tuple(torch.tensor([float(at)]) for at in range(20))
    assert [batch.tolist() for batch in flow.data.loader(many, 10)][1] == [[float(at)] for at in range(10, 20)]
    rows = torch.arange(6).view(3, 2)
    sums = flow.data.loader(rows, 2, collate=lambda samples: torch.stack([sample.sum() for sample in samples]))
    assert [batch.tolist() for batch in sums] == [[1, 5], [9]]


def test_arrays_of_no_rows_have_no_batches() -> None:
    assert [*flow.data.loader(torch.empty(0, 3), 2)] == []
