"""``flow.data.loader``: make a data source of a dataset, or of a ``DataLoader`` that exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from actorflow.data.arrays import arrays_of
from actorflow.data.bucket_order import BucketOrder
from actorflow.data.data_source import DataSource
from actorflow.data.existing import SamplerOrder, options_of, refuse_distributed
from actorflow.data.lengths import RowLengths, lengths_of
from actorflow.data.order import ShuffledOrder
from actorflow.data.padding import SamplePadder
from actorflow.data.reading import SampleReader
from actorflow.data.sample_source import SampleSource
from actorflow.data.streams import batches_of, is_stream
from actorflow.data.workers import WorkerOptions, map_in_workers
from actorflow_compiler.core.errors import DataError
from actorflow_compiler.core.user_code import UserLines

__all__ = ["loader"]

_lines = UserLines()


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
    buckets: Sequence[int] | None = None,
    lengths: Sequence[int] | Callable[[int], int] | None = None,
    padding: float | Mapping[str, float] = 0,
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

    ``workers`` processes on each rank read ``prefetch`` batches ahead (default: two each); without any, the script's
    own process reads when a job is called.  ``pin_memory`` puts what they read into pinned memory (default: where the
    rank has a GPU).  Random numbers that a sample draws depend on ``seed``, the epoch and its place in it alone.

    ``buckets`` are for samples of variable length: tensors, arrays and lists of numbers in a sample whose dim 0 is as
    long as the sample are padded to the smallest bucket that holds it, and all rows of a batch are of one bucket, so
    that batches have a few shapes.  Rows go to their bucket in the order of the epoch; a batch is given when its bucket
    has ``batch_size`` rows, and what is left at the end are its last, short batches (dropped with ``drop_last``).
    ``lengths`` are those of the samples, or a function that returns that of a sample for its index (default: the
    dataset's ``lengths``; else the ranks read each sample once, together, with a note).  ``padding`` is a number, or
    numbers by path in the sample: ``{"labels": -100}``, 0 elsewhere.  ``collate`` gets padded samples.  A position
    within an epoch goes on with the same ``batch_size`` only.

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
            "drop_last": drop_last or None, "collate": collate, "buckets": buckets, "lengths": lengths,
            "padding": padding or None,
        }.items()
        if value is not None
    }  # fmt: skip
    _check_numbers(batch_size, seed, workers, prefetch)
    pins = _pins() if pin_memory is None else pin_memory
    if is_stream(dataset):
        if odd := [name for name in ("buckets", "lengths", "padding") if name in given]:
            raise DataError(
                f"{', '.join(odd)} was given for a {type(dataset).__qualname__}, which is iterated over, so that the "
                f"lengths of its samples are not known; expected: a dataset with __getitem__ and __len__, or a stream "
                f"that pads its samples itself"
            )
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
    options = WorkerOptions(workers or 0, prefetch or 2 * (workers or 1), pins)
    if buckets is not None:
        base = ShuffledOrder(_count(dataset), batch_size or 1, shuffle, seed, drop_last)
        return _bucketed(dataset, collate, base, options, whole, _checked_buckets(buckets), lengths, padding)
    for name in ("lengths", "padding"):
        if name in given:
            raise DataError(
                f"{name}={given[name]!r:.60} was found without buckets=; expected: buckets=(128, 256), say, the sizes "
                f"to which samples are padded, beside it"
            )
    length, reader = _rows_of(dataset, collate)
    order = ShuffledOrder(length, batch_size or 1, shuffle, seed, drop_last)
    return SampleSource(reader, order, options, whole)


def _bucketed(
    dataset: Any,
    collate: Callable[[list[Any]], Any] | None,
    base: ShuffledOrder,
    options: WorkerOptions,
    whole: bool,
    buckets: tuple[int, ...],
    lengths: Any,
    padding: Any,
) -> DataSource:
    """A source of samples of variable length."""
    for value in padding.values() if isinstance(padding, Mapping) else [padding]:
        if not isinstance(value, int | float):
            raise DataError(
                f"padding={padding!r:.60} was found; a number was expected, or a dictionary of numbers by their path "
                f"in the sample: {{'labels': -100}}"
            )
    name = f"the loader of {_lines.here() or 'the script'}"
    known, function = lengths_of(lengths, dataset)
    if known is not None:
        found = RowLengths(name, base.length, known)
    elif function is not None:
        found = RowLengths(name, base.length, None, function, "lengths= is called once for each sample")
    else:
        in_memory = type(dataset) in (list, tuple)  # reading costs nothing
        how = (
            f"each of its {base.length:,} samples is read once, to find its length (spare that: pass lengths=, a "
            f"sequence or a function of the index, or give the dataset an attribute lengths)"
        )
        measuring = SampleReader(dataset, None)
        workers = options.workers and not in_memory
        over = partial(map_in_workers, dataset=dataset, options=options, name=name) if workers else map
        found = RowLengths(name, base.length, None, measuring.sizes, "" if in_memory else how, over, dataset)
    padder = SamplePadder(buckets, found, padding)
    return SampleSource(SampleReader(dataset, collate, padder), BucketOrder(base, buckets, found), options, whole)


def _checked_buckets(buckets: Any) -> tuple[int, ...]:
    """Buckets, smallest first.  Raises DataError for what are no sizes."""
    found = tuple(buckets) if isinstance(buckets, Iterable) and not isinstance(buckets, str) else ()
    sizes = [size for size in found if isinstance(size, int) and not isinstance(size, bool) and size > 0]
    if not sizes or len(sizes) != len(found) or len({*sizes}) != len(sizes):
        raise DataError(
            f"buckets={buckets!r:.60} was found; different whole numbers from 1 on were expected, the sizes to which "
            f"samples are padded: buckets=(64, 128, 256)"
        )
    return tuple(sorted(sizes))


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
    return _count(dataset), SampleReader(dataset, collate)


def _count(dataset: Any) -> int:
    """The number of samples.  Raises DataError for what is no map-style dataset."""
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
    return len(dataset)


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
