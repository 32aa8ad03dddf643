"""Sources of samples: their batches are logical, so that each rank reads only the rows that it needs of them."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from actorflow.control.cluster import Alone
from actorflow.data.data_source import DataSource, other_data, tell_once
from actorflow.data.feed import Feed, FeedSource
from actorflow.data.order import EpochDraw, Picked
from actorflow.data.reading import BatchTemplate, ReadFailure, ReadRequest, SampleReader
from actorflow.data.sendable import sendable
from actorflow.data.structure import Structure
from actorflow.data.workers import ReadAhead, Reader, WorkerOptions, in_a_worker
from actorflow.session.process import current
from actorflow_compiler.core.errors import DataError

__all__ = ["BatchOrder", "SampleSource"]


class BatchOrder(Protocol):
    """Which rows are in which batch."""

    @property
    def rows(self) -> int | None:
        """Rows of an epoch; None: it is not known before its end."""

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch that is not short; None: it is not known."""

    @property
    def text(self) -> str:
        """What must be equal on all ranks, for messages."""

    def begin(self) -> EpochDraw:
        """An iteration begins: what it draws at once, for ``batches``."""

    def batches(self, epoch: int, row: int, draw: EpochDraw) -> Iterator[Picked]:
        """The batches of an epoch from a row on."""

    def set_epoch(self, epoch: int) -> None:
        """The script has set the number of the next epoch."""

    def ends(self, row: int) -> bool:
        """Whether no batch begins at this row or behind it, as far as that is known."""

    def count(self) -> int:
        """Batches of a whole epoch.  Raises TypeError where it is not known."""

    def state_dict(self, within: bool) -> dict[str, Any]:
        """What identifies the order, so that a position in it can be taken up again; ``within``: in an epoch."""

    def load_state_dict(self, state: Mapping[str, Any], name: str) -> None:
        """Take up what was saved; raises DataError, with ``name``, for the state of another order."""


class SampleSource(DataSource):
    """A source that puts batches together of the samples of a dataset; see ``DataSource``."""

    def __init__(self, reader: Reader, order: BatchOrder, options: WorkerOptions, whole: bool = False) -> None:
        super().__init__()
        self._reader, self._order, self._options, self._whole = reader, order, options, whole
        self._source: FeedSource | None = None  # made when it is first iterated over
        self._row = 0  # of the next batch

    # -- batches ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._within:  # that epoch was left in the middle
            self._epoch, self._row = self._epoch + 1, 0
        self._within = True
        return _Iteration(self, self._order.begin())

    def __len__(self) -> int:
        """The number of batches of a whole epoch; TypeError where it is not known."""
        return self._order.count()

    # -- position --------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How many rows were given so far, over all epochs, with those that ``drop_last`` has dropped.

        It does not depend on the number of ranks or workers.
        """
        rows = self._order.rows
        return self._row if rows is None else self._epoch * rows + self._row

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch number ``epoch``, from its beginning unless that is under way."""
        if epoch != self._epoch or self._within:
            self._move(epoch, 0)
        self._order.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values; ``flow.checkpoint`` saves it with an object that has it."""
        order = self._order.state_dict(self._within)
        return {"epoch": self._epoch, "row": self._row, "position": self.position, **order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position: the next batch is the one that would have come.

        Raises DataError for the state of another dataset or order.
        """
        self._need(state, "epoch", "row")
        self._order.load_state_dict(state, self.name)
        self._move(state["epoch"], state["row"])

    def _move(self, epoch: int, row: int) -> None:
        self._epoch, self._row, self._within = epoch, row, False
        self._version += 1

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same position and workers of its own."""
        return {**vars(self), "_source": None}

    def _begins_epoch(self) -> bool:
        return self._within or self._row == 0

    def __repr__(self) -> str:
        return f"<{self.name}: {self._order.text}>"

    # -- the parts -------------------------------------------------------------------------------------

    def source(self, epoch: int, seed: int, first: Picked) -> FeedSource:
        """What feeds share; ``first`` is the first batch asked for, whose first samples tell what batches look like.

        It is of this ``epoch``, whose elements have random numbers of this ``seed``.
        """
        if self._source is None:
            template, given = self._agree(epoch, seed, first)
            assert template is not None
            self._reader.template = template
            options = self._options
            ahead = ReadAhead(self._reader, options, self.name) if options.workers else None
            rows = self._order.rows
            total = "rows" if rows is None else f"{rows:,} rows"
            random = self._reader.random if isinstance(self._reader, SampleReader) else None
            self._source = FeedSource(
                self.name,
                self._reader,
                template,
                random,
                ahead,
                options.ahead,
                self._order.batch_size,
                total,
                given=given,
            )
            if ahead is not None:  # its threads do not keep the source: workers end with it
                weakref.finalize(self._source, ahead.close).atexit = False
            if template.why_whole and not self._whole:
                tell_once(f"every rank reads whole batches of {self.name}, since {template.why_whole}")
        return self._source

    def compare(self, epoch: int) -> None:
        """Raise DataError where this rank has no batch of an epoch, and another one has."""
        if self._source is None:
            self._agree(epoch, 0, None)

    def _agree(
        self, epoch: int, seed: int, first: Picked | None
    ) -> tuple[BatchTemplate | None, dict[tuple[int, int], Any]]:
        """What batches look like, as rank 0 has found it; with the samples that this took here.

        Raises DataError where ranks have other datasets or orders, or where samples cannot be read.
        """
        if isinstance(current().context.cluster, Alone):  # also a cluster that is pretended
            return (None, {}) if first is None else self._look(epoch, seed, first)
        given: dict[tuple[int, int], Any] = {}

        def decide(every: Sequence[bytes]) -> bytes:
            said, template = other_data([text.decode() for text in every]), None
            if not said and first is not None:
                try:
                    template, found = self._look(epoch, seed, first)
                    given.update(found)
                except DataError as error:
                    said = str(error).removeprefix(f"{self.name}: ")
            return json.dumps([said, None if template is None else template.to_json()]).encode()

        at = "no rows" if first is None else f"row {first.row} of epoch {epoch} with {first.indices[:4]!r}"
        said, template = json.loads(
            self._decided("the first batch", f"{self._order.text}, beginning at {at}".encode(), decide)
        )
        if said:
            raise DataError(f"{self.name}: {said}")
        return None if template is None else BatchTemplate.from_json(template), given

    def _look(self, epoch: int, seed: int, first: Picked) -> tuple[BatchTemplate, dict[tuple[int, int], Any]]:
        reader = self._reader
        if reader.template is not None:
            return reader.template, {}
        assert isinstance(reader, SampleReader)
        if self._whole and reader.padder is None:
            return BatchTemplate(Structure.leaf(), (), "whole=True"), {}
        count = min(reader.probed, len(first.indices))
        request = ReadRequest.of(epoch, 0, first, ((0, count),), seed)
        template: BatchTemplate | ReadFailure
        if self._options.workers:
            template, read = in_a_worker(_Probe(reader, request), reader.dataset, self._options, self.name)
        else:
            with reader.random.aside():
                template, read = reader.try_probe(request)
        if isinstance(template, ReadFailure):
            raise template.error(self.name)
        if self._whole:
            template = replace(template, why_whole="whole=True")
        return template, {(epoch, place): sample for place, sample in read.items()}


class _Iteration(Iterator[Any]):
    """The rest of an epoch of a source."""

    def __init__(self, loader: SampleSource, draw: EpochDraw) -> None:
        self._loader, self._version = loader, loader._version
        self._draw = draw
        self._feed: Feed | None = None
        self._epoch, self._row = loader._epoch, loader._row

    def __next__(self) -> Any:
        loader = self._loader
        if self._version != loader._version:  # a position was loaded meanwhile
            self._version, self._feed = loader._version, None
            self._epoch, self._row = loader._epoch, loader._row
            self._draw = loader._order.begin()
            loader._within = True
        if self._feed is None:
            draw, epoch = self._draw, self._epoch
            batches = loader._order.batches(epoch, self._row, draw)
            first = next(batches, None)
            if first is None:
                loader.compare(epoch)
                return self._end()
            source = loader.source(epoch, draw.element_seed, first)
            self._feed = Feed(source, epoch, draw.element_seed, itertools.chain([first], batches))
        batch = self._feed.next()
        if batch is None:
            return self._end()
        content = batch.content()
        self._row = batch.picked.end
        if self._epoch >= loader._epoch:
            loader._epoch, loader._row = self._epoch, self._row
            if loader._order.ends(self._row):
                self._feed.exhaust()
                loader._epoch, loader._row, loader._within = self._epoch + 1, 0, False
        return content

    def _end(self) -> Any:
        loader = self._loader
        if self._epoch == loader._epoch and loader._within:
            loader._epoch, loader._row, loader._within = self._epoch + 1, 0, False
        raise StopIteration


class _Probe:
    """The first look at samples, which a worker takes."""

    def __init__(self, reader: SampleReader, request: ReadRequest) -> None:
        self._reader, self._request = reader, request

    def __call__(self) -> Any:
        template, read = self._reader.try_probe(self._request)
        return template, sendable(read)
