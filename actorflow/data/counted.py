"""Sources whose position is a number of batches: what they have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorflow.data.data_source import DataSource
from actorflow_compiler.core.errors import DataError

__all__ = ["CountedSource", "PiecesRead"]


class CountedSource(DataSource):
    """A source that gives batches as they come, and whose position is their number."""

    def __init__(self) -> None:
        super().__init__()
        self._batch = 0  # of the epoch, that comes next
        self._given = 0  # batches so far, over all epochs
        self._newest: _Batches | None = None  # the iteration that moves the position

    def __iter__(self) -> Iterator[Any]:
        if self._within:  # that epoch was left in the middle
            self._epoch, self._batch = self._epoch + 1, 0
        return _Batches(self)

    @property
    def position(self) -> int:
        """How many batches were given so far, over all epochs.  It does not depend on the number of ranks."""
        return self._given

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch number ``epoch``, from its beginning unless that is under way."""
        if epoch != self._epoch or self._within:
            self._move(epoch, 0, self._given)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what belongs to it; ``flow.checkpoint`` saves it with an object that has it."""
        return {"epoch": self._epoch, "batch": self._batch, "position": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position: the next batch is the one that would have come.

        Raises DataError for the state of another source.
        """
        self._need(state, "epoch", "batch", "position")
        self._move(state["epoch"], state["batch"], state["position"])

    def _move(self, epoch: int, batch: int, given: int) -> None:
        self._epoch, self._batch, self._given, self._within = epoch, batch, given, False
        self._newest = None
        self._version += 1

    def _begins_epoch(self) -> bool:
        return self._within or self._batch == 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same position, and opens what it reads by itself."""
        return {**vars(self), "_newest": None, "_opened": None}

    @abstractmethod
    def _open(self, epoch: int, batch: int) -> Iterator[Any]:
        """The batches of an epoch from one on."""


class _Batches(Iterator[Any]):
    """The rest of an epoch of a counted source."""

    def __init__(self, source: CountedSource) -> None:
        self._source = source
        self._begin()

    def _begin(self) -> None:
        source = self._source
        self._version, self._epoch, self._batch = source._version, source._epoch, source._batch
        source._newest, source._within = self, True
        self._rest = source._open(self._epoch, self._batch)

    def __next__(self) -> Any:
        source = self._source
        if self._version != source._version:  # a position was loaded meanwhile
            self._begin()
        try:
            found = next(self._rest)
        except StopIteration:
            if source._newest is self and source._within:
                source._epoch, source._batch, source._within = self._epoch + 1, 0, False
            raise
        self._batch += 1
        if source._newest is self:
            source._batch = self._batch
            source._given += 1
        return found


@dataclass(frozen=True, slots=True)
class PiecesRead:
    """Rows that the script's thread reads or has read, in pieces: (tensors, first row, row behind the last)."""

    source: str
    text: str
    pieces: Sequence[tuple[list[Tensor], int, int]] = ()
    error: DataError | None = None

    def ready(self) -> bool:
        """See ``RowsRead``."""
        return True

    def then(self, callback: Callable[[], object]) -> None:
        """See ``RowsRead``."""
        callback()

    def leaf(self, index: int) -> Tensor:
        """See ``RowsRead``."""
        if self.error is not None:
            raise self.error
        found = [leaves[index][lo:hi] for leaves, lo, hi in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found)
