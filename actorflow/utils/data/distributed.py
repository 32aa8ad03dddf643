"""``DistributedSampler``: the indices of a dataset that are this rank's."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, distributed

from actorflow.distributed.group import rank as rank_of_run
from actorflow.distributed.group import world as world_of_run
from actorflow.support.nearest_names import answer_with_nearest

__all__ = ["DistributedSampler"]


class DistributedSampler(distributed.DistributedSampler[Any]):
    """PyTorch's ``DistributedSampler`` with PyTorch's arguments, over all ranks of the run unless told otherwise.

    It needs no process group; one that the script has made says which ranks there are.
    """

    def __init__(
        self, dataset: Dataset[Any], num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True,
        seed: int = 0, drop_last: bool = False,
    ) -> None:  # fmt: skip
        if not torch.distributed.is_initialized():
            num_replicas = world_of_run() if num_replicas is None else num_replicas
            rank = rank_of_run() if rank is None else rank
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)


answer_with_nearest(__name__)
