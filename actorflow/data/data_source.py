"""What all data sources have in common: epochs, a position in them, and a word among ranks about what they give."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from actorflow.session.process import current
from actorflow.support.terminal import say
from actorflow_compiler.core.errors import DataError
from actorflow_compiler.core.user_code import UserLines

__all__ = ["DataSource", "other_data", "tell_once"]

_numbers = itertools.count()
_lines = UserLines()


_told: set[str] = set()


def tell_once(note: str) -> None:
    """Print a note, on rank 0, once."""
    if note not in _told and current().context.cluster.rank == 0:
        _told.add(note)
        say(note)


def other_data(said: Sequence[str]) -> str:
    """A sentence about the first rank that says something else of its data than rank 0; empty if none does."""
    for rank, text in enumerate(said):
        if text != said[0]:
            return (
                f"ranks have different data: rank 0 has {said[0]}; rank {rank} has {text}; expected: the same dataset, "
                f"sampler and seed on all ranks, as each of them reads its own rows of the same batches"
            )
    return ""


class DataSource(ABC):
    """A loader: iterating over it gives the batches of one epoch after the other.

    Every rank must iterate alike.  A batch has the form that its dataset, collate or stream gives it.  Unless batches
    are read whole, its tensors have a shape, [rows, ...], and a dtype, and no values: a job that is called with them
    reads, on each rank, the rows that this rank needs.  Where the script looks at one, the whole batch is read.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self.name = f"the loader of {_lines.here() or 'the script'}"  # for messages
        self._epoch = 0  # of the next batch
        self._within = False  # an iteration of this epoch has begun
        self._version = 0  # of the position; a loaded one moves iterations that are under way

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches of a whole epoch; TypeError where it is not known."""

    def repeat(self) -> Iterator[Any]:
        """Batches without end, one epoch after the other.  Raises DataError for a source without batches."""
        while True:
            batch, began = None, self._begins_epoch()
            for batch in self:
                yield batch
            if batch is None and began:
                raise DataError(f"{self.name}: an epoch has no batches; a dataset with rows for one was expected")

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs up to ``total``, from that of the next batch on: also where a run goes on."""
        while (epoch := self.epoch) < total:
            yield epoch
            if self.epoch == epoch:  # the script has left the epoch, or not begun it
                self.set_epoch(epoch + 1)

    @property
    def epoch(self) -> int:
        """The number of the epoch of the next batch, from 0."""
        return self._epoch

    @property
    @abstractmethod
    def position(self) -> int:
        """How much of the source was given so far: see the kind of source."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch number ``epoch``, from its beginning unless that is under way."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values; ``flow.checkpoint`` saves it with an object that has it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position: the next batch is the one that would have come.

        Raises DataError for the state of another dataset or order.
        """

    # -- for sources -----------------------------------------------------------------------------------

    def _begins_epoch(self) -> bool:
        """Whether the next iteration gives an epoch from its beginning."""
        return True

    def _need(self, state: Mapping[str, Any], *keys: str) -> None:
        """Raise DataError for a state without these whole numbers."""
        missing = [key for key in keys if not isinstance(state.get(key), int)]
        if missing:
            raise DataError(
                f"{self.name}: a state without {' and '.join(missing)} was found ({', '.join(map(str, state))}); "
                f"that of state_dict() of such a loader was expected"
            )

    def _decided(self, about: str, mine: bytes, decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """What rank 0 decides from what all ranks say, in order of rank; all ranks must ask alike.

        ``about`` is for the message where they do not.
        """
        cluster = current().context.cluster
        if cluster.world == 1:
            return decide([mine])
        tag = f"{about} of {self.name}, the script's data source number {self._number}"
        every = cluster.gather(tag, mine)
        return cluster.scatter(tag, None if every is None else [decide(every)] * cluster.world)
