"""Routes whose hops are alike on all devices, described by a rule for each mesh axis instead of device by device.

A hop is *aligned* if every mesh axis changes by itself: a dimension is split by the same axes before and after, or
the last of them are added, or taken away.  Then what a device takes from another one follows from the coordinates of
the two, and a permutation of the devices of an axis that hold equally much changes nothing.  So the copies between two
devices are found without looking at any other, and thousands of devices cost no more than a few.  ``aligned_route``
equals ``route``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from actorflow_compiler.boxing.routes import BoxCopy, Hop, HopKind, cheapest_route, direct_hop, groups_along
from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.runs import length
from actorflow_compiler.core.sbp import B, NdSbp, P, Split, largest
from actorflow_compiler.plan.plan import Box
from actorflow_compiler.plan.region import (
    boxes,
    coordinates,
    count,
    count_of_all,
    device_at,
    intersect,
    nests,
    region,
    representatives,
    without_elements,
)

Shape = tuple[int, ...]
MOST = 1 << 18  # pairs of devices that are looked at one by one, where a hop is not aligned


class NotAlignedError(Exception):
    """A hop between so many devices that are not alike that its copies are not computed."""


@dataclass(frozen=True, slots=True, eq=False)
class AlignedHop(Hop):
    """A hop whose copies are computed for the devices that are asked for; it has no ``parts``."""

    shape: Shape = ()  # logical
    source_sbp: NdSbp = ()
    free: tuple[int, ...] = ()  # the axes along which a device takes from others
    first: tuple[int, ...] = ()  # the axes of which only the first device takes anything
    modulo: bool = False  # every device takes all: from itself, or from the source of its number modulo their count

    def sources(self, t: int) -> Sequence[int]:
        """As ``Hop.sources``."""
        if self.modulo:
            rank = self.target.ranks[t]
            return (self.source.index(rank) if rank in self.source else t % self.source.size,)
        return [s for s in self._related(t, self.source) if self._gives(s, t)]

    def targets(self, s: int) -> Sequence[int]:
        """As ``Hop.targets``."""
        if not self.modulo:
            return [t for t in self._related(s, self.target) if self._gives(s, t)]
        others = range(s % self.source.size, self.target.size, self.source.size)
        found = {t for t in others if self.target.ranks[t] not in self.source}
        if self.source.ranks[s] in self.target:
            found.add(self.target.index(self.source.ranks[s]))
        return sorted(found)

    def pair(self, t: int, s: int) -> tuple[BoxCopy, ...]:
        """As ``Hop.pair``."""
        if self.modulo:
            if s not in self.sources(t):
                return ()
        else:
            here, there = coordinates(self.target, t), coordinates(self.source, s)
            if any(x != y for k, (x, y) in enumerate(zip(there, here, strict=True)) if k not in self.free):
                return ()
            if not self._gives(s, t):
                return ()
        have = region(self.shape, self.source_sbp, self.source, s)
        inside = region(self.shape, self.target_sbp, self.target, t)
        part = intersect(inside, have) if count(have) and count(inside) else None
        return () if part is None else tuple(itertools.starmap(BoxCopy, boxes(part, (have, inside))))

    def given_by(self, s: int) -> Hashable:
        """As ``Hop.given_by``: in a group, devices differ only along axes that are free, so what they hold decides."""
        return region(self.shape, self.source_sbp, self.source, s)

    def taken_by(self, t: int) -> Hashable:
        """As ``Hop.taken_by``."""
        return region(self.shape, self.target_sbp, self.target, t)

    def _gives(self, s: int, t: int) -> bool:
        """Whether anything moves between two devices that are related: of their parts, one lies in the other."""
        if self.first and any(coordinates(self.target, t)[k] for k in self.first):
            return False
        return s not in without_elements(self.shape, self.source_sbp, self.source) and t not in without_elements(
            self.shape, self.target_sbp, self.target
        )

    def _related(self, index: int, others: Placement) -> Iterator[int]:
        at = coordinates(others, index)  # both meshes have one shape
        axes = [range(n) if k in self.free else (at[k],) for k, n in enumerate(others.hierarchy)]
        return (device_at(others, where) for where in itertools.product(*axes))


@dataclass(frozen=True, slots=True, eq=False)
class RingHop(AlignedHop):
    """A hop by which each device takes all that the one before it along the axis ``free`` has, around in a ring."""

    def sources(self, t: int) -> Sequence[int]:
        """As ``Hop.sources``."""
        return (self._next(t, -1),)

    def targets(self, s: int) -> Sequence[int]:
        """As ``Hop.targets``."""
        return (self._next(s, 1),)

    def pair(self, t: int, s: int) -> tuple[BoxCopy, ...]:
        """As ``Hop.pair``."""
        if s != self._next(t, -1):
            return ()
        size = tuple(map(length, region(self.shape, self.target_sbp, self.target, t)))
        box = Box((0,) * len(size), size)
        return (BoxCopy(box, box),)

    def given_by(self, s: int) -> Hashable:
        """As ``Hop.given_by``: each has another neighbour."""
        return s

    def taken_by(self, t: int) -> Hashable:
        """As ``Hop.taken_by``."""
        return t

    def _next(self, index: int, step: int) -> int:
        at, (axis,) = list(coordinates(self.source, index)), self.free
        at[axis] = (at[axis] + step) % self.source.hierarchy[axis]
        return device_at(self.source, at)


@kept_while_compiling(maxsize=1 << 10)
def ring_hop(shape: Shape, place: Placement, sbp: NdSbp, axis: int) -> RingHop:
    """The hop that passes each device's block of a value of this shape and layout to the next one along a mesh axis."""
    moved = count_of_all(shape, sbp, place)
    groups = groups_along(place, (axis,))
    return RingHop(
        HopKind.ALL_TO_ALL, place, place, sbp, groups, elements=moved, shape=shape, source_sbp=sbp, free=(axis,)
    )


def aligned_route(
    shape: Sequence[int],
    source: Placement,
    source_sbp: NdSbp,
    target: Placement,
    target_sbp: NdSbp,
    most: float = math.inf,
) -> tuple[Hop, ...]:
    """The hops that ``route`` finds, as aligned ones where they are.

    Raises LayoutError for a split that does not fit the shape, and NotAlignedError for a hop that is not aligned and
    has more than ``most`` pairs of devices.
    """
    return _aligned_route(tuple(shape), source, source_sbp, target, target_sbp, most)


@kept_while_compiling(maxsize=1 << 12)
def _aligned_route(
    shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp, most: float
) -> tuple[Hop, ...]:
    return cheapest_route(shape, source, a, target, b, functools.partial(_aligned_or_not, most))


def _aligned_or_not(most: float, shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> Hop:
    found = aligned_hop(shape, source, a, target, b)
    if found is not None:
        return found
    if source.size * target.size > most:
        raise NotAlignedError(f"{list(shape)} from {a} to {b}")
    return direct_hop(shape, source, a, target, b)


def aligned_hop(shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> AlignedHop | None:
    """The hop from one layout to another; None if it is not aligned."""
    same = source == target
    if not same and (source.hierarchy, source.weights) != (target.hierarchy, target.weights):
        if all(x == B or n == 1 for x, n in zip(a, source.hierarchy, strict=True)) and all(y == B for y in b):
            return _to_all(shape, source, a, target, b)
        return None
    if not same and not set(source.ranks).isdisjoint(target.ranks):
        return None
    axes = [k for k, n in enumerate(source.hierarchy) if n > 1]
    if not _splits_apart(shape, source, a, b, axes):
        return None
    summed = [k for k in axes if a[k] == P and not (same and b[k] == P)]
    become = [k for k in axes if b[k] == P and a[k] != P]  # partial sums
    if not same and any(a[k] == b[k] == P for k in axes):
        return None
    free = [k for k in axes if k in summed or (isinstance(a[k], Split) and b[k] != a[k] and b[k] != P)]
    if become and free:
        return None
    hop = AlignedHop(
        HopKind.LOCAL, source, target, b, (), (), bool(summed), 0, shape, a, tuple(free),
        tuple(k for k in become if a[k] == B),
    )  # fmt: skip
    elements = _crossing(hop, math.prod(source.hierarchy[k] for k in summed), same)
    kind = HopKind.LOCAL
    groups: tuple[tuple[int, ...], ...] = ()
    if elements and not same:
        kind = HopKind.SEND
    elif elements:
        gathers = all(y in (B, x) for x, y in zip(a, b, strict=True))
        kind = HopKind.REDUCE_SCATTER if summed else HopKind.ALL_GATHER if gathers else HopKind.ALL_TO_ALL
        groups = groups_along(source, tuple(k for k in free if _crosses(hop, k)))
    return AlignedHop(
        kind, source, target, b, groups, (), hop.add, elements, shape, a, hop.free, hop.first
    )  # fmt: skip


def _to_all(shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> AlignedHop:
    """The hop from copies on some devices to copies on others."""
    lacking = sum(rank not in source for rank in target.ranks)
    kind = HopKind.SEND if lacking and count(region(shape, b, target, 0)) else HopKind.LOCAL
    elements = lacking * count(region(shape, b, target, 0))
    return AlignedHop(kind, source, target, b, (), (), False, elements, shape, a, modulo=True)


def _splits_apart(shape: Shape, place: Placement, a: NdSbp, b: NdSbp, axes: Sequence[int]) -> bool:
    """Whether the axes that split a dimension are the same before and after, but for some on one side.

    These are the last ones, or the first of two, which splits the dimension in blocks inside of the other one's parts.
    """
    before, after = _splitting(a, axes), _splitting(b, axes)
    return all(
        all(x == y for x, y in zip(before[dim], after.get(dim, ()), strict=False))
        or _without_first(shape[dim], place, before[dim], after[dim])
        for dim in before
    )


def _without_first(n: int, place: Placement, one: list[tuple[int, Split]], other: list[tuple[int, Split]]) -> bool:
    """Whether one side has an axis more, which splits inside of the parts of the only axis that the other side has."""
    more, less = (one, other) if len(one) > len(other) else (other, one)
    if len(more) != 2 or more[1:] != less:
        return False
    (first, outer), (later, inner) = more
    return nests(n, outer, place.axes[first], inner, place.axes[later])


def _splitting(sbp: NdSbp, axes: Sequence[int]) -> dict[int, list[tuple[int, Split]]]:
    """Dimension → the axes that split it, and how."""
    found: dict[int, list[tuple[int, Split]]] = {}
    for k in axes:
        if isinstance(entry := sbp[k], Split):
            found.setdefault(entry.dim, []).append((k, entry))
    return found


def _crossing(hop: AlignedHop, terms: int, same: bool) -> int:
    """The elements that all devices together take from others."""
    total = 0
    for t, times in representatives(((hop.shape, hop.source_sbp), (hop.shape, hop.target_sbp)), hop.source, hop.first):
        if any(coordinates(hop.target, t)[k] for k in hop.first):
            continue
        want, have = region(hop.shape, hop.target_sbp, hop.target, t), region(hop.shape, hop.source_sbp, hop.source, t)
        both = intersect(want, have) if count(want) and count(have) else None
        own = count(both) if both is not None else 0
        total += times * ((count(want) * terms if hop.free else own) - (own if same else 0))
    return total


def _crosses(hop: AlignedHop, axis: int) -> bool:
    """Whether anything moves along one of the axes along which devices take from others."""
    if not (isinstance(hop.source_sbp[axis], Split) and isinstance(hop.target_sbp[axis], Split)):
        return True
    most = [*map(largest, hop.source.axes)]
    devices = [device_at(hop.source, [*most[:axis], k, *most[axis + 1 :]]) for k in range(hop.source.hierarchy[axis])]
    give, take = (
        [k for k, device in enumerate(devices) if count(region(hop.shape, sbp, hop.source, device))]
        for sbp in (hop.source_sbp, hop.target_sbp)
    )
    return bool(give and take) and len({*give, *take}) > 1
