"""Slots in which workers' batches arrive: nothing is written to one while anything in it is still held."""

from __future__ import annotations

import gc
import mmap
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import actorflow as flow
import warm
from actorflow.data import workers
from actorflow.data.batch_slots import BatchSlots

SIZE = 4 * mmap.PAGESIZE
WIDE = 3000  # numbers of a sample: four of them are no small tensor


class Wide:
    """Samples of many numbers, all of them their own index."""

    def __init__(self, rows: int = 120) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((WIDE,), float(index)), index


def free(slots: BatchSlots) -> int:
    """How many slots are free."""
    taken = []
    while (one := slots.take()) is not None:
        taken.append(one)
    for one in reversed(taken):
        slots.give_back(one)
    return len(taken)


def sent(slots: BatchSlots, number: int, found: Any) -> Any:
    """What arrives of what is put in a slot."""
    room = slots.room(number)
    values = [room.put(one) for one in found] if isinstance(found, list) else found
    return pickle.loads(ForkingPickler.dumps(room.sent(values)))


def slots_of(loader: Any) -> BatchSlots:
    slots = loader._source.ahead._requested.slots
    assert isinstance(slots, BatchSlots)
    return slots


TENSORS = {
    "bool": torch.arange(6) % 2 == 0,
    "bfloat16": torch.arange(6).reshape(2, 3).bfloat16(),
    "complex": torch.arange(6).reshape(3, 2) * (1 + 2j),
    "turned": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    "every other": torch.arange(24.0).reshape(4, 6)[:, ::2],
    "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "repeated": torch.arange(3).expand(4, 3),
    "one number": torch.tensor(3.5),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_from_a_slot_as_it_was(name: str) -> None:
    slots, value = BatchSlots(1, SIZE), TENSORS[name]
    number = slots.take()
    assert number is not None
    first, found = sent(slots, number, [torch.ones(3), value])
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.stride() == torch.empty_like(value).stride()
    assert torch.equal(found, value)
    assert torch.equal(first, torch.ones(3))
    assert found.data_ptr() % 64 == 0
    found.zero_()  # a script may write to it
    assert torch.equal(first, torch.ones(3))


def test_a_slot_is_free_when_the_last_tensor_in_it_is() -> None:
    slots = BatchSlots(2, SIZE)
    taken = [slots.take(), slots.take()]
    assert slots.take() is None
    one, other = sent(slots, 0, [torch.zeros(5), torch.arange(5)])
    part = other[2:].view(3, 1)
    del one, other
    assert free(slots) == 0
    assert part.tolist() == [[2], [3], [4]]
    del part
    assert free(slots) == 1
    assert slots.take() in taken


def test_slots_outlive_their_loader_for_as_long_as_a_tensor_is_held() -> None:
    slots = BatchSlots(1, SIZE)
    slots.take()
    (held,) = sent(slots, 0, [torch.arange(1000)])
    del slots
    gc.collect()
    assert torch.equal(held, torch.arange(1000))


def test_what_is_no_plain_tensor_or_has_no_room_is_sent_beside_the_slot() -> None:
    slots = BatchSlots(1, SIZE)
    slots.take()
    large, sparse, none = torch.rand(SIZE), torch.eye(3).to_sparse(), torch.empty(0, 4)
    found = sent(slots, 0, [torch.ones(2), large, sparse, none, "text"])
    assert torch.equal(found[0], torch.ones(2))
    assert torch.equal(found[1], large)
    assert torch.equal(found[2].to_dense(), torch.eye(3))
    assert found[3].shape == (0, 4)
    assert found[4] == "text"


def test_a_failure_takes_no_slot() -> None:
    slots = BatchSlots(1, SIZE)
    assert slots.take() == 0
    assert sent(slots, 0, "why") == "why"
    assert free(slots) == 1


def test_small_batches_need_no_slots_and_too_large_ones_get_none() -> None:
    assert BatchSlots.of([100, 200], 2) is None
    assert BatchSlots.of([1 << 62, 1 << 62], 2) is None
    assert BatchSlots.of([100_000], 2) is not None


def test_batches_that_a_script_holds_keep_their_rows() -> None:
    loader = flow.data.loader(Wide(), 4, workers=1)
    batches = [*loader]
    assert len(batches) == 30  # more than there are slots
    held = []
    for batch, _ in batches:
        held.append(batch.batch.read(((0, 2),)).leaf(0))
    for number, rows in enumerate(held):
        assert torch.equal(rows, torch.tensor([4.0 * number, 4.0 * number + 1])[:, None].expand(2, WIDE))


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Reference counts alone free what is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("forkserver", "spawn"))]
)
def test_a_job_holds_no_batch_that_it_has_used(method: str, no_collection: None, monkeypatch: Any) -> None:
    multiprocessing = torch.multiprocessing.get_context(method)
    if method == "forkserver":
        multiprocessing.set_forkserver_preload([*warm.OURS])  # imported once, for all
    loader = flow.data.loader(DataLoader(Wide(), 4, num_workers=1, multiprocessing_context=multiprocessing))

    @flow.global_function(type="predict")
    def total(rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return rows.sum(), numbers.sum()

    used: list[int | None] = []
    take = BatchSlots.take

    def taken(slots: BatchSlots) -> int | None:
        used.append(take(slots))
        return used[-1]

    monkeypatch.setattr(BatchSlots, "take", taken)
    found = [total(*batch) for batch in loader]
    sums = [sum(range(4 * at, 4 * at + 4)) for at in range(30)]
    assert [(float(rows), int(numbers)) for rows, numbers in found] == [(WIDE * one, one) for one in sums]
    assert len(used) == 30  # more than there are
    assert None not in used


def test_slots_have_room_for_whole_batches_where_the_first_is_short() -> None:
    loader = flow.data.loader(Wide(10), 4, workers=1)
    loader.load_state_dict({**loader.state_dict(), "row": 8})
    for rows, _ in loader:
        rows.batch.read(((0, 2),)).leaf(0)
    assert slots_of(loader).size >= 4 * WIDE * 4


@pytest.mark.parametrize(
    "sample",
    [
        torch.ones(WIDE, requires_grad=True),
        torch.nn.Parameter(torch.ones(WIDE)),
        torch.eye(60).to_sparse(),
        {"array": torch.arange(WIDE).numpy(), "list": [1.5, torch.ones(WIDE)], "number": 3},
    ],
    ids=["requires grad", "parameter", "sparse", "nested"],
)
def test_torchs_collate_makes_the_same_in_a_slot(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> Any:
        try:
            loader = flow.data.loader([sample] * 4, 2, workers=1)
            batch = next(iter(loader))
            return [one.clone() for one in torch.utils._pytree.tree_leaves(batch)]
        except (flow.DataError, TypeError) as error:
            return str(error).split("\n")[0]

    ours = read()
    monkeypatch.setattr(workers.BatchSlots, "of", lambda *_: None)
    theirs = read()
    assert type(ours) is type(theirs)
    assert len(ours) == len(theirs)
    assert all(a == b if isinstance(a, str) else torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
