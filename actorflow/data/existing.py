"""Take over a torch ``DataLoader``: its dataset, sampler, collate and workers, and the order of its batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from actorflow.data.element_random import ElementRandom
from actorflow.data.order import EpochDraw, Picked
from actorflow.data.workers import WorkerOptions
from actorflow_compiler.core.errors import DataError
from actorflow_compiler.core.torch_internals import real_tensors

__all__ = ["SamplerOrder", "options_of", "refuse_distributed"]


class SamplerOrder:
    """The order of a ``DataLoader`` of a map-style dataset, which draws what that would draw.

    A position in an epoch is taken up again by the states that random generators had at its beginning, so that the
    sampler gives the same rows again, of which those before the position are passed over.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        # of torch's own, the sampler gives rows, which are put into batches here; one that was passed gives batches
        own = type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
        self._sampler: Any = loader.sampler if own else loader.batch_sampler
        self._batch_size = loader.batch_size if own else None
        self._drop_last = loader.drop_last
        self._random = ElementRandom(self._sampler, loader.generator)
        self._start: dict[str, Any] | None = None  # the generators' states when this epoch began
        self._resumes: Mapping[str, Any] | None = None  # those to begin with, from a checkpoint
        self._begun = 0  # epochs
        self._seed = 0  # of the random numbers of elements of the epoch that began last

    @property
    def rows(self) -> int | None:
        """Rows of an epoch; None where the sampler does not say."""
        if self._batch_size is None:
            return None
        return len(self._sampler) if isinstance(self._sampler, Sized) else None

    @property
    def batch_size(self) -> int | None:
        """See ``BatchOrder``."""
        return self._batch_size

    @property
    def text(self) -> str:
        """See ``BatchOrder``."""
        data = self._loader.dataset
        size = f"{len(data):,} rows" if isinstance(data, Sized) else "rows"
        batches = "batches" if self._batch_size is None else f"batches of {self._batch_size}"
        dropping = ", dropping the last" * self._drop_last
        return f"{size} in {batches} by {type(self._sampler).__name__}{dropping}"

    def begin(self) -> EpochDraw:
        """Draw what a ``DataLoader`` draws when it is iterated over."""
        resumes, self._resumes = self._resumes, None
        draw = EpochDraw(self._seed, resumes=resumes)
        if resumes is not None:
            self._start = {**resumes}
        else:
            self._start = self._random.saved()
            self._draw(draw)
        return draw

    def batches(self, epoch: int, row: int, draw: EpochDraw) -> Iterator[Picked]:
        """The batches of an epoch from a row on."""
        if draw.resumes is None:
            assert draw.picks is not None
            yield from self._picked(draw.picks)
            return
        with self._random.aside(own=False):
            self._random.put_back(draw.resumes)
            self._draw(draw)
            assert draw.picks is not None
            found = self._picked(draw.picks)
            first = next((batch for batch in found if batch.end > row), None)  # here the sampler draws
        if first is None:
            return
        if first.row < row:  # another size of batches: the rest of that one comes first
            first = Picked(row, first.indices[row - first.row :])
        yield first
        yield from found

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, as a script does."""
        for one in (self._sampler, self._loader.sampler, getattr(self._loader.dataset, "set_epoch", None)):
            tell = getattr(one, "set_epoch", one if callable(one) else None)
            if callable(tell):
                tell(epoch)
                return

    def ends(self, row: int) -> bool:
        """See ``BatchOrder``."""
        rows = self.rows
        if rows is None or self._batch_size is None:
            return False
        return row >= rows or (self._drop_last and row + self._batch_size > rows)

    def count(self) -> int:
        """See ``BatchOrder``."""
        return len(self._loader)

    def state_dict(self, within: bool) -> dict[str, Any]:
        """The states of generators when the epoch began; between epochs, of those that only the sampler draws from."""
        generators = self._start if within else self._random.saved_own()
        return {"sampler": type(self._sampler).__name__, "generators": generators}

    def load_state_dict(self, state: Mapping[str, Any], name: str) -> None:
        """Take up an epoch that had begun with these states."""
        found = state.get("sampler")
        if found != type(self._sampler).__name__:
            raise DataError(
                f"{name}: the position of a source with sampler={found!r} was loaded; this one has "
                f"{type(self._sampler).__name__!r}, whose rows would be others"
            )
        generators = state.get("generators") or self._random.saved_own()
        try:
            with self._random.aside():
                self._random.put_back(generators)
        except ValueError as error:
            raise DataError(f"{name}: the sampler of the saved position drew from other generators: {error}") from None
        self._resumes = None
        if "torch" in generators:
            self._resumes = generators
        else:
            self._random.put_back(generators)

    # -- parts -----------------------------------------------------------------------------------------

    def _draw(self, draw: EpochDraw) -> None:
        """Draw as the ``DataLoader`` would, with the iterator of its sampler."""
        loader = self._loader
        again = self._begun > 0 and loader.num_workers > 0 and loader.persistent_workers
        self._begun += 1
        picks: Iterator[Any] = iter(self._sampler)
        if not again:
            with real_tensors():
                self._seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator))
        if loader.num_workers:  # its workers are told the first rows at once
            picks = itertools.chain([*itertools.islice(picks, 1)], picks)
        draw.element_seed, draw.picks = self._seed, picks

    def _picked(self, picks: Iterator[Any]) -> Iterator[Picked]:
        row = 0
        if self._batch_size is None:
            for indices in picks:
                yield Picked(row, tuple(indices))
                row += len(indices)
            return
        batch: list[Any] = []
        for index in picks:
            batch.append(index)
            if len(batch) == self._batch_size:
                yield Picked(row, tuple(batch))
                row, batch = row + len(batch), []
        if batch and not self._drop_last:
            yield Picked(row, tuple(batch))


def options_of(loader: DataLoader[Any]) -> WorkerOptions:
    """How the loader reads ahead."""
    workers = loader.num_workers
    return WorkerOptions(
        workers,
        workers * (loader.prefetch_factor or 2),
        loader.pin_memory,
        loader.worker_init_fn,
        loader.multiprocessing_context,
        loader.timeout,
    )


def refuse_distributed(loader: Any) -> None:
    """Raise DataError for a loader whose sampler gives each rank rows of its own."""
    samplers: list[Any] = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers += [getattr(one, name, None) for one in samplers for name in ("sampler", "base_sampler", "batch_sampler")]
    for one in samplers:
        if isinstance(one, DistributedSampler) and one.num_replicas > 1:
            raise DataError(
                f"a loader with a DistributedSampler was found (rank {one.rank} of {one.num_replicas}): it gives each "
                f"rank other rows, and a job takes the whole batch, which is the same on all ranks and of which each "
                f"reads its own rows; expected: a loader without it, with batch_size={_whole_size(loader, one)}: "
                f"flow.data.loader(dataset, batch_size=..., shuffle={one.shuffle}, seed={one.seed})"
            )


def _whole_size(loader: Any, sampler: DistributedSampler[Any]) -> str:
    size = getattr(loader, "batch_size", None)
    return "the whole batch's" if size is None else str(size * sampler.num_replicas)
