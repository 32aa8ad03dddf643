"""Which elements of a logical tensor a device holds in a layout, and set operations on such regions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.runs import Runs, difference, intersection, length, position_of_each, selection
from actorflow_compiler.core.sbp import NdSbp, Parts, Split, local_size, share, spans
from actorflow_compiler.plan.plan import Box, shared_box

Region = tuple[Runs, ...]  # for each dim its runs: the product of these sets of indices
Indices = tuple[NDArray[np.int64], ...]  # for each dim the logical indices that a device holds, in order


def coordinates(placement: Placement, index: int) -> tuple[int, ...]:
    """The position of a device on each mesh axis."""
    out = []
    for n in reversed(placement.hierarchy):
        index, at = divmod(index, n)
        out.append(at)
    return tuple(reversed(out))


def device_at(placement: Placement, at: Sequence[int]) -> int:
    """The index of the device at a position on each mesh axis: the inverse of ``coordinates``."""
    index = 0
    for n, k in zip(placement.hierarchy, at, strict=True):
        index = index * n + k
    return index


def device_shape(shape: Sequence[int], sbp: NdSbp, placement: Placement, index: int) -> tuple[int, ...]:
    """The shape of one device's part of a logical tensor.  Raises LayoutError for a split that does not fit."""
    return tuple(length(runs) for runs in region(tuple(shape), sbp, placement, index))


def edges(shape: Sequence[int], sbp: NdSbp, place: Placement, alike: float = 0.0) -> tuple[set[int], ...]:
    """For each axis the coordinates at which devices may begin to hold more or less; 0 where all hold equally much.

    The first devices have what is left over by a split that is uneven.  Later axes split what earlier ones leave.
    Sizes count as equal where the smaller lacks no more than the share ``alike`` of the larger.
    """
    found: tuple[set[int], ...] = tuple(set() for _ in place.hierarchy)
    sizes = [{n} for n in shape]
    for entry, parts, at in zip(sbp, place.axes, found, strict=True):
        if isinstance(entry, Split):
            inner = entry.blocks * entry.unit
            if not isinstance(parts, int):
                held = [[local_size(n, entry, parts, k) for k in range(len(parts))] for n in sizes[entry.dim]]
                at.update(
                    k + 1
                    for each in held
                    for k, (x, y) in enumerate(itertools.pairwise(each))
                    if abs(x - y) > alike * max(x, y)
                )
                sizes[entry.dim] = {n for each in held for n in each}
                continue
            units = {size // inner for size in sizes[entry.dim]}
            at.update(n % parts for n in units if alike * -(-n // parts) < 1)
            sizes[entry.dim] = {
                inner * (hi - lo)
                for size in sizes[entry.dim]
                for lo, hi in (share(size // inner, parts, 0), share(size // inner, parts, parts - 1))
            }
    return found


def representatives(
    layouts: Iterable[tuple[Sequence[int], NdSbp]], placement: Placement, first: Collection[int] = ()
) -> Iterator[tuple[int, int]]:
    """Devices that stand for all: (device, how many hold as much of the value of each layout (shape, SBP) as it does).

    Along the mesh axes ``first``, the first device stands for itself alone.
    """
    starts: list[set[int]] = [{0, n, *((1,) if axis in first else ())} for axis, n in enumerate(placement.hierarchy)]
    for shape, sbp in layouts:
        for at, more in zip(starts, edges(shape, sbp, placement), strict=True):
            at |= more
    axes = [[(lo, hi - lo) for lo, hi in itertools.pairwise(sorted(at))] for at in starts]
    for pick in itertools.product(*axes):
        yield device_at(placement, [lo for lo, _ in pick]), math.prod(n for _, n in pick)


def nests(n: int, first: Split, parts: Parts, later: Split, later_parts: Parts) -> bool:
    """Whether what two mesh axes leave of a dim of ``n`` lies in what the later one alone leaves, and is even.

    So it is if the earlier axis splits the dim in blocks each of which lies in one part of the later axis.  Then the
    parts along the earlier axis are those of the later axis' part.

    >>> nests(8, Split(0, 2), 2, Split(0), 2), nests(8, Split(0), 2, Split(0), 2)
    (True, False)
    """
    if not isinstance(parts, int) or not isinstance(later_parts, int) or first.unit != 1:
        return False
    pieces = later.blocks * later_parts
    return first.blocks % pieces == 0 and n % (first.blocks * parts) == 0 and n // (pieces * parts) % later.unit == 0


def count_of_all(shape: Sequence[int], sbp: NdSbp, placement: Placement) -> int:
    """The number of elements that all devices together hold."""
    return sum(
        times * count(region(tuple(shape), sbp, placement, k))
        for k, times in representatives([(shape, sbp)], placement)
    )


@kept_while_compiling(1 << 10)
def without_elements(shape: tuple[int, ...], sbp: NdSbp, placement: Placement) -> frozenset[int]:
    """The devices that hold no element of a logical tensor."""
    if all(count(region(shape, sbp, placement, k)) for k, _ in representatives([(shape, sbp)], placement)):
        return frozenset()
    return frozenset(k for k in range(placement.size) if not count(region(shape, sbp, placement, k)))


def held(shape: Sequence[int], sbp: NdSbp, placement: Placement, index: int) -> Indices:
    """The logical indices of each dim that a device holds."""
    found = region(tuple(shape), sbp, placement, index)
    return tuple(
        np.concatenate([np.arange(lo, hi, dtype=np.int64) for lo, hi in runs] or [np.empty(0, np.int64)])
        for runs in found
    )


@kept_while_compiling(1 << 14, stay=1 << 12)
def region(shape: tuple[int, ...], sbp: NdSbp, placement: Placement, index: int) -> Region:
    """The region that a device holds; a later mesh axis splits what the earlier ones leave."""
    out: list[Runs] = [((0, n),) if n else () for n in shape]
    axes = placement.axes
    for axis, (entry, at) in enumerate(zip(sbp, coordinates(placement, index), strict=True)):
        if isinstance(entry, Split):
            runs = out[entry.dim]
            out[entry.dim] = selection(runs, spans(length(runs), entry, axes[axis], at))
    return tuple(out)


def count(elements: Region) -> int:
    """The number of elements of a region."""
    return math.prod(map(length, elements))


def intersect(a: Region, b: Region) -> Region | None:
    """The elements in both, or None if there are none."""
    out = []
    for x, y in zip(a, b, strict=True):
        both = x if x == y else intersection(x, y)
        if not both:
            return None
        out.append(both)
    return tuple(out)


def subtract(a: Region, b: Region) -> list[Region]:
    """The elements of ``a`` that are not in ``b``, as regions that do not overlap; ``b`` lies in ``a``."""
    out: list[Region] = []
    for dim, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            out.append((*b[:dim], difference(x, y), *a[dim + 1 :]))
    return out


def boxes(taken: Region, inside: Sequence[Region]) -> list[tuple[Box, ...]]:
    """Cut a region into rectangles; for each, its box in the tensor of every device that holds a region ``inside``."""
    dims = []
    for dim, runs in enumerate(taken):
        lines: list[list[int]] = []  # a rectangle's extent in this dim: its start in each tensor, and its length
        begin = [lo for lo, _ in runs]
        for (lo, hi), *starts in zip(runs, *(position_of_each(other[dim], begin) for other in inside), strict=True):
            if lines and all(a == b + lines[-1][-1] for a, b in zip(starts, lines[-1], strict=False)):
                lines[-1][-1] += hi - lo
            else:
                lines.append([*starts, hi - lo])
        dims.append(lines)
    return [
        tuple(shared_box(tuple(line[i] for line in pick), tuple(line[-1] for line in pick)) for i in range(len(inside)))
        for pick in itertools.product(*dims)
    ]
