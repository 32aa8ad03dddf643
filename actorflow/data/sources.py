"""``flow.data.loader``: make a data source of a dataset, or of a ``DataLoader`` that exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from actorflow.data.arrays import arrays_of
from actorflow.data.data_source import DataSource
from actorflow.data.existing import SamplerOrder, options_of, refuse_distributed
from actorflow.data.loader import SampleSource
from actorflow.data.order import ShuffledOrder
from actorflow.data.reading import SampleReader
from actorflow.data.streams import batches_of, is_stream
from actorflow.data.workers import WorkerOptions
from actorflow_compiler.core.errors import DataError

__all__ = ["loader"]


def loader(
    dataset: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    seed: int = 0,
    workers: int | None = None,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
    prefetch: int | None = None,
    pin_memory: bool | None = None,
    whole: bool = False,
    replay: bool = False,
) -> DataSource:
    """Make a data source, whose batches are the same on every number of ranks.

    ``dataset`` is map-style (``__getitem__`` and ``__len__``; ``__getitems__`` is used where it is there), or a tensor,
    a NumPy array or a memory map, or a tuple or dictionary of such with one row for each sample.  Or it is a torch
    ``DataLoader``, which is taken over as it is: its dataset, sampler, collate, workers, and the order of its batches.

    Or it is a stream, over which every rank iterates: a torch ``IterableDataset`` or another iterable without
    ``__getitem__`` (of samples, or of batches where ``batch_size`` is not given); a ``DataLoader`` of one, or with
    ``batch_size=None``; or any loader of batches with ``state_dict()`` and ``load_state_dict()``.  Its batches are real
    tensors, in its own order, and must be the same on all ranks; see ``flow.data.sharded`` for shares.  It goes on with
    its own state where it has one; ``replay`` has the batches before passed over instead.

    Batches have ``batch_size`` rows, the last one what is left, unless ``drop_last``.  ``shuffle`` gives each epoch an
    order that depends on ``seed`` and its number alone.  ``collate`` makes a batch of a list of samples (default:
    torch's ``default_collate``).  It is called with the samples of a rank: one that does not join them row by row, as
    one that pads to the longest, is given all samples of the batch on every rank, with a note; ``whole`` does so
    without.

    ``workers`` processes on each rank read ``prefetch`` batches ahead; without any, the script's own process reads when
    a job is called.  ``pin_memory`` puts what they read into pinned memory (default: where the rank has a GPU).
    Random numbers that a sample draws depend on ``seed``, the epoch and its place in it alone.

    A sample that raises, samples of different shapes and a worker that dies end the run with a DataError that names the
    sample; a dataset that cannot be read by rows, or options that do not fit, are a DataError at once.

    >>> loader = flow.data.loader(dataset, batch_size=64, shuffle=True, seed=0, workers=2)
    >>> for images, targets in loader:
    ...     loss = train_step(images, targets)
    """
    given = {
        name: value
        for name, value in {
            "batch_size": batch_size, "shuffle": shuffle or None, "seed": seed or None, "workers": workers,
            "drop_last": drop_last or None, "collate": collate,
        }.items()
        if value is not None
    }  # fmt: skip
    _check_numbers(batch_size, seed, workers, prefetch)
    pins = _pins() if pin_memory is None else pin_memory
    if is_stream(dataset):
        return batches_of(
            dataset, given, batch_size, workers or 0, prefetch, pins, seed, drop_last, collate, replay
        )  # fmt: skip
    if replay:
        raise DataError(
            f"replay=True was given for a {type(dataset).__qualname__}, whose position counts rows: leave it out; "
            f"it is for streams that are iterated over"
        )
    if isinstance(dataset, DataLoader):
        return _taken_over(dataset, given, prefetch, whole)
    length, reader = _rows_of(dataset, collate)
    options = WorkerOptions(workers or 0, prefetch or 2, pins)
    order = ShuffledOrder(length, batch_size or 1, shuffle, seed, drop_last)
    return SampleSource(reader, order, options, whole)


def _taken_over(loader: DataLoader[Any], given: Mapping[str, object], prefetch: int | None, whole: bool) -> DataSource:
    if given:
        raise DataError(
            f"a DataLoader was given together with {', '.join(given)}; it is taken over as it is: leave them out, or "
            f"pass its dataset: flow.data.loader(existing.dataset, ...)"
        )
    refuse_distributed(loader)
    options = options_of(loader)
    if prefetch is not None:
        options = WorkerOptions(
            options.workers, prefetch, options.pin_memory, options.worker_init_fn, options.multiprocessing_context,
            options.timeout,
        )  # fmt: skip
    return SampleSource(SampleReader(loader.dataset, loader.collate_fn), SamplerOrder(loader), options, whole)


def _rows_of(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> tuple[int, Any]:
    """The number of rows of a dataset, and its reader."""
    reader = arrays_of(dataset) if collate is None else None
    if reader is not None:
        return len(reader), reader
    kind = type(dataset).__qualname__
    if isinstance(dataset, Mapping):
        raise DataError(
            f"a {kind} with {', '.join(map(repr, list(dataset)[:6]))} was found; a dataset was expected: one of these, "
            f"or a dictionary of tensors or arrays that have one row for each sample"
        )
    if isinstance(dataset, str | bytes | type) or not callable(getattr(dataset, "__getitem__", None)):
        raise DataError(
            f"{dataset!r:.80} was found ({kind}); a dataset with __getitem__ and __len__ was expected, or tensors, "
            f"arrays, a DataLoader, or a stream that can be iterated over"
        )
    if not isinstance(dataset, Sized):
        raise DataError(
            f"a {kind} without __len__ was found; a dataset that says how many samples it has was expected, as batches "
            f"are put together of their numbers"
        )
    return len(dataset), SampleReader(dataset, collate)


def _check_numbers(batch_size: Any, seed: Any, workers: Any, prefetch: Any) -> None:
    """Raise DataError for numbers that do not fit."""
    for name, value, least in (
        ("batch_size", batch_size, 1), ("seed", seed, 0), ("workers", workers, 0), ("prefetch", prefetch, 1),
    ):  # fmt: skip
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise DataError(f"{name}={value!r} was found; a whole number from {least} on was expected")


def _pins() -> bool:
    """Whether batches are read into pinned memory: where the rank has a GPU."""
    return torch.cuda.is_available()
