"""What the ranks of one machine put into shared memory for a collective, and where each finds what it needs there.

All that one rank puts in for another is a stream of bytes: the boxes of its tensors one after the other, in a run for
each dtype.  Ranks that get the same boxes read the same stream.  Rank and reader compute the same stream from the boxes
that the plan tells each of them, so nothing but where it begins has to be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.transport.redistribution import cut, cut_like, dtype_of, view_of
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.plan.grids import Grid, grids
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Exchange, TensorSpec

__all__ = ["ALIGN", "Assembly", "Contribution", "FlatSums", "Part", "Run", "Stream", "add_terms", "contribution", "put"]

ALIGN = 64  # bytes; streams and runs begin at multiples of it
BLOCK = 1 << 18  # bytes; sums of more than two terms are made in blocks of this size, which stay in a core's cache
JOINED = 1 << 15  # bytes; tensors smaller than this on average are copied by one op instead of one each
# torch adds no unsigned integers but uint8; those of two's complement have the same bits
_ADDED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True, slots=True)
class Part:
    """The boxes of a tensor that form a grid, within a run."""

    tensor: int  # its number in the collective
    grid: Grid
    start: int  # number of its first element in the run
    count: int  # elements


@dataclass(frozen=True, slots=True)
class Run:
    """The boxes of one dtype in a stream, end to end."""

    dtype: torch.dtype
    start: int  # byte of the stream
    count: int  # elements
    parts: tuple[Part, ...]

    @property
    def is_short(self) -> bool:
        """Whether it has several parts that are better copied by one op than each by its own."""
        return len(self.parts) > 1 and self.count * self.dtype.itemsize < JOINED * len(self.parts)

    def within(self, first: int, last: int) -> Iterator[tuple[Part, int, int]]:
        """The parts that have elements in a range of the run, each with that range (start, stop) of its elements."""
        for part in self.parts:
            start, stop = max(first, part.start), min(last, part.start + part.count)
            if start < stop:
                yield part, start - part.start, stop - part.start


@dataclass(frozen=True, slots=True)
class Stream:
    """What one rank puts in for some others."""

    runs: tuple[Run, ...]
    nbytes: int  # a multiple of ``ALIGN``

    @classmethod
    def of(cls, boxes: Sequence[Sequence[Box]], dtypes: Sequence[torch.dtype]) -> Stream:
        """The stream of some boxes of each tensor; boxes without elements are left out."""
        runs: list[Run] = []
        at = 0
        for dtype in dict.fromkeys(dtypes):
            parts: list[Part] = []
            count = 0
            for tensor, (of, own) in enumerate(zip(boxes, dtypes, strict=True)):
                for grid in grids(of) if own == dtype else ():
                    if size := numel(grid.shape):
                        parts.append(Part(tensor, grid, count, size))
                        count += size
            if parts:
                runs.append(Run(dtype, at, count, tuple(parts)))
                at += -(-count * dtype.itemsize // ALIGN) * ALIGN
        return cls(tuple(runs), at)

    def between(self, low: int, high: int) -> Iterator[tuple[Run, int, int]]:
        """The runs that have bytes in a range of the stream, with that range (first, last) of their elements."""
        for run in self.runs:
            size = run.dtype.itemsize
            first = max(0, low - run.start) // size
            last = min(run.count, (high - run.start) // size)
            if first < last:
                yield run, first, last


@dataclass(frozen=True, slots=True)
class Contribution:
    """One rank's side of a collective: the streams that it puts in, one after the other, and those that it reads.

    ``sums``: every member puts in a term for all of each output, and the terms are added.  ``whole``: besides, the
    outputs are equal on all members, so that each may add up a share of them for all.
    """

    comm: Collective
    me: int  # position in the group
    specs: tuple[TensorSpec, ...]  # of the outputs
    exchanges: tuple[Exchange, ...]
    leaving: tuple[Stream, ...]
    stream_for: tuple[int, ...]  # for each member, the number of its stream in ``leaving``; -1: it gets none
    coming: tuple[Stream, ...]  # from each member
    sums: bool
    whole: bool

    @property
    def nbytes(self) -> int:
        """The bytes of all streams that the rank puts in."""
        return sum(stream.nbytes for stream in self.leaving)

    @property
    def reads_own(self) -> bool:
        """Whether it reads its own terms where it has put them; else it reads them where they were.

        It has put them there for others, or they are so short that one addition of all is worth the copy.
        """
        runs, own = self.coming[self.me].runs, self.stream_for[self.me]
        if all(len(run.parts) == 1 for run in runs):
            return False
        return self.stream_for.count(own) > 1 or any(run.is_short for run in runs)


def contribution(comm: Collective, rank: int, specs: Sequence[TensorSpec]) -> Contribution:
    """One rank's side of a collective; ``specs`` are those of its outputs."""
    me, size = comm.ranks.index(rank), len(comm.ranks)
    exchanges = comm.exchanges
    reduces = comm.kind == CollectiveKind.ALL_REDUCE
    if reduces:
        boxes = [((_all(spec),),) * size for spec in specs]
        exchanges = tuple(Exchange(of, of, add=True) for of in boxes)
    dtypes = [dtype_of(spec.dtype) for spec in specs]
    adds = any(exchange.add for exchange in exchanges)
    leaving: dict[tuple[tuple[Box, ...], ...], int] = {}
    stream_for = []
    for member in range(size):
        wanted = tuple(exchange.send[member] for exchange in exchanges)
        # what a rank keeps for itself counts where terms are added: then the streams of all members have equal sizes
        stream_for.append(leaving.setdefault(wanted, len(leaving)) if member != me or adds else -1)
    whole = all(
        exchange.add and all([box for box in of if numel(box.size)] == _boxes(spec) for of in exchange.receive)
        for exchange, spec in zip(exchanges, specs, strict=True)
    )
    return Contribution(
        comm,
        me,
        tuple(specs),
        exchanges,
        tuple(Stream.of(boxes, dtypes) for boxes in leaving),
        tuple(stream_for),
        tuple(Stream.of([exchange.receive[m] for exchange in exchanges], dtypes) for m in range(size)),
        sums=whole,
        whole=whole and reduces,
    )


def _all(spec: TensorSpec) -> Box:
    return Box((0,) * len(spec.shape), spec.shape)


def _boxes(spec: TensorSpec) -> list[Box]:
    return [_all(spec)] if numel(spec.shape) else []


def put(
    place: Tensor, run: Run, first: int, last: int, tensors: Sequence[Tensor], flats: dict[tuple[int, Grid], Tensor]
) -> None:
    """Copy elements ``first`` to ``last`` of a run of ``tensors`` to ``place``, a flat tensor of as many elements.

    ``flats`` keeps the flat copies of grids that are copied in several ranges.
    """
    if (first, last) == (0, run.count):
        views = [view_of(tensors[part.tensor], part.grid) for part in run.parts]
        if run.is_short and all(view.is_contiguous() for view in views):
            torch.cat([view.view(-1) for view in views], out=place)
            return
        for part, view in zip(run.parts, views, strict=True):
            place[part.start : part.start + part.count].view(part.grid.shape).copy_(view)
        return
    at = 0
    for part, start, stop in run.within(first, last):
        flat = flats.get((part.tensor, part.grid))
        if flat is None:
            flat = flats[part.tensor, part.grid] = view_of(tensors[part.tensor], part.grid).reshape(-1)
        place[at : at + stop - start].copy_(flat[start:stop])
        at += stop - start


def add_terms(place: Tensor, terms: Sequence[Tensor]) -> None:
    """Write the sum of flat ``terms``, at least one, to ``place``, added in their order.

    The result depends on the terms alone, bit by bit: not on how they are cut, and not on who adds them.
    """
    as_other = _ADDED_AS.get(place.dtype)
    if as_other is not None:
        place, terms = place.view(as_other), [term.view(as_other) for term in terms]
    if len(terms) == 1:
        place.copy_(terms[0])
        return
    if len(terms) == 2:
        torch.add(terms[0], terms[1], out=place)
        return
    step = max(1, BLOCK // place.dtype.itemsize)
    for start in range(0, place.numel(), step):
        block = place[start : start + step]
        torch.add(terms[0][start : start + step], terms[1][start : start + step], out=block)
        for term in terms[2:]:
            block.add_(term[start : start + step])


class Assembly:
    """The outputs of one collective whose boxes are placed or added one by one.

    Boxes from all members, ``contribution.coming``, may come in ``ranges``.  Then terms are kept until all have come,
    as those of one member may come before those of another: they are added in the order of the group.  ``into`` has
    tensors, by output, in which outputs of boxes that are only placed are made; the others are made anew.
    """

    def __init__(self, side: Contribution, tensors: Sequence[Tensor], ranges: bool, into: Mapping[int, Tensor]) -> None:
        self._side, self._ranges = side, ranges
        self._given: list[int] = []  # outputs that are made in tensors of the caller
        self._fresh: list[bool] = []  # by output: the first member's boxes are copied, as they cover all of it
        self._outputs: list[Tensor] = []
        self._waiting: dict[tuple[int, Part], Tensor] = {}  # (member, part) → what has come of it
        self._terms: list[tuple[int, int, Grid, Tensor]] = []  # that are kept: (member, output, grid, term)
        for i, (exchange, spec) in enumerate(zip(side.exchanges, side.specs, strict=True)):
            sizes = [sum(numel(box.size) for box in boxes) for boxes in exchange.receive]
            covered = (sizes[0] if exchange.add else sum(sizes)) == numel(spec.shape)
            self._fresh.append(exchange.add and covered)
            given = into.get(i)
            if given is not None and covered and not exchange.add and _fits(given, spec, tensors):
                self._given.append(i)
                self._outputs.append(given)
                continue
            make = torch.empty if covered else torch.zeros
            self._outputs.append(make(spec.shape, dtype=dtype_of(spec.dtype), device="cpu"))
        self._tensors = tensors

    def spare(self) -> None:
        """Write no more into tensors of the caller: nobody wants the outputs, which may be anything."""
        for i in self._given:
            self._outputs[i] = torch.empty_like(self._outputs[i])

    def take_own(self) -> None:
        """Place or add what this rank keeps for itself."""
        me = self._side.me
        for i, (exchange, tensor) in enumerate(zip(self._side.exchanges, self._tensors, strict=True)):
            pieces = cut_like(tensor, exchange.send[me], exchange.receive[me])
            for grid, piece in zip(grids(exchange.receive[me]), pieces, strict=True):
                self._came(me, i, grid, piece)

    def take(self, member: int, run: Run, first: int, last: int, flat: Tensor) -> None:
        """Place or keep elements ``first`` to ``last`` of a run that came from a member, which are in ``flat``."""
        at = 0
        for part, start, stop in run.within(first, last):
            piece = flat[at : at + stop - start]
            at += stop - start
            adds = self._side.exchanges[part.tensor].add
            if not adds and stop - start == part.count:
                self.place(member, part.tensor, part.grid, piece.view(part.grid.shape))
                continue
            target = view_of(self._outputs[part.tensor], part.grid)
            if not adds and target.is_contiguous():
                target.view(-1)[start:stop].copy_(piece)
                continue
            waiting = self._waiting.get((member, part))
            if waiting is None:
                waiting = self._waiting[member, part] = torch.empty(part.grid.shape, dtype=run.dtype)
            waiting.view(-1)[start:stop].copy_(piece)
            if stop == part.count:
                self._came(member, part.tensor, part.grid, self._waiting.pop((member, part)))

    def _came(self, member: int, output: int, grid: Grid, piece: Tensor) -> None:
        if self._ranges and self._side.exchanges[output].add:
            self._terms.append((member, output, grid, piece))
        else:
            self.place(member, output, grid, piece)

    def place(self, member: int, output: int, grid: Grid, piece: Tensor) -> None:
        """Place or add boxes of an output that came from a member, in the shape of their grid."""
        target = view_of(self._outputs[output], grid)
        if not self._side.exchanges[output].add or (self._fresh[output] and member == 0):
            target.copy_(piece)
        elif (as_other := _ADDED_AS.get(target.dtype)) is not None:
            target.view(as_other).add_(piece.view(as_other))
        else:
            target.add_(piece)

    def end(self) -> list[Tensor]:
        """The outputs, when all has come."""
        for term in sorted(self._terms, key=lambda term: term[0]):
            self.place(*term)
        return self._outputs


def _fits(given: Tensor, spec: TensorSpec, tensors: Sequence[Tensor]) -> bool:
    """Whether an output can be made in a tensor while ``tensors``, the operands, are still read."""
    memory = given.untyped_storage().data_ptr()
    return (
        given.shape == spec.shape
        and given.dtype == dtype_of(spec.dtype)
        and given.device.type == "cpu"
        and all(tensor.untyped_storage().data_ptr() != memory for tensor in tensors)
    )


class FlatSums:
    """The outputs of a collective that adds terms: views of one flat tensor for each dtype, made anew each time."""

    def __init__(self, side: Contribution) -> None:
        self.stream = side.coming[side.me]
        self.flats: dict[int, Tensor] = {}  # by where a run begins
        # this rank's terms where they lie, if they are not read where it put them: by where a run and a part begin
        self._own: dict[tuple[int, int], Tensor] = {}
        self._own_boxes: list[tuple[tuple[int, int], int, Box]] = []  # (where a run and a part begin, tensor, box)
        runs = self.stream.runs
        if not side.reads_own:
            for run in runs:
                for part in run.parts:
                    (box,) = (box for box in side.exchanges[part.tensor].send[side.me] if numel(box.size))
                    self._own_boxes.append(((run.start, part.start), part.tensor, box))
        parts = {part.tensor: (run.start, part.start, part.start + part.count) for run in runs for part in run.parts}
        self._outputs = [(parts.get(i), spec.shape, dtype_of(spec.dtype)) for i, spec in enumerate(side.specs)]

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Make the memory of the outputs of one time; ``tensors`` are what this rank puts in."""
        self.flats = {run.start: torch.empty(run.count, dtype=run.dtype) for run in self.stream.runs}
        self._own = {start: cut(tensors[at], (box,))[0].reshape(-1) for start, at, box in self._own_boxes}

    def pieces(self, run: Run, first: int, last: int) -> Iterator[tuple[int, int, int | None]]:
        """The ranges of a run, within one of its elements, whose terms are added by one op, with the part of each.

        (start, stop, where its part begins); None for the part where own terms are read where this rank has put them.
        """
        if not self._own_boxes:
            yield first, last, None
            return
        for part, start, stop in run.within(first, last):
            yield part.start + start, part.start + stop, part.start

    def own(self, run: Run, part: int, start: int, stop: int) -> Tensor:
        """This rank's own terms in a range of a run within the part that begins at ``part``."""
        return self._own[run.start, part][start - part : stop - part]

    def end(self) -> list[Tensor]:
        """The sums in the shapes of the outputs, which are forgotten here."""
        flats, self.flats, self._own = self.flats, {}, {}
        return [
            torch.empty(shape, dtype=dtype) if at is None else flats[at[0]][at[1] : at[2]].view(shape)
            for at, shape, dtype in self._outputs
        ]
