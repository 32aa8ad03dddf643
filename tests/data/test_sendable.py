"""Looking at the first samples leaves a dataset's memory as it is, and sends rows, not the tensors that they are of."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import actorflow as flow
from actorflow.data.sendable import sendable


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_dataset_is_not_moved_to_shared_memory_by_looking_at_its_samples(workers: int) -> None:
    data = TensorDataset(torch.arange(1000))
    before = set(os.listdir("/proc/self/fd"))
    loader = flow.data.loader(DataLoader(data, batch_size=4, num_workers=workers))
    (x,) = next(iter(loader))
    assert torch.equal(torch.as_tensor(x), torch.arange(4))
    assert not data.tensors[0].is_shared()
    if not workers:
        assert set(os.listdir("/proc/self/fd")) == before


def test_a_row_of_a_large_tensor_is_sent_without_the_rest() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    whole = torch.ones(2, requires_grad=True)
    found = sendable({0: (table[1], "a"), 1: [whole, table[2].to_sparse()]})
    row, text = found[0]
    assert torch.equal(row, table[1])
    assert row.untyped_storage().nbytes() == 16
    assert text == "a"
    assert found[1][0] is whole
    assert found[1][1].is_sparse
    assert not table.is_shared()
    assert not whole.is_shared()


@pytest.mark.parametrize("sample", [threading.Lock(), (torch.ones(2, requires_grad=True) * 2,)], ids=["lock", "graph"])
def test_what_no_process_can_be_sent_is_not_sent(sample: object) -> None:
    assert sendable({0: torch.ones(1), 1: sample}) == {}
