"""Use shares of ranks in ways that they do not fit, and print what is said about each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from streamed import ROWS, StatefulBatches
from torch import Tensor, nn

import actorflow as flow

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
layer = nn.Linear(6, 8).double()


@flow.global_function(type="predict", parallel="tensor")
def apply(x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


class Uneven:
    """Batches, of which later ranks have more."""

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(4, 3)] * (2 + rank))


def share() -> Any:
    return flow.data.sharded(StatefulBatches(part=rank, parts=world, size=ROWS // world), batches=3)


def in_tensor_parallel() -> None:
    apply(next(iter(share()))["x"])


def looked_at() -> None:
    next(iter(share()))["x"].sum()


def uneven() -> None:
    for _ in flow.data.sharded(Uneven()):
        pass


def of_other_ranks() -> None:
    source = share()
    source.load_state_dict({**source.state_dict(), "shards": 3})


for wrong in (in_tensor_parallel, looked_at, uneven, of_other_ranks):
    try:
        wrong()
    except flow.DataError as error:
        print(error, flush=True)
