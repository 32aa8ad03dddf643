"""Collectives of ranks of one machine through shared memory: each rank fills its slots, and all read them in place.

Each rank of a group has a region (see ``shared.py``) for the collectives of a plan, which all others map.  A collective
goes in steps.  In a step every rank copies what it has for the others to a slot of its region, or a range of that where
the slot is too short for all, and announces it.  When all have announced the step, each reads the slots of the others.
Terms are added in the order of the group, so results do not depend on who came first, and are equal on all ranks.

In an all-reduce every rank adds up all terms by itself, which takes a single step.  Where that would be more work than
a second step, each adds up its share of the elements instead, writes the sums over its own terms in its slot, and
announces this; in a step in which nobody fills a slot, all read the shares.

Nobody has to say that a slot is free again.  A rank announces step k only after it has read step k - 1, so all have
announced that, and have read k - 2: with two slots, what was in the one that is filled has been read by all.  Where
collectives go in ranges, a rank fills a slot one step ahead of the one that it reads, so that ranks do not wait for
each other in turns.  Then it has read step k - 2 and others k - 4, and there are four slots.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.transport.contributions import ALIGN, Assembly, Contribution, FlatSums, Run, Stream, add_terms, put
from actorflow.transport.redistribution import check
from actorflow.transport.shared import make_region, map_bytes
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.plan.grids import Grid
from actorflow_compiler.plan.shared_slots import LONGEST, slots_of

__all__ = ["GroupMemory", "SharedCollective"]

SHARED_OUT = 1 << 17  # bytes from which ranks add up shares of an all-reduce, if they are more than two
MOST_STEPS = 1 << 20  # of a collective
_ENTRY = 4  # numbers that a rank tells each other one about each collective: see ``_Told``


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells another about its part in a collective."""

    offset: int  # byte of the slot at which the stream for the other begins
    stride: int  # bytes of that stream that are in the slot in one step
    steps: int  # that it needs to put in all it has; all ranks take as many as the one that needs most
    nbytes: int  # of the whole stream for the other

    def lies_in(self, slot: int) -> bool:
        """Whether all that will be read lies in a slot of so many bytes, where tensors of any dtype can begin."""
        aligned = self.offset % ALIGN == 0 and self.stride % ALIGN == 0
        positive = 0 <= self.offset <= slot and self.stride >= 0 and 0 <= self.steps <= MOST_STEPS
        return aligned and positive and min(self.stride, self.nbytes) <= slot - self.offset

    @property
    def is_whole(self) -> bool:
        """Whether its steps put in the whole stream."""
        return self.steps * self.stride >= self.nbytes


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a collective."""

    number: int  # of the range of the streams
    fills: bool  # the ranks put in a range of their streams; else they only tell that their shares are added up
    after: int  # the number of steps that must have been read before


class GroupMemory:
    """The memory that one rank fills, and that of the others, for the collectives of a plan in one group.

    ``sides`` are all of these collectives, in an order that is the same on all ranks of the group.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, sides: Sequence[Contribution]) -> None:
        self.ranks, self.me = ranks, ranks.index(rank)
        self.sides = tuple(sides)
        longest = max((side.nbytes for side in sides), default=0)
        self._count, self._slot = slots_of(longest, LONGEST)  # of this rank
        self._used = 0  # slots of each rank: as many as all of them have
        self._slots: list[list[Tensor]] = [[] for _ in ranks]  # by member
        self._tables: list[Tensor | None] = [None for _ in ranks]  # by member: [reader, collective, entry]
        self._head = -(-(1 + len(ranks) * len(sides) * _ENTRY) * 8 // ALIGN) * ALIGN

    @property
    def nbytes(self) -> int:
        """The size of this rank's region."""
        return self._head + self._count * self._slot

    @property
    def complete(self) -> bool:
        """Whether the memory of all ranks is here."""
        return all(table is not None for table in self._tables)

    @property
    def ahead(self) -> bool:
        """Whether slots are filled one step ahead of the one that is read; all memory is here."""
        return self._used > 2

    def make(self) -> list[tuple[int, int]]:
        """Make this rank's region; returns pairs of another rank and a file descriptor for it, which it must close.

        Raises ClusterError if there is too little memory.
        """
        others = [rank for m, rank in enumerate(self.ranks) if m != self.me]
        descriptor = make_region(self.nbytes, self.ranks[self.me], *others)
        try:
            table = self._map(self.me, descriptor, self.nbytes, self._count)
            for at, side in enumerate(self.sides):
                for member in range(len(self.ranks)):
                    told = _told(side, member, self._slot)
                    table[member, at] = torch.tensor([told.offset, told.stride, told.steps, told.nbytes])
            return [(rank, os.dup(descriptor)) for rank in others]
        finally:
            os.close(descriptor)

    def take(self, rank: int, descriptor: int, nbytes: int) -> None:
        """Map the region of another rank.  Raises ClusterError if it is none for these collectives."""
        if rank not in self.ranks or nbytes < self._head:
            raise ClusterError(f"shared memory of {nbytes} bytes was found for the group of ranks {list(self.ranks)}")
        self._map(self.ranks.index(rank), descriptor, nbytes)

    def place(self, number: int) -> int:
        """The slot of each rank that is filled as number ``number``; all memory is here."""
        return number % self._used

    def slot(self, member: int, place: int) -> Tensor:
        """A member's slot, as flat bytes."""
        return self._slots[member][place]

    def told(self, member: int, collective: int) -> _Told:
        """What a member has told this rank about a collective, by its position in ``sides``.

        Others can write to the memory, also to this rank's, so what it says is read once, and this rank's not at all.
        """
        if member == self.me:
            return _told(self.sides[collective], member, self._slot)
        table = self._tables[member]
        assert table is not None
        return _Told(*map(int, table[self.me, collective]))

    def _map(self, member: int, descriptor: int, nbytes: int, slots: int = 0) -> Tensor:
        """Map a member's region, which says how many slots it has, or is made to say so; returns its table."""
        flat = map_bytes(descriptor, nbytes)
        numbers = flat[: self._head].view(torch.int64)
        if slots:
            numbers[0] = slots
        count = int(numbers[0])
        if count not in (2, 4):
            raise ClusterError(f"shared memory with {count} slots was found for the group of ranks {list(self.ranks)}")
        size, rest = divmod(nbytes - self._head, count)
        if rest or size % ALIGN:
            whom = f"the group of ranks {list(self.ranks)}"
            raise ClusterError(f"shared memory with slots of {size} bytes, and {rest} more, was found for {whom}")
        self._used = count if not self._used else min(self._used, count)
        self._slots[member] = [flat[self._head + n * size : self._head + (n + 1) * size] for n in range(count)]
        shape = (len(self.ranks), len(self.sides), _ENTRY)
        table = self._tables[member] = numbers[1 : 1 + len(self.ranks) * len(self.sides) * _ENTRY].view(shape)
        return table


def _areas(side: Contribution, slot: int) -> tuple[list[int], int]:
    """Where the streams of a rank begin in its slots, and how many bytes of each are there in one step; 0: all."""
    if side.nbytes > slot:  # all streams go on in each step, so that their readers have equal work
        stride = slot // len(side.leaving) // ALIGN * ALIGN
        return [n * stride for n in range(len(side.leaving))], stride
    starts, at = [], 0
    for stream in side.leaving:
        starts.append(at)
        at += stream.nbytes
    return starts, 0


def _told(side: Contribution, member: int, slot: int) -> _Told:
    starts, stride = _areas(side, slot)
    longest = max((stream.nbytes for stream in side.leaving), default=0)
    number = side.stream_for[member]
    steps = -(-longest // stride) if stride else int(longest > 0)
    offset, nbytes = (starts[number], side.leaving[number].nbytes) if number >= 0 else (0, 0)
    return _Told(offset, stride or longest, steps, nbytes)


class SharedCollective:
    """A collective of a plan, which is carried out again and again, one step after the other.

    ``begin`` starts it, ``fill`` and ``read`` do the parts of a step, and ``end`` gives the outputs.  The caller says
    when: it fills no slot that others still read, and reads when all have announced the step.
    """

    def __init__(self, memory: GroupMemory, at: int) -> None:
        self.side = memory.sides[at]
        self._memory, self._at = memory, at
        self.steps: tuple[_Step, ...] = ()
        self._told: list[_Told] = []  # by member
        self._ranges = 0  # into which the longest stream is cut
        self._flat = self._shares = False
        self._put_in: Sequence[int] = ()  # numbers of the streams that anybody reads in this rank's slots
        self._starts, self._stride = _areas(self.side, memory._slot)
        self._sums: FlatSums | None = None
        self._boxes: Assembly | None = None
        self._tensors: Sequence[Tensor] = ()
        self._flats: dict[tuple[int, Grid], Tensor] = {}
        self._filled = 0  # number of this collective's first slot
        # of a collective of a single range, by slot: where this rank puts in what, and the terms that it adds
        self._places: dict[int, list[tuple[Tensor, Run]]] = {}
        self._terms: dict[int, list[tuple[Run, int, int, int | None, list[Tensor]]]] = {}
        self._pieces: dict[int, list[list[tuple[int, Grid, Tensor]]]] = {}  # or the boxes that come from each member

    def begin(self, tensors: Sequence[Tensor], filled: int, into: Mapping[int, Tensor]) -> None:
        """Start to carry it out; all memory is here, and ``filled`` slots have been filled before, on each rank.

        Outputs may be made in the tensors of ``into``, by their numbers, or anew.  Raises PlanError unless the tensors
        fit the plan.
        """
        side = self.side
        check(side.comm, tensors, side.specs)
        if not self._told:
            self._plan_steps()
        self._tensors, self._filled, self._flats = tensors, filled, {}
        if self._sums is not None:
            self._sums.start(tensors)
        else:
            self._boxes = Assembly(side, tensors, self._ranges > 1, into)
            if self._ranges != 1:  # else in the order of the group
                self._boxes.take_own()

    def fill(self, step: int) -> None:
        """Do this rank's part of a step, which the caller then announces."""
        here = self.steps[step]
        if not here.fills:
            return
        if self._ranges > 1:
            for place, run, first, last in self._own_range(here.number):
                put(place, run, first, last, self._tensors, self._flats)
            return
        slot = self._memory.place(self._filled)
        places = self._places.get(slot)
        if places is None:
            places = self._places[slot] = [(place, run) for place, run, _, _ in self._own_range(0)]
        for place, run in places:
            put(place, run, 0, run.count, self._tensors, self._flats)

    def _own_range(self, number: int) -> Iterator[tuple[Tensor, Run, int, int]]:
        """Where this rank puts in elements (first, last) of runs in a step."""
        for at in self._put_in:
            stream = self.side.leaving[at]
            low, high = self._range(number, stream, self._stride or stream.nbytes)
            for run, first, last in stream.between(low, high):
                yield self._view(self._memory.me, number, run, first, last, self._starts[at] - low), run, first, last

    def read(self, step: int) -> None:
        """Read what all have put in, or the shares that others have added up."""
        here = self.steps[step]
        if self._sums is None:
            self._read_boxes(here.number)
        elif not self._shares:
            self._add(here.number, None)
        elif here.fills:
            self._add(here.number, self._memory.me)
        else:
            self._read_shares(here.number)

    def end(self) -> list[Tensor]:
        """The outputs, after the last step."""
        self._tensors, self._flats = (), {}
        if self._sums is not None:
            return self._sums.end()
        boxes, self._boxes = self._boxes, None
        assert boxes is not None
        return boxes.end()

    def spare(self) -> None:
        """Write no more into what ``begin`` was given for outputs; nobody wants them."""
        if self._boxes is not None:
            self._boxes.spare()

    @property
    def filling(self) -> int:
        """The number of steps in which slots are filled."""
        return self._ranges

    # ---- how it goes, which is known when the memory of all ranks is here

    def _plan_steps(self) -> None:
        memory, side = self._memory, self.side
        self._told = [memory.told(member, self._at) for member in range(len(memory.ranks))]
        own = self._told[side.me]
        for member, (told, stream) in enumerate(zip(self._told, side.coming, strict=True)):
            if member == side.me:
                continue
            rank, what = memory.ranks[member], f"{side.comm.label} {side.comm.id}: "
            slot = memory.slot(member, 0).numel()
            if told.nbytes != stream.nbytes:
                what += f"{told.nbytes} bytes for rank {memory.ranks[side.me]} in shared memory"
                raise MessageRefused(RefusalReason.SIZE, what, f"{stream.nbytes}, as the plan says", rank)
            if not told.lies_in(slot) or not told.is_whole:
                what += f"{told} of a slot of {slot} bytes"
                raise MessageRefused(RefusalReason.MEMORY, what, "all of it, in parts of the slot", rank)
            if side.whole and (told.stride, told.steps) != (own.stride, own.steps):
                raise MessageRefused(RefusalReason.MEMORY, f"{what}{told}", f"{own}, as all put in the same", rank)
        self._ranges = max(told.steps for told in self._told)
        # all see the same streams of an all-reduce; those of a reduce-scatter may be in slots of several sizes
        self._flat = side.sums and len({told.stride for told in self._told}) == 1
        self._sums = FlatSums(side) if self._flat else None
        read = {number for member, number in enumerate(side.stream_for) if member != side.me}
        if self._flat and side.reads_own:
            read.add(side.stream_for[side.me])
        self._put_in = sorted(read - {-1})
        self._shares = side.whole and len(memory.ranks) > 2 and side.nbytes >= SHARED_OUT
        steps: list[_Step] = []
        if not self._shares:
            self.steps = tuple(_Step(n, True, 0) for n in range(self._ranges))
            return
        read_at: dict[int, int] = {}  # by range: the number of its step
        for n in range(self._ranges + 1):  # the shares of a range follow the next range, which is on its way meanwhile
            if n < self._ranges:
                read_at[n] = len(steps)
                steps.append(_Step(n, True, 0))
            if n:
                steps.append(_Step(n - 1, False, read_at[n - 1] + 1))
        self.steps = tuple(steps)

    # ---- parts of slots

    def _range(self, number: int, stream: Stream, stride: int) -> tuple[int, int]:
        return min(number * stride, stream.nbytes), min((number + 1) * stride, stream.nbytes)

    def _view(self, member: int, number: int, run: Run, first: int, last: int, offset: int) -> Tensor:
        """Elements of a run in the slot of a member; the stream's byte 0 would lie at byte ``offset`` of the slot."""
        start = offset + run.start + first * run.dtype.itemsize
        flat = self._memory.slot(member, self._memory.place(self._filled + number))
        return flat[start : start + (last - first) * run.dtype.itemsize].view(run.dtype)

    def _coming(self, member: int, number: int, run: Run, first: int, last: int) -> Tensor:
        """Elements of a run that a member has put in for this rank."""
        told = self._told[member]
        return self._view(member, number, run, first, last, told.offset - number * told.stride)

    # ---- reading

    def _add(self, number: int, share: int | None) -> None:
        """Add up a range of the terms, or a member's ``share`` of it, which is then put over this rank's terms."""
        sums, me = self._sums, self.side.me
        assert sums is not None
        if self._ranges == 1 and share is None:
            self._add_all(sums)
            return
        low, high = self._range(number, sums.stream, self._told[me].stride)
        if share is not None:
            low, high = _share(low, high, share, len(self._memory.ranks))
        for run, low_at, high_at in sums.stream.between(low, high):
            for first, last, part in sums.pieces(run, low_at, high_at):
                terms = [
                    sums.own(run, part, first, last)
                    if m == me and part is not None
                    else self._coming(m, number, run, first, last)
                    for m in range(len(self._memory.ranks))
                ]
                place = sums.flats[run.start][first:last]
                add_terms(place, terms)
                if share is not None:
                    self._coming(me, number, run, first, last).copy_(place)

    def _add_all(self, sums: FlatSums) -> None:
        """As ``_add`` for a collective of a single range, with less to do each time."""
        me, slot = self.side.me, self._memory.place(self._filled)
        known = self._terms.get(slot)
        if known is None:
            members = range(len(self._memory.ranks))
            known = self._terms[slot] = [
                (run, first, last, part, [self._coming(m, 0, run, first, last) for m in members])
                for run in sums.stream.runs
                for first, last, part in sums.pieces(run, 0, run.count)
            ]
        for run, first, last, part, terms in known:
            if part is not None:
                terms = [*terms[:me], sums.own(run, part, first, last), *terms[me + 1 :]]
            add_terms(sums.flats[run.start][first:last], terms)

    def _read_shares(self, number: int) -> None:
        sums, me = self._sums, self.side.me
        assert sums is not None
        low, high = self._range(number, sums.stream, self._told[me].stride)
        for member in range(len(self._memory.ranks)):
            if member != me:
                for run, first, last in sums.stream.between(*_share(low, high, member, len(self._memory.ranks))):
                    sums.flats[run.start][first:last].copy_(self._coming(member, number, run, first, last))

    def _read_boxes(self, number: int) -> None:
        boxes, me = self._boxes, self.side.me
        assert boxes is not None
        if self._ranges == 1:
            self._read_all_boxes(boxes)
            return
        for member, stream in enumerate(self.side.coming):
            if member == me:
                continue
            low, high = self._range(number, stream, self._told[member].stride)
            for run, first, last in stream.between(low, high):
                boxes.take(member, run, first, last, self._coming(member, number, run, first, last))

    def _read_all_boxes(self, boxes: Assembly) -> None:
        """As ``_read_boxes`` for a collective of a single range, with less to do each time."""
        slot = self._memory.place(self._filled)
        known = self._pieces.get(slot)
        if known is None:
            known = self._pieces[slot] = [self._pieces_of(member) for member in range(len(self._memory.ranks))]
        for member, pieces in enumerate(known):
            if member == self.side.me:
                boxes.take_own()
            for output, grid, piece in pieces:
                boxes.place(member, output, grid, piece)

    def _pieces_of(self, member: int) -> list[tuple[int, Grid, Tensor]]:
        """The boxes of outputs that a member has put in for this rank; none of its own."""
        found = []
        for run in self.side.coming[member].runs if member != self.side.me else ():
            flat = self._coming(member, 0, run, 0, run.count)
            for part in run.parts:
                piece = flat[part.start : part.start + part.count].view(part.grid.shape)
                found.append((part.tensor, part.grid, piece))
        return found


def _share(low: int, high: int, member: int, members: int) -> tuple[int, int]:
    """A member's share of a range of bytes; it begins at a multiple of ``ALIGN``, as ``low`` does."""
    size = -(-(high - low) // members // ALIGN) * ALIGN
    return min(low + member * size, high), min(low + (member + 1) * size, high)
