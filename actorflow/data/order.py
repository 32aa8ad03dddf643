"""The order in which rows are given: it depends on seed and epoch alone, and a position in it is one number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from actorflow_compiler.core.errors import DataError

__all__ = ["EpochDraw", "Picked", "ShuffledOrder"]


@dataclass(frozen=True, slots=True)
class Picked:
    """The rows of one batch."""

    row: int  # place of the first one in the epoch
    indices: tuple[Any, ...]  # in the dataset
    bucket: int = 0  # the size to which its samples are padded; 0: they are not

    @property
    def end(self) -> int:
        """The place in the epoch of the row behind the last one."""
        return self.row + len(self.indices)


@dataclass(slots=True)
class EpochDraw:
    """What was drawn for one iteration; in ``zip(loader, loader)`` another begins before this gives its first batch."""

    element_seed: int  # of the random numbers of elements; valid once the first batch was asked for
    picks: Iterator[Any] | None = None  # what a sampler gives
    resumes: Mapping[str, Any] | None = None  # the states of generators to begin with


@dataclass(frozen=True, slots=True)
class ShuffledOrder:
    """All rows of a dataset in order, or each epoch in another one.

    A shuffled epoch is that of torch's ``DistributedSampler`` of one replica with the same seed and epoch.
    """

    length: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    @property
    def rows(self) -> int:
        """Rows of an epoch, with those that are dropped."""
        return self.length

    @property
    def text(self) -> str:
        """See ``BatchOrder``."""
        shuffled = f"shuffled with seed {self.seed}" if self.shuffle else "in order"
        dropping = ", dropping the last" * self.drop_last
        return f"{self.length:,} rows {shuffled} in batches of {self.batch_size}{dropping}"

    def begin(self) -> EpochDraw:
        """See ``BatchOrder``."""
        return EpochDraw(self.seed)

    def set_epoch(self, epoch: int) -> None:
        """See ``BatchOrder``."""

    def ends(self, row: int) -> bool:
        """Whether no batch begins at this row or behind it."""
        return row >= self.length or (self.drop_last and row + self.batch_size > self.length)

    def state_dict(self, within: bool = False) -> dict[str, Any]:
        """See ``BatchOrder``: what identifies the order."""
        return {"rows": self.length, "shuffle": self.shuffle, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any], name: str) -> None:
        """Check a saved order.  Raises DataError if it is another one."""
        if state.get("buckets"):
            raise DataError(
                f"{name}: a position of a source with buckets={state['buckets']!r} was loaded; this one has none, so "
                f"that other rows would follow; expected: the same buckets, or a source that begins anew: leave its "
                f"state out"
            )
        for key, mine in self.state_dict().items():
            if key == "seed" and not self.shuffle:
                continue
            if state.get(key) != mine:
                raise DataError(
                    f"{name}: a position of a source with {key}={state.get(key)!r} was loaded; this one has "
                    f"{key}={mine!r}, so that other rows would follow; expected: the same dataset, shuffle and seed "
                    f"(ranks, workers and batch_size may differ), or a source that begins anew: leave its state out"
                )

    def indices(self, epoch: int) -> torch.Tensor:
        """The dataset's index of each row of an epoch, int64."""
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))

    def batches(self, epoch: int, row: int, draw: EpochDraw) -> Iterator[Picked]:
        """The batches of an epoch from a row on."""
        indices = self.indices(epoch)
        for first in range(row, self.length, self.batch_size):
            taken = indices[first : first + self.batch_size].tolist()
            if len(taken) == self.batch_size or not self.drop_last:
                yield Picked(first, tuple(taken))

    def count(self) -> int:
        """The number of batches of a whole epoch."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)
