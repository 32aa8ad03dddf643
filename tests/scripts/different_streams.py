"""Iterate over streams that give each rank other batches, and print what is said about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from streamed import ROWS, StatefulBatches

import actorflow as flow


class Longer:
    """Batches, of which later ranks have more."""

    def __init__(self) -> None:
        self.count = 2 + int(os.environ["RANK"])

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(4, 3)] * self.count)


class Told(StatefulBatches):
    """Whole batches, of a class that was told of ranks and may give a share that is equal on all."""

    def __init__(self) -> None:
        super().__init__()
        self.distributed_env = SimpleNamespace(world_size=int(os.environ["WORLD_SIZE"]))


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for source in (
    flow.data.loader(StatefulBatches(part=rank, parts=world, size=ROWS // world)),
    flow.data.loader(Longer()),
    flow.data.loader(Told()),
):
    try:
        for _ in source:
            pass
    except flow.DataError as error:
        print(error, flush=True)
