"""Find the cheapest sequence of collectives and sends that takes a value from one (placement, SBP) to another.

Bytes moved in all, T = size of the logical tensor, p producers, c consumers:

===========  =========================  ====================
from → to    same devices               other devices
===========  =========================  ====================
S(i) → S(i)  0                          T
S(i) → S(j)  (p-1)/p·T all_to_all       T
S → B        (p-1)·T all_gather         c·T
S → P        0                          T
B → S        0                          T
B → B        0                          c·T
B → P        0                          T
P → S        (p-1)·T reduce_scatter     p·T
P → B        2(p-1)·T all_reduce        (p+c-1)·T
P → P        0                          p·T
===========  =========================  ====================

``bytes_bound`` extends the table to meshes and uneven parts; a route never moves more than that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.runs import length
from actorflow_compiler.core.sbp import (
    B,
    NdSbp,
    P,
    PartialSum,
    Parts,
    Sbp,
    Split,
    device_count,
    local_size,
    numel,
)
from actorflow_compiler.plan.plan import Box
from actorflow_compiler.plan.region import (
    Region,
    boxes,
    coordinates,
    count,
    count_of_all,
    device_at,
    intersect,
    region,
    subtract,
)

Shape = tuple[int, ...]


def bytes_moved(source: Sbp, target: Sbp, nbytes: float, producers: int, consumers: int, same: bool) -> float:
    """Bytes that all devices together send along one mesh axis, by the table above."""
    if same:
        p = producers
        if source in (target, B) or p == 1 or target == P:
            return 0.0
        if isinstance(source, PartialSum):
            return (2 if target == B else 1) * (p - 1) * nbytes
        return (p - 1) * nbytes * (1.0 if target == B else 1.0 / p)
    if isinstance(source, PartialSum):
        return nbytes * (producers + consumers - 1 if target == B else producers)
    return nbytes * (consumers if target == B else 1)


def busiest_bytes(source: Sbp, target: Sbp, nbytes: float, producers: Parts, consumers: Parts, same: bool) -> float:
    """Bytes that the device with the most of them sends or receives along one mesh axis, by the table above.

    Where devices share equally, that is ``bytes_moved`` over their number, or the larger number of both sides.  With
    weights, the device with the largest share sends and reduces most, and the one with the smallest has most to gather.
    """
    p, c = device_count(producers), device_count(consumers)
    mean = bytes_moved(source, target, nbytes, p, c, same) / max(p, c)
    if not mean or (isinstance(producers, int) and isinstance(consumers, int)):
        return mean
    shares, others = ([1 / n] * n if isinstance(n, int) else [w / sum(n) for w in n] for n in (producers, consumers))
    if isinstance(source, Split) and isinstance(target, Split):
        return nbytes * (max(share * (1 - share) for share in shares) if same else max(*shares, *others))
    if same and isinstance(source, Split) != isinstance(target, Split):  # an all-gather, or a reduce-scatter
        return nbytes * max((p - 1) * max(shares), 1 - min(shares))
    return mean


def bytes_bound(
    shape: Sequence[int], itemsize: int, source: Placement, source_sbp: NdSbp, target: Placement, target_sbp: NdSbp
) -> float:
    """The most bytes that a boxing may move, by the table, on meshes of any number of axes; ``itemsize`` in bytes.

    On one placement the axes are changed one after the other.  Changing one axis costs a row of the table for each
    group of devices along it, where T is what the group holds after the splits of the other axes.  An axis goes from
    its source entry to its target entry directly or through B, and only while no later axis splits the same dim (else
    the later axis would refer to other elements).  The cheapest such sequence counts.  Where parts are uneven, a row
    S → S costs the elements that the devices lack, if that is more than the mean (p-1)/p·T.

    Across placements, p is the number of terms (the product of the source's axes that are P) and c the number of
    copies (the product of the target's axes that are B): (p-1)·T to sum, then c·T to distribute, which covers every
    row of the table.  A 0-dim tensor on a mesh is all-reduced, in all groups of terms, so that not one rank alone has
    to send it to everybody.
    """
    whole = tuple(shape)
    if source != target:
        terms = math.prod(n for n, s in zip(source.hierarchy, source_sbp, strict=True) if s == P)
        copies = math.prod(n for n, s in zip(target.hierarchy, target_sbp, strict=True) if s == B)
        if not whole and 1 < terms < source.size:  # all groups of terms sum it, each for itself
            return float((2 * (terms - 1) * (source.size // terms) + copies) * itemsize)
        return float((terms - 1 + copies) * numel(whole) * itemsize)
    choices = [tuple(dict.fromkeys((a, b, B))) for a, b in zip(source_sbp, target_sbp, strict=True)]
    cost = {source_sbp: 0.0}
    done: set[NdSbp] = set()
    while target_sbp not in done:
        here = min((s for s in cost if s not in done), key=lambda s: cost[s])
        done.add(here)
        for axis, entries in enumerate(choices):
            for entry in entries:
                there = (*here[:axis], entry, *here[axis + 1 :])
                split = {s.dim for s in (here[axis], entry) if isinstance(s, Split)}
                if entry == here[axis] or any(isinstance(s, Split) and s.dim in split for s in here[axis + 1 :]):
                    continue
                try:
                    step = cost[here] + itemsize * _row(whole, source, here, axis, entry)
                except LayoutError:  # blocks or units that do not fit the size left by other axes
                    continue
                cost[there] = min(cost.get(there, step), step)
    return cost[target_sbp]


def _row(shape: Shape, place: Placement, here: NdSbp, axis: int, entry: Sbp) -> float:
    """Elements that move by the table when one axis changes, over all groups along it."""
    others = (*here[:axis], B, *here[axis + 1 :])
    parts, count_of = place.axes[axis], place.hierarchy[axis]
    total = 0.0
    for index in range(place.size):
        at = coordinates(place, index)[axis]
        if at:
            continue
        group = region(shape, others, place, index)
        have, moved = here[axis], bytes_moved(here[axis], entry, count(group), count_of, count_of, True)
        if isinstance(have, Split) and isinstance(entry, Split):
            moved = max(moved, _lacked(tuple(map(length, group)), parts, have, entry))
        total += moved
    return total


def _lacked(shape: Shape, parts: Parts, have: Split, want: Split) -> int:
    """Elements that all devices along one axis have to receive when the split of a tensor changes."""
    n = device_count(parts)
    line = Placement("cpu", tuple(range(n)), (n,), () if isinstance(parts, int) else (parts,))
    total = 0
    for index in range(n):
        wanted = region(shape, (want,), line, index)
        both = intersect(wanted, region(shape, (have,), line, index))
        total += count(wanted) - (count(both) if both else 0)
    return total


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A rectangle to copy: its box in a source device's tensor and in a target device's."""

    source: Box
    target: Box


class HopKind(StrEnum):
    """The primitives of boxing."""

    LOCAL = "local"  # nothing crosses devices
    SEND = "send"  # from rank to rank
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class Hop:
    """One primitive of a boxing.

    A collective runs within each of ``groups``: lists of ascending ranks, which contain every rank of the source once.
    ``parts[t][s]`` are the copies that device t of ``target`` takes from device s of ``source``; an all_reduce has
    none.
    """

    kind: HopKind
    source: Placement
    target: Placement
    target_sbp: NdSbp
    groups: tuple[tuple[int, ...], ...] = ()
    parts: tuple[tuple[tuple[BoxCopy, ...], ...], ...] = ()
    add: bool = False  # the parts that a target receives are summed, not concatenated
    elements: int = 0  # sent by all ranks together; an all_reduce of n over p ranks counts 2(p-1)·n

    def pair(self, t: int, s: int) -> tuple[BoxCopy, ...]:
        """The copies that device t of the target takes from device s of the source."""
        return self.parts[t][s] if self.parts else ()

    def sources(self, t: int) -> Sequence[int]:
        """The source devices of which target device t takes something, in ascending order."""
        return [s for s, parts in enumerate(self.parts[t]) if parts]

    def targets(self, s: int) -> Sequence[int]:
        """The target devices that take something of source device s, in ascending order."""
        return [t for t, row in enumerate(self.parts) if row[s]]

    def given_by(self, s: int) -> Hashable:
        """What is equal for source devices of one group that are alike: each target takes equal copies from them."""
        return s

    def taken_by(self, t: int) -> Hashable:
        """What is equal for target devices of one group that are alike: each source gives them equal copies."""
        return t


Move = Callable[[Shape, Placement, NdSbp, Placement, NdSbp], Hop]  # the one hop from a layout to another


def bytes_of(hops: Iterable[Hop], itemsize: int) -> int:
    """Bytes that all ranks together send on a route; ``itemsize`` in bytes."""
    return itemsize * sum(hop.elements for hop in hops)


def route(
    shape: Sequence[int], source: Placement, source_sbp: NdSbp, target: Placement, target_sbp: NdSbp
) -> tuple[Hop, ...]:
    """The primitives that take a value from one layout to another, in order.

    Of the routes that are considered it is the one with the fewest bytes, then the fewest communications.  Raises
    LayoutError for a split that does not fit the shape.
    """
    return _route(tuple(shape), source, source_sbp, target, target_sbp)


@kept_while_compiling(maxsize=1 << 12)
def _route(shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> tuple[Hop, ...]:
    return cheapest_route(shape, source, a, target, b, direct_hop)


def cheapest_route(
    shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp, move: Move
) -> tuple[Hop, ...]:
    """As ``route``, with ``move`` to make the hops that are no all-reduce."""
    for layout, place in ((a, source), (b, target)):
        sizes = (
            range(n) if place.weights else dict.fromkeys((0, n - 1)) for n in place.hierarchy
        )  # every size is there
        for at in itertools.product(*sizes):
            region(shape, layout, place, device_at(place, at))
    if source == target and a == b:
        return ()
    summed = [k for k, n in enumerate(source.hierarchy) if a[k] == P and n > 1 and (source != target or b[k] != P)]
    if not summed:
        return (move(shape, source, a, target, b),)
    if source == target:
        found = list(_within(shape, source, a, b, summed, move))
    else:
        free = tuple(B if k in summed else entry for k, entry in enumerate(a))
        reduced = _step(shape, source, a, free, move)
        found = [(reduced, move(shape, source, free, target, b))]
        if shape or len(summed) == sum(n > 1 for n in source.hierarchy):
            found.append(_apart(shape, source, a, target, b, move))
    return min(
        found, key=lambda hops: (sum(h.elements for h in hops), sum(h.kind != HopKind.LOCAL for h in hops), len(hops))
    )


def _within(
    shape: Shape, place: Placement, a: NdSbp, b: NdSbp, summed: list[int], move: Move
) -> Iterator[tuple[Hop, ...]]:
    """Routes on one placement: slice broadcast axes, reduce-scatter and all-reduce sums, then change the rest."""
    sliced = tuple(y if x == B and isinstance(y, Split) else x for x, y in zip(a, b, strict=True))
    scattered = [k for k in summed if isinstance(b[k], Split)]
    paths: list[tuple[NdSbp, ...]] = [(a, tuple(B if k in summed else entry for k, entry in enumerate(a)), b)]
    for first in dict.fromkeys((a, sliced)):
        second = tuple(b[k] if k in scattered else entry for k, entry in enumerate(first))
        third = tuple(B if k in summed and k not in scattered else entry for k, entry in enumerate(second))
        paths.append((a, first, second, third, b))
    if len(scattered) == len(summed):
        paths.append((a, b))
    for path in dict.fromkeys(tuple(dict.fromkeys(p)) for p in paths):
        try:
            yield tuple(_step(shape, place, x, y, move) for x, y in itertools.pairwise(path))
        except LayoutError:  # a split that fits the final layout may not fit an intermediate one
            continue


def _step(shape: Shape, place: Placement, here: NdSbp, there: NdSbp, move: Move) -> Hop:
    """One hop on one placement: an all_reduce if every changed axis goes from P to B, else an exchange."""
    axes = [k for k, n in enumerate(place.hierarchy) if n > 1 and here[k] != there[k]]
    if not axes or any(here[k] != P or there[k] != B for k in axes):
        return move(shape, place, here, place, there)
    groups = groups_along(place, tuple(axes))
    members = len(groups[0])  # which hold equally much
    size = 2 * (members - 1) * count_of_all(shape, here, place) // members
    return Hop(HopKind.ALL_REDUCE, place, place, there, groups, elements=size)


def _apart(shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp, move: Move) -> tuple[Hop, ...]:
    """A route to another placement: each source device sums a part of the terms, then sends that sum."""
    if shape:
        middle, sbp = _spread(shape, source, a)
    else:  # a 0-dim tensor cannot be cut: one device sums it, preferably one of the target's
        rank = next((r for r in target.ranks if r in source), source.ranks[0])
        middle, sbp = Placement(source.type, (rank,), (1,)), (B,)
    first = move(shape, source, a, middle, sbp)
    return (first,) if (middle, sbp) == (target, b) else (first, move(shape, middle, sbp, target, b))


def _spread(shape: Shape, place: Placement, sbp: NdSbp) -> tuple[Placement, NdSbp]:
    """The layout that also splits along B and P axes: they come last, so that each device splits what it holds.

    ``[P,S(0)]`` on ``cpu:[0,1,2,3](2,2)`` gives ``[S(0),S(0)]`` on ``cpu:[0,2,1,3](2,2)``.
    """
    order = sorted(range(len(sbp)), key=lambda k: not isinstance(sbp[k], Split))
    local = [length(runs) for runs in region(shape, sbp, place, 0)]
    out: list[Sbp] = []
    for k in order:
        entry, n = sbp[k], place.hierarchy[k]
        if not isinstance(entry, Split):
            dim = next((d for d, m in enumerate(local) if m >= n), local.index(max(local)))
            entry = Split(dim)
            local[dim] = local_size(local[dim], entry, place.axes[k], 0)
        out.append(entry)
    ranks = np.array(place.ranks).reshape(place.hierarchy).transpose(order)
    weights = tuple(place.weights[k] for k in order) if place.weights else ()
    return Placement(place.type, tuple(ranks.reshape(-1).tolist()), ranks.shape, weights), tuple(out)


@kept_while_compiling(maxsize=1 << 10)
def groups_along(place: Placement, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ only on these mesh axes."""
    others = tuple(k for k in range(len(place.hierarchy)) if k not in axes)
    members = math.prod(place.hierarchy[k] for k in axes)
    groups = np.array(place.ranks).reshape(place.hierarchy).transpose(others + axes).reshape(-1, members)
    return tuple(map(tuple, np.sort(groups, axis=1).tolist()))


def direct_hop(shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> Hop:
    """The hop in which each target device gets exactly the elements that it lacks, with terms summed.

    Partial sums along axes that remain P are not summed.
    """
    same = source == target
    stay = [k for k, (x, y) in enumerate(zip(a, b, strict=False)) if same and x == y == P]  # axes that remain P
    summed = [k for k, n in enumerate(source.hierarchy) if a[k] == P and n > 1 and k not in stay]
    have = [region(shape, a, source, s) for s in range(source.size)]
    where = [coordinates(source, s) for s in range(source.size)]
    terms = dict.fromkeys(tuple(c[k] for k in summed) for c in where)
    rows: list[tuple[tuple[BoxCopy, ...], ...]] = [((),) * source.size] * target.size
    crossing: dict[tuple[int, int], int] = {}  # (from, to) → elements
    for t, wanted in _wanted(shape, source, have, target, b, stay).items():
        row: list[list[BoxCopy]] = [[] for _ in have]
        inside = region(shape, b, target, t)
        near = _nearest(source, a, where, target, t, stay)
        for term, piece in itertools.product(terms, wanted):
            holders = (s for s in near if tuple(where[s][k] for k in summed) == term)
            for s, part in _sources_of(piece, holders, have):
                row[s] += [BoxCopy(*pair) for pair in boxes(part, (have[s], inside))]
                if source.ranks[s] != target.ranks[t]:
                    crossing[(s, t)] = crossing.get((s, t), 0) + count(part)
        rows[t] = tuple(map(tuple, row))
    kind = HopKind.LOCAL
    groups: tuple[tuple[int, ...], ...] = ()
    if crossing and set(source.ranks) != set(target.ranks):
        kind = HopKind.SEND
    elif crossing:
        gathers = all(y == B or (same and x == y) for x, y in itertools.zip_longest(a, b))
        kind = HopKind.REDUCE_SCATTER if summed else HopKind.ALL_GATHER if gathers else HopKind.ALL_TO_ALL
        pairs = [(where[s], where[source.index(target.ranks[t])]) for s, t in crossing]
        groups = groups_along(source, tuple(sorted({k for x, y in pairs for k in range(len(x)) if x[k] != y[k]})))
    return Hop(kind, source, target, b, groups, tuple(rows), bool(summed), sum(crossing.values()))


def _sources_of(piece: Region, holders: Iterable[int], have: Sequence[Region]) -> Iterator[tuple[int, Region]]:
    """Cover a region from the devices that hold it; earlier devices supply all that they can: (device, region)."""
    left = [piece]
    for s in holders:
        if not left:
            return
        left, taken = _take(left, have[s])
        yield from ((s, part) for part in taken)
    assert not left, f"no device has {left}"


def _wanted(
    shape: Shape, source: Placement, have: Sequence[Region], target: Placement, b: NdSbp, stay: Sequence[int]
) -> dict[int, list[Region]]:
    """Target device → the regions that it needs.

    Of the devices along an axis that becomes P, only one takes each element, preferably one that already has it; on
    another placement with a mesh of the same shape, that is the one whose like has it.
    """
    columns: dict[tuple[int, ...], list[int]] = {}
    for t in range(target.size):
        at = coordinates(target, t)
        columns.setdefault(tuple(c for k, c in enumerate(at) if b[k] != P or k in stay), []).append(t)
    found: dict[int, list[Region]] = {}
    for column in columns.values():
        whole = region(shape, b, target, column[0])
        left = [whole] if count(whole) else []
        for t in column if len(column) > 1 else ():
            if target.ranks[t] in source:
                left, found[t] = _take(left, have[source.index(target.ranks[t])])
            elif _are_alike(source, target):
                left, found[t] = _take(left, have[t])
        found[column[0]] = [*found.get(column[0], ()), *left]
    return found


def _are_alike(source: Placement, target: Placement) -> bool:
    """Whether two placements without common ranks have meshes of one shape, with equal weights."""
    return (source.hierarchy, source.weights) == (target.hierarchy, target.weights) and set(source.ranks).isdisjoint(
        target.ranks
    )


def _take(left: Sequence[Region], have: Region) -> tuple[list[Region], list[Region]]:
    """Split regions into those that a device lacks and those that it has."""
    rest: list[Region] = []
    taken: list[Region] = []
    for piece in left:
        both = intersect(piece, have)
        rest += subtract(piece, both) if both is not None else [piece]
        taken += [both] if both is not None else []
    return rest, taken


def _nearest(
    source: Placement, a: NdSbp, where: Sequence[tuple[int, ...]], target: Placement, t: int, stay: Sequence[int]
) -> list[int]:
    """The source devices for a target, nearest first: itself, then those that differ from it on the fewest mesh axes.

    On a placement of other ranks with a mesh of the same shape, the device of the same coordinates counts as itself.

    Among equally near ones, different targets prefer different copies, so that all devices share the work.
    """
    rank = target.ranks[t]
    me = where[source.index(rank)] if rank in source else None
    peer = where[t] if _are_alike(source, target) else None  # from mesh to mesh everyone serves its like
    whole = [k for k, entry in enumerate(a) if entry == B]
    copies = {at: i for i, at in enumerate(dict.fromkeys(tuple(c[k] for k in whole) for c in where))}

    def distance(s: int) -> tuple[int, int, int]:
        near = me or peer
        far = sum(x != y for x, y in zip(where[s], near, strict=True)) if near else 0
        return far, (copies[tuple(where[s][k] for k in whole)] - t) % len(copies), s

    return sorted((s for s in range(source.size) if not me or all(where[s][k] == me[k] for k in stay)), key=distance)
