"""Streams as sources: loaders and iterables that give whole batches, one after the other, on every rank."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from actorflow.data.counted import CountedSource, PiecesRead
from actorflow.data.data_source import DataSource, tell_once
from actorflow.data.element_random import ElementRandom
from actorflow.data.existing import refuse_distributed
from actorflow.data.open_stream import OpenStream, StatePair, as_one_rank, tell_epoch
from actorflow.data.reading import dtype_text
from actorflow.data.structure import as_tensor, take_apart
from actorflow.session.process import current, script_reads
from actorflow_compiler.core.errors import DataError

__all__ = ["StreamSource", "batches_of", "is_stream"]


class StreamSource(CountedSource):
    """A source that iterates over a stream of batches on every rank; see ``DataSource``."""

    def __init__(self, stream: Iterable[Any], kind: str, samples: Any = None, replay: bool = False) -> None:
        """``samples``: what gives the samples, where the stream puts them together in the script's own process."""
        super().__init__()
        self._stream, self._kind, self._samples = stream, kind, samples
        self._replay = replay
        self._random = ElementRandom(stream)
        self._opened: OpenStream | None = None
        self._resumes: Mapping[str, Any] | None = None  # a loaded state, until batches are given
        self._spent = False  # an iterator, which can be gone over once, has been

    def __len__(self) -> int:
        """The number of batches of a whole epoch; TypeError where it is not known."""
        if not isinstance(self._stream, Sized):
            raise TypeError(f"{self.name} has no length: {self._kind} does not say how many batches it gives")
        return len(self._stream)

    def __repr__(self) -> str:
        return f"<{self.name}: batches of {self._kind}>"

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch number ``epoch``, and tell the stream and its sampler where they take it."""
        super().set_epoch(epoch)
        for one in (self._stream, getattr(self._stream, "sampler", None), getattr(self._stream, "batch_sampler", None)):
            if one is not None and callable(tell := getattr(one, "set_epoch", None)):
                tell(epoch)

    # -- position --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position, the stream's own state where it has one, and random states at the beginning of the epoch."""
        state = super().state_dict()
        if self._resumes is not None:
            return {**state, **{key: self._resumes.get(key) for key in ("stream", "start")}}
        opened = self._opened
        if opened is None:
            return {**state, "stream": None, "start": self._random.saved()}
        own = opened.own_state()
        if own is not None and self._batch == 0 and own[0] == "iterator":
            own = None  # the next epoch has an iterator of its own
        stream = None
        if own is not None:
            stream = {"of": own[0], "kind": self._kind, "workers": self._workers, "state": own[1]}
        return {**state, "stream": stream, "start": opened.start if self._batch else self._random.saved()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position: the next batch is the one that would have come.

        The stream is given its own state, if it was saved with one; else the batches before are read and passed over.
        Raises DataError for the state of another kind of stream.
        """
        self._need(state, "epoch", "batch", "position")
        stream = state.get("stream")
        if stream is not None and stream["kind"] != self._kind:
            raise DataError(
                f"{self.name}: a state of {stream['kind']} was loaded; this source has {self._kind}; expected: the "
                f"same stream as where it was saved"
            )
        super().load_state_dict(state)
        self._resumes = state

    def _move(self, epoch: int, batch: int, given: int) -> None:
        super()._move(epoch, batch, given)
        self._resumes = None

    @property
    def _workers(self) -> int | None:
        return getattr(self._stream, "num_workers", None)

    # -- batches ---------------------------------------------------------------------------------------

    def _open(self, epoch: int, batch: int) -> Iterator[Any]:
        resumes, self._resumes = self._resumes, None
        if self._spent:
            raise DataError(
                f"{self.name}: {self._kind} can be iterated over once, and a second epoch was asked for; expected: an "
                f"object whose __iter__ begins anew"
            )
        if current().context.cluster.world > 1 and (told := _ranks_told(self._stream)):
            raise DataError(
                f"{self.name}: {self._kind} gives a share of its samples ({told}), and every rank reads it "
                f"whole; expected: one that is not told of ranks when it is made, flow.data.sharded(stream) for one "
                f"that gives each rank its share, or flow.data.sharded(make, shards=...)"
            )
        tell_epoch(self._stream, epoch)
        with as_one_rank():
            self._opened = opened = self._begun(epoch, batch, resumes)
        iterator = getattr(opened.iterator, "samples", opened.iterator)
        self._spent = iterator is self._stream or iterator is self._samples
        return self._agreed(opened, epoch, batch)

    def _begun(self, epoch: int, batch: int, resumes: Mapping[str, Any] | None) -> OpenStream:
        """Open the stream before a batch."""
        start = None if resumes is None else resumes.get("start")
        own = None if resumes is None else resumes.get("stream")
        if own is not None and (why := self._why_replay()):
            if batch:
                tell_once(f"{self.name} {why}")
            own = None
        if own is not None:
            with self._random.aside(own=False):
                with suppress(ValueError):  # its state may hold those of other generators
                    if start is not None:
                        self._random.put_back(start)
                opened = self._taken_up(own, epoch, batch)
            opened.start = start
            if batch == 0:
                opened.or_anew = lambda: iter(self._stream)  # some streams have nothing more after the state of an end
            return opened
        if start is not None:
            with self._random.aside(own=False):
                try:
                    self._random.put_back(start)
                except ValueError as error:
                    raise DataError(f"{self.name}: the stream of the saved position drew otherwise: {error}") from None
                if batch:
                    return self._passed_over(epoch, batch, start)
        elif batch:
            return self._passed_over(epoch, batch, self._random.saved())
        start = self._random.saved()
        return OpenStream(self._stream, self._samples, iter(self._stream), start)

    def _why_replay(self) -> str:
        if self._replay:
            return "passes over what was given, as replay=True says"
        source = self._samples if self._samples is not None else getattr(self._stream, "dataset", self._stream)
        if _has_shuffle_buffer(source):
            return (
                "has a buffer that shuffles, whose samples are not in its state: what was given is read and passed "
                "over, so that none is lost"
            )
        return ""

    def _taken_up(self, own: Mapping[str, Any], epoch: int, batch: int) -> OpenStream:
        """Open the stream with its own state."""
        try:
            if own["of"] == "iterator":
                opened = OpenStream(self._stream, self._samples, iter(self._stream), None)
                pair = opened.pair("iterator")
            else:
                opened = OpenStream(self._stream, self._samples, None, None)
                pair = opened.pair(own["of"])
            if pair is None:
                raise TypeError(f"its {own['of']} has no method to load a state")
            pair.put(own["state"])
            if opened.iterator is None:
                opened.begin()
        except Exception as error:
            saved, now = own.get("workers"), self._workers
            why = f"it was saved with {saved} workers and has {now}" if saved != now else "it may have changed"
            raise DataError(
                f"{self.name}: {self._kind} does not take up its own state of batch {batch} of epoch {epoch}: {why} "
                f"({type(error).__name__}: {str(error) or 'no message'}); expected: the stream as it was saved, with "
                f"as many workers; or pass replay=True to flow.data.loader: what was given is read and passed over"
            ) from error
        return opened

    def _passed_over(self, epoch: int, batch: int, start: Mapping[str, Any]) -> OpenStream:
        tell_once(f"{batch} batches of {self.name} are read and passed over, to go on in epoch {epoch}")
        iterator = iter(self._stream)
        for passed in range(batch):
            try:
                next(iterator)
            except StopIteration:
                raise DataError(
                    f"{self.name}: epoch {epoch} of {self._kind} ended after {passed} batches; {batch} had been given "
                    f"when its state was saved; expected: the same stream"
                ) from None
        return OpenStream(self._stream, self._samples, iterator, start)

    def _agreed(self, opened: OpenStream, epoch: int, batch: int) -> Iterator[Any]:
        """The batches, of which ranks compare the first, and their number."""

        def taken(number: int) -> Any:
            with script_reads(PiecesRead(self.name, f"batch {number} of epoch {epoch}")):
                return next(opened, _NOTHING)

        compared = current().context.cluster.world > 1
        for number in itertools.count(batch):
            found = taken(number)
            if compared and number == batch:
                what = "no batch" if found is _NOTHING else _contents(found)
                self._compare(f"batch {number} of epoch {epoch}", what)
            elif compared and found is _NOTHING:
                self._compare(f"the end of epoch {epoch}", f"{number} batches")
            if found is _NOTHING:
                return
            yield found

    def _compare(self, of: str, mine: str) -> None:
        """Raise DataError where ranks have different contents."""

        def differing(every: Sequence[bytes]) -> bytes:
            said = [one.decode() for one in every]
            other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
            if other is None:
                return b""
            return f"of {of}, rank 0 has {said[0]}; rank {other} has {said[other]}".encode()

        if said := self._decided(of, mine.encode(), differing).decode():
            raise DataError(
                f"{self.name}: ranks got different batches of {self._kind}: {said}; expected: the same whole batches "
                f"on all ranks.  A stream that takes a share by itself (by RANK and WORLD_SIZE when it is made, or by "
                f"torch.distributed) must be told that there is one rank (MosaicML: replication=<ranks>), or be passed "
                f"to flow.data.sharded(stream); shares that do not depend on ranks: flow.data.sharded(make, "
                f"shards=...).  A stream that shuffles needs a seed that is equal on all ranks"
            )


_NOTHING = object()


class _Collated:
    """Batches of the samples of a stream."""

    def __init__(self, samples: Iterable[Any], size: int, drop_last: bool, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._size, self._drop_last, self._collate = samples, size, drop_last, collate

    def __iter__(self) -> Iterator[Any]:
        return _CollatedIteration(iter(self.dataset), self._size, self._drop_last, self._collate)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream of samples."""
        tell_epoch(self.dataset, epoch)


class _SizedCollated(_Collated):
    """Batches of a stream that says how many samples it has."""

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self._size)  # type: ignore[arg-type]
        return whole + (rest > 0 and not self._drop_last)


class _CollatedIteration(Iterator[Any]):
    """One epoch of batches; no sample is taken before the batch that it is in."""

    def __init__(self, samples: Iterator[Any], size: int, drop_last: bool, collate: Any) -> None:
        self.samples, self._size, self._drop_last, self._collate = samples, size, drop_last, collate

    def __next__(self) -> Any:
        taken = list(itertools.islice(self.samples, self._size))
        if not taken or (self._drop_last and len(taken) < self._size):
            raise StopIteration
        return self._collate(taken)


class _Iterated(IterableDataset[Any]):
    """An iterable as torch's workers take it."""

    def __init__(self, stream: Iterable[Any]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)


def is_stream(value: Any) -> bool:
    """Whether a value is iterated over, not indexed: a loader with a state of its own or of a stream, or a stream."""
    if isinstance(value, DataLoader):
        return value.batch_sampler is None or isinstance(value.dataset, IterableDataset) or _has_own_state(value)
    if isinstance(value, IterableDataset):
        return True
    if isinstance(value, str | bytes | type | Mapping | set | frozenset | Tensor | nn.Module | DataSource):
        return False
    indexed = callable(getattr(value, "__getitem__", None)) and isinstance(value, Sized)
    return callable(getattr(value, "__iter__", None)) and not indexed


def batches_of(
    stream: Any,
    options: Mapping[str, Any],
    batch_size: int | None,
    workers: int,
    prefetch: int | None,
    pin_memory: bool,
    seed: int,
    drop_last: bool,
    collate: Callable[[list[Any]], Any] | None,
    replay: bool,
) -> StreamSource:
    """The source of a stream; ``options`` are those that were passed, for messages.

    Raises DataError for options that do not fit.
    """
    kind = f"a {type(stream).__qualname__}"
    if options.get("shuffle"):
        raise DataError(
            f"shuffle=True was given for {kind}, which is iterated over in its own order; expected: a stream that "
            f"shuffles by itself with a seed, or a dataset with __getitem__ and __len__"
        )
    if isinstance(stream, DataLoader):
        if options:
            raise DataError(
                f"{kind} was given together with {', '.join(options)}; it is taken over as it is: leave them out, or "
                f"pass its dataset: flow.data.loader(existing.dataset, ...)"
            )
        refuse_distributed(stream)
        if _has_own_state(stream) and not isinstance(stream.dataset, IterableDataset):
            tell_once(
                f"every rank reads whole batches of {kind}, as its position is its own; of flow.data.loader("
                f"existing.dataset, batch_size=...) each reads only its rows, and resumes with other workers, too"
            )
        streamed = isinstance(stream.dataset, IterableDataset) and not stream.num_workers
        return StreamSource(stream, kind, stream.dataset if streamed else None, replay)
    refuse_distributed(stream)
    if (collate is not None or drop_last) and batch_size is None:
        raise DataError(
            f"{' and '.join(options)} was given for {kind} without batch_size; a stream without it gives batches: pass "
            f"batch_size, or leave it out"
        )
    if workers:
        if not isinstance(stream, IterableDataset) and workers > 1:
            raise DataError(
                f"workers={workers} was given for {kind}: each worker would give all of its samples; expected: a torch "
                f"IterableDataset that takes a share by torch.utils.data.get_worker_info(), or at most one worker"
            )
        dataset = stream if isinstance(stream, IterableDataset) else _Iterated(stream)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size,
            num_workers=workers,
            collate_fn=collate,
            drop_last=drop_last,
            pin_memory=pin_memory,
            prefetch_factor=None if prefetch is None else -(-prefetch // workers),
            generator=torch.Generator().manual_seed(seed),
        )
        return StreamSource(loader, kind, None, replay)
    if batch_size is None:
        return StreamSource(stream, kind, None, replay)
    of = _SizedCollated if isinstance(stream, Sized) else _Collated
    return StreamSource(of(stream, batch_size, drop_last, collate or default_collate), kind, stream, replay)


def _has_own_state(loader: Any) -> bool:
    return StatePair.of(loader) is not None


def _has_shuffle_buffer(stream: Any, depth: int = 8) -> bool:
    """Whether a Hugging Face stream shuffles in a buffer: its state does not hold what is in it."""
    if stream is None or depth == 0:
        return False
    if "Shuffled" in type(stream).__name__ and hasattr(stream, "buffer_size"):
        return True
    inner = [getattr(stream, name, None) for name in ("_ex_iterable", "ex_iterable")]
    inner += list(getattr(stream, "ex_iterables", None) or ())
    return any(_has_shuffle_buffer(one, depth - 1) for one in inner)


def _ranks_told(stream: Any) -> str:
    """Where a stream keeps a number of ranks above one, among which it shares its samples; empty if nowhere."""
    holders = {"": stream, "dataset.": getattr(stream, "dataset", None)}
    for at, holder in [*holders.items()]:
        holders |= {f"{at}{name}.": value for name, value in _attributes(holder).items() if "distributed" in name}
    for at, holder in holders.items():
        for name in ("world_size", "num_replicas"):
            count = _attributes(holder).get(name)
            if isinstance(count, int) and count > 1:
                return f"its {at}{name} is {count}"
    return ""


def _attributes(value: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(value, "__dict__", {})
    return found


def _contents(batch: Any) -> str:
    """The tensors of a batch with their shapes, and a checksum of their contents."""
    found, said = 0, []
    for path, leaf in take_apart(batch)[1]:
        value = as_tensor(leaf)
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            bits = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found = zlib.crc32(bits.numpy().tobytes(), found)
            said.append(f"{path or 'it'} {dtype_text(value.dtype)}[{','.join(map(str, value.shape))}]")
        elif isinstance(value, str | int | float | bool | bytes | np.generic) or value is None:
            found = zlib.crc32(repr(value).encode(), found)
    return f"{', '.join(said) or 'a batch'} with contents {found:08x}"
