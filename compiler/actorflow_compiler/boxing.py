"""Boxing: what has to move, and what it costs, when a value goes from one (placement, SBP) to another.

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
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.placement import Placement
from actorflow_compiler.plan import Box
from actorflow_compiler.sbp import B, NdSbp, P, PartialSum, Sbp, Split, spans

Indices = tuple[NDArray[np.int64], ...]  # for each dim, which logical elements a device holds, in order


def bytes_moved(source: Sbp, target: Sbp, nbytes: float, producers: int, consumers: int, same: bool) -> float:
    """Bytes that all devices send together, by the table above, along one mesh axis."""
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


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangular part of a value: where it lies in a source's tensor and in a target's."""

    source: Box
    target: Box


@dataclass(frozen=True, slots=True)
class Hop:
    """One primitive of a boxing.

    ``parts[t][s]`` is what device t of ``target`` takes from device s of ``source``.  Kinds:
    "local" (nothing crosses devices), the collectives, and "send" (across placements).
    all_reduce sums over ``groups``; the other collectives run over all devices of the placement.
    """

    kind: str
    source: Placement
    target: Placement
    target_sbp: NdSbp
    groups: tuple[tuple[int, ...], ...] = ()  # ranks, of an all_reduce
    parts: tuple[tuple[tuple[Part, ...], ...], ...] = ()
    add: bool = False


def coordinates(placement: Placement, index: int) -> tuple[int, ...]:
    """The position of a device on each mesh axis."""
    return tuple(int(c) for c in np.unravel_index(index, placement.hierarchy))


def device_shape(shape: Sequence[int], sbp: NdSbp, placement: Placement, index: int) -> tuple[int, ...]:
    """The shape of one device's part of a logical tensor."""
    return tuple(len(dim) for dim in held(shape, sbp, placement, index))


def held(shape: Sequence[int], sbp: NdSbp, placement: Placement, index: int) -> Indices:
    """Which logical elements of each dim a device holds."""
    out = [np.arange(n, dtype=np.int64) for n in shape]
    for axis, (entry, at) in enumerate(zip(sbp, coordinates(placement, index), strict=True)):
        if isinstance(entry, Split):
            dim = out[entry.dim]
            ranges = spans(len(dim), entry, placement.hierarchy[axis], at)
            out[entry.dim] = np.concatenate([dim[lo : lo + n] for lo, n in ranges])
    return tuple(out)


def route(
    shape: Sequence[int], source: Placement, source_sbp: NdSbp, target: Placement, target_sbp: NdSbp
) -> tuple[Hop, ...]:
    """The primitives that take a value from one layout to another, in order."""
    hops: list[Hop] = []
    here = source_sbp
    if source == target:
        for axis, (a, b) in enumerate(zip(source_sbp, target_sbp, strict=True)):
            if a == P and b != P and source.hierarchy[axis] > 1:
                alone = all(x == y for i, (x, y) in enumerate(zip(here, target_sbp, strict=True)) if i != axis)
                if isinstance(b, Split) and alone and len(source.hierarchy) == 1:
                    hops.append(_reduce_scatter(shape, source, here, target_sbp))
                    here = target_sbp
                    continue
                there = (*here[:axis], B, *here[axis + 1 :])
                hops.append(Hop("all_reduce", source, source, there, _groups(source, axis)))
                here = there
    else:
        free = tuple(_summed(shape, entry, size) for entry, size in zip(here, source.hierarchy, strict=True))
        if free != here:
            hops += route(shape, source, here, source, free)
            here = free
    if here != target_sbp or source != target:
        hops.append(_move(shape, source, here, target, target_sbp))
    return tuple(hops)


def _summed(shape: Sequence[int], entry: Sbp, devices: int) -> Sbp:
    """A layout without partial sums that is cheap to reach and to send from."""
    if entry != P:
        return entry
    return Split(0) if shape and shape[0] >= devices else B


def _groups(placement: Placement, axis: int) -> tuple[tuple[int, ...], ...]:
    mesh = np.array(placement.ranks).reshape(placement.hierarchy)
    rows = np.moveaxis(mesh, axis, -1).reshape(-1, placement.hierarchy[axis])
    return tuple(tuple(int(r) for r in row) for row in rows)


def _reduce_scatter(shape: Sequence[int], placement: Placement, source: NdSbp, target: NdSbp) -> Hop:
    count = placement.size
    parts = []
    for t in range(count):
        wanted = held(shape, target, placement, t)
        parts.append(tuple(_overlap(held(shape, source, placement, s), wanted) for s in range(count)))
    return Hop("reduce_scatter", placement, placement, target, (), tuple(parts), True)


def _move(shape: Sequence[int], source: Placement, source_sbp: NdSbp, target: Placement, target_sbp: NdSbp) -> Hop:
    """Give each target device exactly the elements that it lacks."""
    same = source == target
    copies = [n for n, entry in zip(source.hierarchy, source_sbp, strict=True) if not isinstance(entry, Split)]
    spread = int(np.prod(copies)) if copies else 1
    have = [held(shape, source_sbp, source, s) for s in range(source.size)]
    where = [coordinates(source, s) for s in range(source.size)]
    # on the same devices a term, or a part that becomes a term with zeros around it, stays where it is
    kept = [same and entry == P and source_sbp[i] != B for i, entry in enumerate(target_sbp)]
    parts = []
    crossing = False
    for t in range(target.size):
        at = coordinates(target, t)
        row: list[tuple[Part, ...]] = [()] * source.size
        empty = any(e == P and c > 0 and not k for e, c, k in zip(target_sbp, at, kept, strict=True))
        if not empty:
            wanted = held(shape, target_sbp, target, t)
            replica = at if same else np.unravel_index(t % spread, copies) if copies else ()
            for s in range(source.size):
                if any(k and where[s][i] != at[i] for i, k in enumerate(kept)):
                    continue
                if not _in_replica(where[s], source_sbp, tuple(int(r) for r in replica), same):
                    continue
                row[s] = _overlap(have[s], wanted)
                crossing |= bool(row[s]) and source.ranks[s] != target.ranks[t]
        parts.append(tuple(row))
    if not crossing:
        kind = "local"
    elif not same:
        kind = "send"
    else:
        kind = "all_gather" if all(e in (B, s) for e, s in zip(target_sbp, source_sbp, strict=True)) else "all_to_all"
    return Hop(kind, source, target, target_sbp, (), tuple(parts))


def _in_replica(at: tuple[int, ...], sbp: NdSbp, replica: tuple[int, ...], same: bool) -> bool:
    """Whether a source device belongs to the copy of the value that a target reads."""
    whole = [c for c, entry in zip(at, sbp, strict=True) if not isinstance(entry, Split)]
    if same:
        return whole == [r for r, entry in zip(replica, sbp, strict=True) if not isinstance(entry, Split)]
    return tuple(whole) == replica


def _overlap(have: Indices, want: Indices) -> tuple[Part, ...]:
    """The rectangles that two devices' elements have in common."""
    runs = []
    for h, w in zip(have, want, strict=True):
        _, at_h, at_w = np.intersect1d(h, w, assume_unique=True, return_indices=True)
        order = np.argsort(at_w)
        at_h, at_w = at_h[order], at_w[order]
        if not len(at_h):
            return ()
        cuts = np.flatnonzero((np.diff(at_h) != 1) | (np.diff(at_w) != 1)) + 1
        starts = [0, *cuts.tolist(), len(at_h)]
        runs.append([(int(at_h[i]), int(at_w[i]), j - i) for i, j in itertools.pairwise(starts)])
    return tuple(
        Part(
            Box(tuple(r[0] for r in pick), tuple(r[2] for r in pick)),
            Box(tuple(r[1] for r in pick), tuple(r[2] for r in pick)),
        )
        for pick in itertools.product(*runs)
    )
