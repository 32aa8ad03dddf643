"""Give the batches of one epoch, one after the other, and read of each the rows that are asked for.

Which rows a rank needs of a batch is known when a job is called with it.  From then on, workers read those rows of
batches of the same size ahead; what is missing when a batch is used is read then, by them, too.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorflow.data.data_source import tell_once
from actorflow.data.element_random import ElementRandom
from actorflow.data.order import Picked
from actorflow.data.reading import BatchTemplate, ReadFailure, ReadRequest
from actorflow.data.workers import ReadAhead, Reader
from actorflow.session.process import script_reads
from actorflow.standins.logical_batch import BatchTensor
from actorflow_compiler.core.runs import Runs, difference, union
from actorflow_compiler.core.units import rows_text

__all__ = ["Feed", "FeedSource", "SourceBatch"]

Shape = tuple[int, int]
"""Rows of a batch, and its bucket (0: none)."""


@dataclass(slots=True, weakref_slot=True)
class FeedSource:
    """What the feeds of one source share."""

    name: str  # for messages: "the loader of train.py:31"
    reader: Reader
    template: BatchTemplate
    random: ElementRandom | None  # what reading in the script's own process must leave as it was
    ahead: ReadAhead | None  # None: the script's own process reads
    depth: int  # batches that are read ahead
    batch_size: int | None  # rows of a batch that is not short; None: it is not known
    total: str  # for messages: "1,000 rows"
    needs: dict[Shape, Runs] = field(default_factory=dict)  # of batches → their rows that this rank was asked for
    given: dict[tuple[int, int], Any] = field(default_factory=dict)  # (epoch, place) → a sample that was read before

    @property
    def whole(self) -> bool:
        """Whether batches are read whole, and given to the script as they are."""
        return bool(self.template.why_whole)

    def request(self, batch: SourceBatch, rows: Runs) -> ReadRequest:
        """The request of some rows of a batch."""
        feed = batch.feed
        made = ReadRequest.of(feed.epoch, batch.number, batch.picked, rows, feed.seed, not self.whole)
        known = {at: self.given.pop((feed.epoch, at)) for at in made.places if (feed.epoch, at) in self.given}
        return replace(made, given=known) if known else made

    def wanted(self, batch: SourceBatch) -> Runs:
        """The rows of a batch that are read ahead: those that were needed of others of its size, and bucket if any."""
        if self.whole:
            return ((0, batch.size),)
        alike = (rows for (size, _), rows in self.needs.items() if size == batch.size)
        return self.needs.get(batch.shape) or next(alike, ())

    def read_here(self, request: ReadRequest) -> Any:
        """Read in this process; the script's random numbers stay as they are."""
        if self.random is None:
            return self.reader.read(request)
        with self.random.aside():
            return self.reader.read(request)


class SourceBatch:
    """One batch of a source, of which any rows can be read."""

    def __init__(self, feed: Feed, number: int, picked: Picked) -> None:
        self.feed, self.number, self.picked = feed, number, picked
        self.parts: list[tuple[Runs, Future[Any]]] = []  # rows that are read, or being read
        self.planned: tuple[Runs, Future[Any]] | None = None  # what workers read of it

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.picked.indices)

    @property
    def shape(self) -> Shape:
        """What decides about the shapes of its tensors."""
        return self.size, self.picked.bucket

    @property
    def text(self) -> str:
        """See ``LogicalBatch``."""
        order = zlib.crc32(repr(self.picked.indices).encode())
        source = self.feed.source
        return (
            f"rows {self.picked.row}-{self.picked.end - 1} of epoch {self.feed.epoch} of {source.name} "
            f"({source.total}, indices {order:08x})"
        )

    def read(self, rows: Runs) -> _Read:
        """See ``LogicalBatch``."""
        return self.feed.read(self, rows)

    def look(self, leaf: int, line: str) -> Tensor:
        """See ``LogicalBatch``."""
        tell_once(
            f"{line or 'the script'} looks at a batch of {self.feed.source.name}, so every rank reads whole batches, "
            f"beside what its jobs need: do it in the job, and return what is wanted"
        )
        read = self.feed.read(self, ((0, self.size),))
        with script_reads(read):
            return read.leaf(leaf)

    def content(self) -> Any:
        """The batch, as the script gets it."""
        source = self.feed.source
        if source.whole:
            read = self.feed.read(self, ((0, self.size),))
            with script_reads(read):
                return read.result()
        leaves = [
            BatchTensor.of(self, at, (self.size, *spec.shape), spec.dtype)
            for at, spec in enumerate(source.template.of(self.picked.bucket))
        ]
        return source.template.structure.put_together(leaves)


_FEW = 16  # batches


class Feed:
    """The batches of an epoch from some row on.  For the script's thread."""

    def __init__(self, source: FeedSource, epoch: int, seed: int, batches: Iterator[Picked]) -> None:
        self.source, self.epoch, self.seed = source, epoch, seed
        self._batches: Iterator[Picked] | None = batches
        self._coming: deque[SourceBatch] = deque()
        self._taken: list[weakref.ref[SourceBatch]] = []  # until workers read
        self._most_taken = _FEW  # of them, before those are let go of that the script has not kept
        self._number = 0
        self._started = source.ahead is None  # workers have begun to read for it

    def next(self) -> SourceBatch | None:
        """The next batch; None behind the last one."""
        while self._batches is not None and len(self._coming) <= self.source.depth:
            picked = next(self._batches, None)
            if picked is None:
                self._batches = None
                break
            batch = SourceBatch(self, self._number, picked)
            self._number += 1
            self._coming.append(batch)
            if self._ahead is not None:
                self._plan(self._ahead, batch)
        if not self._coming:
            return None
        batch = self._coming.popleft()
        if not self._started:
            self._taken.append(weakref.ref(batch))
            if len(self._taken) > self._most_taken:
                self._taken = [one for one in self._taken if one() is not None]
                self._most_taken = 2 * len(self._taken) + _FEW
        return batch

    def exhaust(self) -> None:
        """Let the sampler come to its end, where it may draw once more, as there are no more batches."""
        if self._batches is not None and not self._coming:
            for _ in self._batches:
                pass
            self._batches = None

    def read(self, batch: SourceBatch, rows: Runs) -> _Read:
        """Begin to read rows of a batch."""
        source = self.source
        source.needs[batch.shape] = union((*source.needs.get(batch.shape, ()), *rows))
        ahead = source.ahead
        if ahead is not None and not self._started:
            self._start(ahead, batch)
        if batch.planned is not None:
            planned, batch.planned = batch.planned, None
            if ahead is not None and not planned[1].done():
                ahead.want(planned[1])
            if not planned[1].cancelled():  # else another feed has the workers since then
                batch.parts.append(planned)
        missing = difference(rows, union(run for have, _ in batch.parts for run in have))
        if missing:
            request = source.request(batch, missing)
            if ahead is not None:  # the script's process may be unable to read: files are opened in workers
                found = ahead.read_also(request)
            else:
                found = Future()
                with script_reads(_Read(batch, missing, ())):
                    found.set_result(source.read_here(request))
            batch.parts.append((missing, found))
        return _Read(batch, rows, tuple(batch.parts))

    @property
    def _ahead(self) -> ReadAhead | None:
        """The workers, while they read for this feed."""
        ahead = self.source.ahead
        return ahead if ahead is not None and ahead.owner is self else None

    def _start(self, ahead: ReadAhead, first: SourceBatch) -> None:
        """Let workers read this batch and those behind it."""
        taken = [batch for one in self._taken if (batch := one()) is not None and batch.number >= first.number]
        self._taken, self._started = [], True
        ahead.begin(self)
        for batch in [*taken, *self._coming]:
            self._plan(ahead, batch)
        ahead.start(max(first.size, self.source.batch_size or 0))

    def _plan(self, ahead: ReadAhead, batch: SourceBatch) -> None:
        rows = self.source.wanted(batch)
        request = self.source.request(batch, rows) if rows else None
        batch.planned = rows, ahead.add(request)


class _Read:
    """Rows of a batch that are being read, in parts."""

    def __init__(self, batch: SourceBatch, rows: Runs, parts: Sequence[tuple[Runs, Future[Any]]]) -> None:
        self.source = batch.feed.source.name
        self._epoch, self._first, self._rows = batch.feed.epoch, batch.picked.row, rows
        self._parts = [(have, future) for have, future in parts if have]

    @property
    def text(self) -> str:
        """See ``RowsRead``."""
        rows = rows_text([(self._first + lo, self._first + hi) for lo, hi in self._rows])
        return f"{rows} of epoch {self._epoch}"

    def ready(self) -> bool:
        """See ``RowsRead``."""
        return all(future.done() for _, future in self._parts)

    def then(self, callback: Callable[[], object]) -> None:
        """See ``RowsRead``."""
        for _, future in self._parts:
            if not future.done():
                future.add_done_callback(_Later(self, callback))
                return
        callback()

    def leaf(self, index: int) -> Tensor:
        """See ``RowsRead``."""
        found: list[Tensor] = [self._found(future)[index] for _, future in self._parts]
        if len(found) == 1 and self._parts[0][0] == self._rows:
            return found[0]
        have = np.concatenate([_numbers(rows) for rows, _ in self._parts])
        order = np.argsort(have, kind="stable")
        at = order[np.searchsorted(have[order], _numbers(self._rows))]
        return torch.cat(found)[torch.from_numpy(at)]

    def result(self) -> Any:
        """What was read, in one part.  Waits for it; raises its error."""
        return self._found(self._parts[0][1])

    def _found(self, future: Future[Any]) -> Any:
        result = future.result()
        if isinstance(result, ReadFailure):
            raise result.error(self.source)
        return result


class _Later:
    """Calls ``then`` of what is being read.  Its future keeps it, so that it must let go of what it has called."""

    def __init__(self, read: _Read, callback: Callable[[], object]) -> None:
        self._work: tuple[_Read, Callable[[], object]] | None = (read, callback)

    def __call__(self, _: Future[Any]) -> None:
        work, self._work = self._work, None
        if work is not None:
            work[0].then(work[1])


def _numbers(rows: Runs) -> np.ndarray[Any, Any]:
    return np.concatenate([np.arange(lo, hi) for lo, hi in rows] or [np.empty(0, np.int64)])
