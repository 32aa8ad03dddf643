"""Decide which rank writes which part of which tensor: each element once, and about as many bytes on every rank."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp
from actorflow_compiler.plan.region import Region, boxes, region

__all__ = ["Piece", "TensorLayout", "assign_pieces", "by_neighbours", "neighbours_of"]

SPLIT = 1 << 20  # bytes; of what several ranks hold, each writes pieces of at least about so many


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor to be saved, and which ranks hold what of it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int  # bytes
    placement: Placement | None = None  # None: the script has it, and rank 0's counts, as in the first call of a job
    sbp: NdSbp = ()  # without partial sums


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor that one rank writes."""

    rank: int
    offsets: tuple[int, ...]  # where it begins in the whole tensor
    at: tuple[int, ...]  # where it begins in the part that the rank holds
    shape: tuple[int, ...]
    file: int = 0  # which of the rank's files has it: a file has no more than one piece of a tensor
    holders: tuple[int, ...] = ()  # all ranks that hold it, each at the same place in its part


@functools.lru_cache(maxsize=4)
def assign_pieces(layouts: tuple[TensorLayout, ...], world: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each tensor; equal on all ranks."""
    loads = [(0, rank) for rank in range(world)]  # bytes to write so far
    written = [0] * world
    found = []
    for layout in layouts:
        pieces: list[Piece] = []
        for offsets, at, shape, holders in _rectangles(layout, world):
            nbytes = math.prod(shape) * layout.itemsize
            count = max(1, min(len(holders), nbytes // SPLIT, max(shape, default=1)))
            if count == 1 and len(holders) == world:  # the usual case, and quick for many ranks
                _, rank = heapq.heappop(loads)
                pieces.append(Piece(rank, offsets, at, shape, holders=holders))
                written[rank] += nbytes
                heapq.heappush(loads, (written[rank], rank))
                continue
            chosen = heapq.nsmallest(count, holders, key=lambda rank: (written[rank], rank))
            for rank, piece in zip(chosen, _slices(offsets, at, shape, count), strict=True):
                pieces.append(Piece(rank, *piece, holders=holders))
                written[rank] += math.prod(piece[2]) * layout.itemsize
            loads = [(written[rank], rank) for rank in range(world)]
            heapq.heapify(loads)
        found.append(tuple(_in_files(pieces)))
    return tuple(found)


def _in_files(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces of one tensor, each in a file of its rank that has no other of them."""
    counts: dict[int, int] = {}
    for piece in pieces:
        file = counts.get(piece.rank, 0)
        counts[piece.rank] = file + 1
        yield replace(piece, file=file)


def neighbours_of(rank: int, devices: int, nodes: int, count: int) -> tuple[int, ...]:
    """The ranks of the next ``count`` nodes that keep what a rank has written, too: those in its place there."""
    return tuple((rank + k * devices) % (nodes * devices) for k in range(1, min(count, nodes - 1) + 1))


@functools.lru_cache(maxsize=4)
def by_neighbours(
    pieces: tuple[tuple[Piece, ...], ...], devices: int, nodes: int, count: int
) -> tuple[tuple[Piece, ...], ...]:
    """The same pieces in other files, so that of each file a neighbour of its rank holds all or none by itself.

    ``holders`` of the result are those neighbours that hold the piece; the others have to be sent its file.
    """
    files: dict[tuple[int, tuple[int, ...], int], int] = {}  # (rank, holders, number among its pieces) → file
    counts: dict[int, int] = {}
    found = []
    for some in pieces:
        among: dict[tuple[int, tuple[int, ...]], int] = {}
        mine = []
        for piece in some:
            held = {*piece.holders}
            holders = tuple(r for r in neighbours_of(piece.rank, devices, nodes, count) if r in held)
            number = among.get((piece.rank, holders), 0)
            among[piece.rank, holders] = number + 1
            key = piece.rank, holders, number
            if key not in files:
                files[key] = counts.get(piece.rank, 0)
                counts[piece.rank] = files[key] + 1
            mine.append(replace(piece, file=files[key], holders=holders))
        found.append(tuple(mine))
    return tuple(found)


def _rectangles(
    layout: TensorLayout, world: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """The different rectangles of a tensor: (start in the whole, start in the holders' part, shape, holders)."""
    zeros = (0,) * len(layout.shape)
    if layout.placement is None or not math.prod(layout.shape):
        ranks = (0,) if layout.placement is None else tuple(sorted(set(layout.placement.ranks)))
        return [(zeros, zeros, layout.shape, ranks)]
    holders: dict[Region, list[int]] = {}
    for index, rank in enumerate(layout.placement.ranks):
        holders.setdefault(region(layout.shape, layout.sbp, layout.placement, index), []).append(rank)
    whole: Region = tuple(((0, n),) for n in layout.shape)
    found: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    for part, some in holders.items():
        if all(part):
            for inside, mine in boxes(part, [whole, part]):
                found.append((inside.start, mine.start, inside.size, tuple(sorted(some))))
    return found


def _slices(
    offsets: tuple[int, ...], at: tuple[int, ...], shape: tuple[int, ...], count: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """A rectangle in ``count`` slices of about equal size, along the first dim that has so many rows."""
    if count == 1:
        return [(offsets, at, shape)]
    dim = next(dim for dim, size in enumerate(shape) if size >= count)
    found, size = [], shape[dim]
    for number in range(count):
        lo, hi = size * number // count, size * (number + 1) // count
        found.append((_moved(offsets, dim, lo), _moved(at, dim, lo), (*shape[:dim], hi - lo, *shape[dim + 1 :])))
    return found


def _moved(start: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*start[:dim], start[dim] + by, *start[dim + 1 :])
