"""Sources in shards: each gives the same part of every batch, and a rank opens those that its part of a plan needs."""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actorflow.data.counted import CountedSource, PiecesRead
from actorflow.data.data_source import DataSource, tell_once
from actorflow.data.element_random import ElementRandom
from actorflow.data.open_stream import OpenStream, StatePair, as_one_rank, tell_epoch
from actorflow.data.reading import BatchTemplate, LeafSpec, raised, said_of
from actorflow.data.state_bytes import from_bytes, to_bytes
from actorflow.data.structure import as_tensor, take_apart
from actorflow.session.process import current, script_reads
from actorflow.standins.logical_batch import BatchTensor
from actorflow_compiler.core.errors import DataError
from actorflow_compiler.core.runs import Runs, length
from actorflow_compiler.core.units import rows_text

__all__ = ["ShardSource", "sharded"]

_LAPSE = 8  # batches that a shard stays open without being needed


def sharded(
    make: Callable[..., Iterable[Any]] | Iterable[Any],
    shards: int | None = None,
    *,
    batches: int | None = None,
    stop: str = "error",
    seed: int = 0,
    elastic: bool = False,
) -> DataSource:
    """Make a source of shards, of which each rank reads those that its part of a plan needs.

    ``make(shard, shards)`` returns the batches of one shard: an iterable of tensors or NumPy arrays in lists, tuples or
    dictionaries, all of the same shapes, [rows, ...].  Batch i of the source is the concatenation of the i-th batches
    of all shards, in order: [shards × rows, ...].  So it is the same under every plan and number of ranks.  ``make`` is
    called anew for each epoch, with ``epoch=`` if it has such a parameter.  On resume, batches that were given are
    passed over, unless it has a parameter ``start=`` (a number of batches), or what it returns has ``state_dict()`` and
    ``load_state_dict()``.  Shards are read in the script's thread when a batch or a job asks for them, with the global
    random generators seeded by ``seed``, epoch, shard and batch.

    Without ``shards``, ``make`` is a loader that gives this rank's share of each batch already, such as one of MosaicML
    Streaming: one that is told by ``RANK`` and ``WORLD_SIZE`` which.  This needs a plan in which every rank takes as
    many rows as its loader gives, as with data parallelism over all ranks; which rows of a batch are a rank's follows
    from the plan.  It resumes with the same number of ranks; with another one, if ``elastic`` says that the loader's
    state does not depend on it.

    ``batches`` is the number of batches of an epoch, where it is known: then ranks need not tell each other at each
    batch whether there is one.  A shard that ends before others is a DataError, or with ``stop="shortest"`` the end of
    the epoch.  A batch of another shape, and a shard that raises, are a DataError that names the shard and the batch.

    >>> def make(shard, shards):
    ...     return DataLoader(Lines(files[shard::shards]), batch_size=8, drop_last=True)
    >>> for tokens in flow.data.sharded(make, shards=8):  # batches of 64 rows
    ...     loss = train_step(tokens)
    """
    for name, value in (("shards", shards), ("batches", batches)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise DataError(f"{name}={value!r} was found; a whole number from 1 on was expected")
    if stop not in ("error", "shortest"):
        raise DataError(f"stop={stop!r} was found; 'error' or 'shortest' was expected")
    kind = type(make).__qualname__
    if shards is None:
        if isinstance(make, type) or not callable(getattr(make, "__iter__", None)):
            raise DataError(
                f"a {kind} was given without shards=; expected: a loader that gives this rank's share of each batch, "
                f"or make(shard, shards) together with shards=8, for example"
            )
        if callable(getattr(make, "__next__", None)):
            raise DataError(f"a {kind} was given, which can be iterated over once; a loader was expected")
        return ShardSource(_Own(make), None, batches, stop, seed, elastic)
    if not callable(make):
        raise DataError(
            f"a {kind} was given with shards={shards}; make(shard, shards), which returns the batches of one shard, "
            f"was expected; a loader that gives each rank its own share is passed without shards="
        )
    return ShardSource(make, shards, batches, stop, seed, False)


class _Own:
    """A loader that gives this rank's share, in the form of ``make``."""

    def __init__(self, loader: Any) -> None:
        self.loader: Iterable[Any] = loader

    def __call__(self, shard: int, shards: int) -> Iterable[Any]:
        return self.loader


class ShardSource(CountedSource):
    """A source whose batches are put together of those of shards; see ``sharded``."""

    def __init__(
        self,
        make: Callable[..., Iterable[Any]],
        shards: int | None,
        batches: int | None,
        stop: str,
        seed: int,
        elastic: bool,
    ) -> None:
        super().__init__()
        self.make, self._given_shards, self.batches, self.stop, self.seed = make, shards, batches, stop, seed
        self._elastic = elastic
        self.own = make.loader if isinstance(make, _Own) else None
        if self.own is not None:
            _refuse_other_share(self.own)
        self.options = _options(make)
        self.random = ElementRandom()
        self.template: BatchTemplate | None = None  # without the number of rows
        self.rows = 0  # of a batch of one shard
        self.needed: dict[int, int] = {}  # shard → number of the last batch of which this rank was asked for it
        self.taken: Runs | None = None  # those of each batch that are this rank's share
        self._stated = False  # shards have states
        self._looked: set[str] = set()
        self._states: Mapping[str, Any] = {}  # of shards, that were loaded
        self._opened: _OpenEpoch | None = None

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return current().context.cluster.world if self._given_shards is None else self._given_shards

    def who(self, shard: int) -> str:
        """A shard, for messages."""
        return f"the loader of rank {shard}" if self.own is not None else f"shard {shard} of {self.shards}"

    def __len__(self) -> int:
        """The number of batches of a whole epoch; TypeError where it is not known."""
        if self.batches is None and isinstance(self.own, Sized):
            return len(self.own)
        if self.batches is None:
            raise TypeError(f"{self.name} has no length: pass batches= to flow.data.sharded where it is known")
        return self.batches

    def __repr__(self) -> str:
        return f"<{self.name}: {'shares of ranks' if self.own is not None else f'{self.shards} shards'}>"

    def tell_look(self, line: str) -> None:
        """Say once for each line that it makes this rank read whole batches."""
        if line not in self._looked:
            self._looked.add(line)
            tell_once(
                f"{line or 'the script'} looks at a batch of {self.name}, so every rank reads all {self.shards} "
                f"shards: do it in the job, and return what is wanted"
            )

    # -- position --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of shards where they have any; every rank must ask for it alike."""
        state = {**super().state_dict(), "shards": self.shards, "share": self.own is not None}
        if self._opened is None:
            return {**state, "states": dict(self._states)}
        found: dict[str, Any] = {}
        if self._stated:
            mine = to_bytes(self._opened.states(self._batch, self._within), f"the state of {self.name}")
            found = from_bytes(self._decided("the state", mine, _together))
        return {**state, "states": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position: the next batch is the one that would have come.

        Raises DataError for another number of shards, or of ranks where each has its own share.
        """
        self._need(state, "epoch", "batch", "position", "shards")
        shards, states = state["shards"], dict(state.get("states", {}))
        if bool(state.get("share")) != (self.own is not None) or (shards != self.shards and self.own is None):
            of = f"{shards} shares of ranks" if state.get("share") else f"{shards} shards"
            mine = f"{self.shards} {'shares of ranks' if self.own is not None else 'shards'}"
            raise DataError(
                f"{self.name}: a position in {of} was loaded, and this source has {mine}: rows would differ"
            )
        if shards != self.shards:
            if not self._elastic or not states:
                raise DataError(
                    f"{self.name}: a position in the shares of {shards} ranks was loaded on {self.shards}, whose "
                    f"loaders give other rows; expected: {shards} ranks; or flow.data.sharded(make, shards=...), which "
                    f"does not depend on ranks; or elastic=True, for a loader whose state does not (MosaicML Streaming)"
                )
            states = {str(shard): states[min(states)] for shard in range(self.shards)}
        super().load_state_dict(state)
        self._states = states

    def _move(self, epoch: int, batch: int, given: int) -> None:
        super()._move(epoch, batch, given)
        self._opened, self._states = None, {}

    def _open(self, epoch: int, batch: int) -> Iterator[Any]:
        states, self._states = self._states, {}
        if batch and not states and "start" not in self.options:
            tell_once(
                f"{batch} batches of each shard of {self.name} are read and passed over, to go on in epoch {epoch}"
                f"{'' if self.own is not None else ': make(shard, shards, start) can begin there'}"
            )
        before = self._opened
        live = {shard: batch for shard, last in self.needed.items() if before and before.number - last <= _LAPSE}
        self.needed = live
        self._opened = _OpenEpoch(self, epoch, batch, states)
        return self._opened

    # -- a word at each batch --------------------------------------------------------------------------

    def agree(self, number: int, mine: Mapping[str, Any]) -> dict[str, Any]:
        """What holds for all ranks of batch ``number``.  Raises DataError where shards do not fit together."""

        def decide(every: Sequence[bytes]) -> bytes:
            words = [json.loads(one) for one in every]
            return json.dumps(self._verdict(number, words)).encode()

        found: dict[str, Any] = json.loads(self._decided(f"batch {number}", json.dumps(mine).encode(), decide))
        if found["error"]:
            raise DataError(f"{self.name}: {found['error']}")
        if found["template"] is not None:
            self.template = BatchTemplate.from_json(found["template"])
            self.rows, self._stated = found["rows"], found["stated"]
        return found

    def _verdict(self, number: int, words: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ended = sorted({shard for word in words for shard in word["ended"]})
        going = sorted({shard for word in words for shard in word["going"]})
        error = next((word["error"] for word in words if word["error"]), "")
        if ended and going and self.stop == "error" and not error:
            error = (
                f"{self.who(ended[0])} ended after {number} batches, and {self.who(going[0])} has more; expected: as "
                f"many in all, or stop='shortest', or batches=<of an epoch> where shards go on for longer"
            )
        shapes = [(word["template"], word["rows"]) for word in words if word["template"] is not None]
        other = next((at for at, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is not None and not error:
            said = [f"{rows} rows of {BatchTemplate.from_json(template).text}" for template, rows in shapes]
            error = f"rank 0 gives {said[0]}, and rank {other} {said[other]}; equal batches on all ranks were expected"
        lengths = {word["length"] for word in words}
        if len(lengths) > 1 and None not in lengths and self.stop == "error" and not error:
            error = (
                f"the loaders of ranks give {', '.join(str(word['length']) for word in words)} batches; expected: as "
                f"many on all ranks, or stop='shortest', or batches=<of an epoch>"
            )
        template, rows = shapes[0] if shapes else (None, 0)
        stated = any(word["stated"] for word in words)
        length = None if None in lengths else min(lengths)
        return {
            "error": error, "end": bool(ended), "template": template, "rows": rows, "stated": stated, "length": length,
            "needed": sorted({shard for word in words for shard in word["needed"]}),
        }  # fmt: skip


class _OpenEpoch(Iterator[Any]):
    """An epoch, of which this rank has some shards open."""

    def __init__(self, source: ShardSource, epoch: int, batch: int, states: Mapping[str, Any]) -> None:
        self.source, self.epoch, self._states = source, epoch, states
        self.number = batch  # of the next batch
        self._readers: dict[int, _ShardReader] = {}
        self._given: weakref.WeakValueDictionary[int, ShardBatch] = weakref.WeakValueDictionary()
        self._total = source.batches
        self._over = False
        self._needed: list[int] = []  # shards that this rank's jobs need
        self._covered: frozenset[int] = frozenset()  # those that any rank's jobs need

    def __next__(self) -> Any:
        source, number = self.source, self.number
        if self._over or (self._total is not None and number >= self._total):
            raise StopIteration
        talks = source.template is None or self._total is None
        looked = self._looked_at(talks)
        parts: dict[int, list[Tensor]] = {}
        error = ""
        ended: list[int] = []
        for shard in looked:
            at = f"shard {shard} of batch {number} of epoch {self.epoch}"
            try:
                with script_reads(PiecesRead(source.name, at)):
                    part = self.part(shard, number)
            except DataError as failed:
                if not talks:
                    raise
                error = str(failed).removeprefix(f"{source.name}: ")
                break
            if part is None:
                ended.append(shard)
            else:
                parts[shard] = part
        if talks:
            template, rows = (None, 0)
            if source.template is None and parts and not error:
                shard = min(parts)
                try:
                    template, rows = _template(self._readers[shard].last, f"batch {number} of {source.who(shard)}")
                except DataError as failed:
                    error = str(failed)
            mine = {
                "error": error, "ended": ended, "going": [*parts], "rows": rows, "needed": self._needed,
                "template": None if template is None else template.to_json(),
                "stated": any(reader.stated for reader in self._readers.values()),
                "length": len(source.own) if isinstance(source.own, Sized) else None,
            }  # fmt: skip
            found = source.agree(number, mine)
            self._covered = frozenset(found["needed"])
            if self._total is None:
                self._total = found["length"]
            if found["end"] or (self._total is not None and number >= self._total):
                self._over = True
                raise StopIteration
        elif ended:
            raise DataError(f"{source.name}: {source.who(ended[0])} ended after {number} of {self._total} batches")
        batch = ShardBatch(self, number, parts)
        self._given[number] = batch
        self.number += 1
        return batch.content()

    def _looked_at(self, talks: bool) -> list[int]:
        """The shards of which the next batch is read now; others that are not needed any more are let go of."""
        source, cluster = self.source, current().context.cluster
        if source.own is not None:
            return [cluster.rank]
        shortest = source.stop == "shortest"  # then every shard is looked at by some rank
        live = {shard for shard, last in source.needed.items() if shortest or self.number - last <= _LAPSE}
        self._needed = sorted(live)
        if talks and cluster.rank == 0 and (not live or source.template is None):
            live.add(0)
        if talks and shortest:
            live.update({*range(cluster.rank, source.shards, cluster.world)} - self._covered)
        for shard in [*self._readers]:
            if shard not in live:
                del self._readers[shard]
        return sorted(live) if talks else []

    def part(self, shard: int, number: int) -> list[Tensor] | None:
        """The tensors of a batch of one shard; None if it has ended before.  Raises DataError."""
        reader = self._readers.get(shard)
        if reader is None or reader.number > number:
            fresh = _ShardReader(self.source, self.epoch, shard, number, self._states.get(str(shard)))
            if reader is None:
                self._readers[shard] = fresh
            reader = fresh
        return reader.read(number, self._keep)

    def states(self, batch: int, within: bool) -> dict[str, Any]:
        """The states of open shards, not behind a batch of this epoch, or of loaders at its end."""
        found = {}
        for shard, reader in self._readers.items():
            if within or batch:
                state = reader.state() if reader.number <= batch else None
            else:
                state = reader.state() if self.source.own is not None else None
                state = state and {**state, "batch": 0}
            if state is not None:
                found[str(shard)] = state
        return found

    def _keep(self, number: int, shard: int, leaves: Callable[[], list[Tensor]]) -> None:
        """Keep what is passed over, if the script still has that batch."""
        given = self._given.get(number)
        if given is not None and shard not in given.parts:
            given.parts[shard] = leaves()


class _ShardReader:
    """One shard that is iterated over.  Reading leaves the script's random numbers as they are."""

    def __init__(
        self, source: ShardSource, epoch: int, shard: int, batch: int, state: Mapping[str, Any] | None
    ) -> None:
        """Open it so that ``batch`` can be read.  Raises DataError."""
        self._source, self._epoch, self._shard = source, epoch, shard
        self.number = 0  # of the batch that comes next
        self.last: Any = None  # what it gave last
        self._ended = False
        options: dict[str, int] = {}
        if "epoch" in source.options:
            options["epoch"] = epoch
        if "start" in source.options:
            options["start"] = self.number = batch
            state = None
        if state is not None and state["batch"] > batch:
            state = None
        with source.random.aside():
            source.random.seed(source.seed, epoch, shard, 0)
            try:
                with as_one_rank() if source.own is None else nullcontext():
                    stream = source.make(shard, source.shards, **options)
                if "epoch" not in options:
                    tell_epoch(stream, epoch)
                self._opened = OpenStream(stream, None, None, None, alone=source.own is None)
                self._begin(stream, state)
            except Exception as error:
                taking = "" if state is None else ", with the state that it had when it was saved,"
                raise DataError(f"{source.name}: opening {source.who(shard)}{taking} raised {raised(error)}") from error

    def _begin(self, stream: Any, state: Mapping[str, Any] | None) -> None:
        opened = self._opened
        if state is not None and state["of"] == "loader":
            _pair(StatePair.of(stream)).put(state["state"])
        opened.begin()
        if state is not None and state["of"] == "iterator" and state["batch"]:
            _pair(opened.pair("iterator")).put(state["state"])
        if state is not None:
            self.number = state["batch"]
            if self.number == 0:
                opened.or_anew = lambda: iter(stream)  # the state is that of an end

    @property
    def stated(self) -> bool:
        """Whether it has a state."""
        return any(self._opened.pair(of) is not None for of in ("iterator", "loader"))

    def state(self) -> dict[str, Any] | None:
        """Its state, and how many batches it has given."""
        own = self._opened.own_state()
        return None if own is None else {"batch": self.number, "of": own[0], "state": own[1]}

    def read(self, number: int, keep: Callable[[int, int, Callable[[], list[Tensor]]], None]) -> list[Tensor] | None:
        """The tensors of a batch; those before it are given to ``keep``.  None behind the last one."""
        source = self._source
        while not self._ended:
            with source.random.aside():
                source.random.seed(source.seed, self._epoch, self._shard, self.number + 1)
                try:
                    batch = next(self._opened)
                except StopIteration:
                    self._ended = True
                    break
                except Exception as error:
                    at = f"batch {self.number} of epoch {self._epoch} of {source.who(self._shard)}"
                    raise DataError(f"{source.name}: reading {at} raised {raised(error)}") from error
            self.last = batch
            self.number += 1
            passed = self.number - 1
            if passed == number:
                return self._leaves(batch, passed)
            keep(passed, self._shard, partial(self._leaves, batch, passed))
        return None

    def _leaves(self, batch: Any, number: int) -> list[Tensor]:
        source = self._source
        structure, leaves = take_apart(batch)
        tensors = [as_tensor(leaf) for _, leaf in leaves]
        template = source.template
        if template is not None:
            fits = structure == template.structure and all(
                isinstance(tensor, Tensor)
                and (tuple(tensor.shape), tensor.dtype) == ((source.rows, *spec.shape), spec.dtype)
                for tensor, spec in zip(tensors, template.leaves, strict=True)
            )
            if not fits:
                said = "; ".join(
                    f"{path or 'it'}: {said_of(tensor)}" for (path, _), tensor in zip(leaves, tensors, strict=True)
                )
                raise DataError(
                    f"{source.name}: batch {number} of epoch {self._epoch} of {source.who(self._shard)} has {said}; "
                    f"{source.rows} rows of {template.text} were expected, as the first batch has them (a last short "
                    f"batch is left out by drop_last=True)"
                )
        return [_copy(tensor) for tensor in tensors if isinstance(tensor, Tensor)]


class ShardBatch:
    """One batch, of which the rows of any shards can be read."""

    def __init__(self, opened: _OpenEpoch, number: int, parts: dict[int, list[Tensor]]) -> None:
        self._opened, self._number, self.parts = opened, number, parts

    @property
    def size(self) -> int:
        """The number of rows."""
        return self._opened.source.rows * self._opened.source.shards

    @property
    def text(self) -> str:
        """See ``LogicalBatch``."""
        source = self._opened.source
        return f"{self._of} of {source.name} ({source.shards} shards)"

    @property
    def _of(self) -> str:
        return f"batch {self._number} of epoch {self._opened.epoch}"

    def content(self) -> Any:
        """The batch, as the script gets it."""
        template = self._opened.source.template
        assert template is not None
        leaves = [
            BatchTensor.of(self, at, (self.size, *spec.shape), spec.dtype) for at, spec in enumerate(template.leaves)
        ]
        return template.structure.put_together(leaves)

    def read(self, rows: Runs) -> PiecesRead:
        """See ``LogicalBatch``."""
        source = self._opened.source
        if source.own is not None:
            return self._share(rows)
        pieces = [
            (shard, max(lo - shard * source.rows, 0), min(hi - shard * source.rows, source.rows))
            for lo, hi in rows
            for shard in range(lo // source.rows, -(-hi // source.rows))
        ]
        text = f"{rows_text(rows)} of {self._of}"
        missing = any(shard not in self.parts for shard, _, _ in pieces)
        try:
            with script_reads(PiecesRead(source.name, text)) if missing else nullcontext():
                return PiecesRead(source.name, text, [(self._part(shard), lo, hi) for shard, lo, hi in pieces])
        except DataError as error:
            return PiecesRead(source.name, text, (), error)

    def look(self, leaf: int, line: str) -> Tensor:
        """See ``LogicalBatch``.  Raises DataError where this rank has only its own share."""
        source = self._opened.source
        if source.own is not None and source.shards > 1:
            raise DataError(
                f"{line or 'the script'} looks at a batch of {source.name}, of which this rank has only its own "
                f"share; expected: that it is only given to jobs, or flow.data.sharded(make, shards=...), of which any "
                f"rank can read all"
            )
        source.tell_look(line)
        return self.read(((0, self.size),)).leaf(leaf)

    def _part(self, shard: int) -> list[Tensor]:
        opened = self._opened
        opened.source.needed[shard] = max(self._number, opened.source.needed.get(shard, 0))
        part = self.parts.get(shard)
        if part is None:
            part = opened.part(shard, self._number)
            if part is None:
                source = opened.source
                why = "and others did not; expected: as many batches in all"
                if source.batches is not None:
                    why = f"and batches={source.batches} was given; expected: as many batches in each shard, or more"
                raise DataError(
                    f"{source.name}: {source.who(shard)} ended before batch {self._number} of epoch {opened.epoch}, "
                    f"{why}"
                )
            self.parts[shard] = part
        return part

    def _share(self, rows: Runs) -> PiecesRead:
        """This rank's share: which rows of the batch it is follows from what the first job takes."""
        source = self._opened.source
        rank = current().context.cluster.rank
        if length(rows) != source.rows or source.taken not in (None, rows):
            before = "" if source.taken is None else f" (and {rows_text(source.taken)} for another job)"
            raise DataError(
                f"{source.name}: this plan takes {rows_text(rows)}{before} on rank {rank}, whose loader gives "
                f"{source.rows} of {self.size} rows of each batch; expected: a plan in which each rank takes the "
                f"rows of its own share: data parallel over all {source.shards} ranks, and equal in all jobs; "
                f"for any other: flow.data.sharded(make, shards={source.shards}), where make(shard, shards) gives the "
                f"rows of a shard"
            )
        source.taken = rows
        return PiecesRead(source.name, f"{rows_text(rows)} of {self._of}", [(self.parts[rank], 0, source.rows)])


def _refuse_other_share(loader: Any) -> None:
    """Raise DataError for a loader whose share is not that of this rank."""
    cluster = current().context.cluster
    sampler = getattr(loader, "sampler", None)
    world, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    if world is not None and (world, rank) != (cluster.world, cluster.rank):
        raise DataError(
            f"a loader whose sampler gives the share of rank {rank} of {world} was found on rank {cluster.rank} of "
            f"{cluster.world}; the share of this rank was expected"
        )


def _together(every: Sequence[bytes]) -> bytes:
    """The states of shards that any rank has; of those that several have, the furthest."""
    found: dict[str, Any] = {}
    for one in every:
        for shard, state in from_bytes(one).items():
            if shard not in found or found[shard]["batch"] < state["batch"]:
                found[shard] = state
    return to_bytes(found, "shards")


def _options(make: Any) -> frozenset[str]:
    """Which of the optional parameters ``make`` has."""
    try:
        return frozenset(inspect.signature(make).parameters) & {"start", "epoch"}
    except (TypeError, ValueError):
        return frozenset()


def _template(batch: Any, where: str) -> tuple[BatchTemplate, int]:
    """What the batches of shards look like, and their number of rows.  Raises DataError, without a name."""
    structure, leaves = take_apart(batch)
    tensors = [(path, as_tensor(leaf)) for path, leaf in leaves]
    rows = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None for _, leaf in tensors}
    (count, *others) = rows or {None}
    if others or not count or any(t.layout != torch.strided or t.is_quantized or t.is_nested for _, t in tensors):
        said = "; ".join(f"{path or 'it'}: {said_of(leaf)}" for path, leaf in tensors) or "nothing"
        raise DataError(
            f"{where} has {said}; expected: dense tensors or arrays, in lists, tuples or dictionaries, all of the same "
            f"number of rows"
        )
    specs = tuple(LeafSpec(path, tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in tensors)
    return BatchTemplate(structure, specs), int(count)


def _copy(tensor: Tensor) -> Tensor:
    """A tensor that stays as it is when the shard fills the same memory with its next batch."""
    return torch.empty_like(tensor, pin_memory=tensor.is_pinned(), requires_grad=False).copy_(tensor.detach())


def _pair(found: StatePair | None) -> StatePair:
    if found is None:
        raise TypeError("it has no method to load a state")
    return found
