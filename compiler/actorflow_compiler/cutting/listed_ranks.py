"""Find out which ranks of a step are alike before anything is made for them, so that one of each class is enough.

Ranks are alike if they are equally fast, are on the same placements, hold equally much of every value, and communicate
alike: their groups have as many members of each class, over an equally fast link, and they send to and receive from the
same classes in the same order.
How much a device holds depends on its coordinate along each mesh axis, and changes where a split that is uneven has
given away its remainder: the coordinates of an axis fall into intervals, and ranks into products of these.
Communications then divide these classes further, until nothing changes (colour refinement).

Ranks of one class may hold different parts of a value, and compute with other offsets, as in a split vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from actorflow_compiler.boxing.aligned import AlignedHop
from actorflow_compiler.boxing.routes import Hop, HopKind
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp, numel
from actorflow_compiler.cutting.peers import Colours, GroupPeers, PairPeers, Peers, numbered_rows
from actorflow_compiler.plan.region import edges

Layout = tuple[tuple[int, ...], NdSbp, Placement]  # logical shape, layout, where
Edges = Mapping[Placement, Sequence[Collection[int]]]  # placement → for each axis the coordinates where classes begin
Inside = Callable[[tuple[int, ...]], Hashable]  # what distinguishes the links between these ranks
Speed = Callable[[int], float]  # of a rank


@dataclass(frozen=True, slots=True)
class ListedRanks:
    """The ranks for which a program says what they do: all of them, or one of each class."""

    first: Mapping[int, int] | None = None  # rank → the listed rank of its class; None: every rank is listed
    _among: dict[Placement, tuple[tuple[int, int], ...]] = field(default_factory=dict, compare=False, repr=False)
    _counts: dict[Placement, Counter[int]] = field(default_factory=dict, compare=False, repr=False)

    def __contains__(self, rank: int) -> bool:
        return self.first is None or self.first[rank] == rank

    def among(self, place: Placement) -> tuple[tuple[int, int], ...]:
        """(Index, rank) of the listed ranks of a placement, in its order."""
        if place not in self._among:
            self._among[place] = tuple((k, rank) for k, rank in enumerate(place.ranks) if rank in self)
        return self._among[place]

    def of(self, place: Placement) -> Sequence[int]:
        """The listed ranks of a placement, in its order."""
        return place.ranks if self.first is None else [rank for _, rank in self.among(place)]

    def stands_for(self, place: Placement, rank: int) -> int:
        """How many ranks of a placement are of the class of a listed rank."""
        if self.first is None:
            return 1
        if place not in self._counts:
            self._counts[place] = Counter(self.first[other] for other in place.ranks)
        return self._counts[place][rank]

    def members(self, group: Sequence[int]) -> Hashable:
        """What is equal for groups with as many ranks of each class."""
        return tuple(group) if self.first is None else tuple(sorted(Counter(self.first[r] for r in group).items()))

    def classes(self, world: int) -> dict[int, tuple[int, ...]]:
        """Listed rank → the ranks of its class."""
        found: dict[int, list[int]] = {}
        for rank in range(world):
            found.setdefault(rank if self.first is None else self.first[rank], []).append(rank)
        return {listed: tuple(ranks) for listed, ranks in found.items()}


EVERY_RANK = ListedRanks()


class RankClasses:
    """The classes of the ranks of a step, which what is known of its layouts and communications divides."""

    def __init__(
        self, world: int, placements: Iterable[Placement], inside: Inside, speed: Speed, alike: float = 0.0
    ) -> None:
        """``alike``: the share of a value's part that another one may lack and count as equal to it."""
        self.world, self.inside, self.speed, self.alike = world, inside, speed, alike
        self.edges: dict[Placement, tuple[set[int], ...]] = {
            place: tuple({0} for _ in place.hierarchy) for place in placements
        }
        self.layouts: set[Layout] = set()
        self.hops: dict[Hashable, Hop] = {}  # one of each kind that may divide classes
        self.peers: dict[Hashable, Peers] = {}  # of those of these hops that were looked at

    def lies(self, layout: Layout) -> None:
        """A value lies like this."""
        if layout in self.layouts:
            return
        self.layouts.add(layout)
        shape, sbp, place = layout
        for at, more in zip(self.of(place), edges(shape, sbp, place, self.alike), strict=True):
            at |= more

    def moves(self, hop: Hop) -> None:
        """Something moves like this."""
        if isinstance(hop, AlignedHop):
            for place in (hop.source, hop.target):
                for axis in hop.first:
                    self.of(place)[axis].add(1)
            if not hop.groups and hop.kind is not HopKind.SEND:
                return
            self.hops.setdefault((hop.kind, hop.groups, hop.source, hop.target, hop.free, hop.modulo), hop)
        elif hop.kind is HopKind.ALL_REDUCE:
            self.hops.setdefault((hop.kind, hop.groups), hop)
        else:
            self.hops.setdefault(id(hop), hop)

    def of(self, place: Placement) -> tuple[set[int], ...]:
        """For each axis of a placement the coordinates where classes begin."""
        if place not in self.edges:
            self.edges[place] = tuple({0} for _ in place.hierarchy)
        return self.edges[place]

    def listed(self) -> ListedRanks:
        """The lowest rank of each class."""
        colours = self._refined(self._by_coordinates()).tolist()
        lowest: dict[int, int] = {}
        return ListedRanks({rank: lowest.setdefault(colour, rank) for rank, colour in enumerate(colours)})

    def _by_coordinates(self) -> Colours:
        speeds: dict[float, int] = {}
        looks = [np.array([speeds.setdefault(self.speed(rank), len(speeds)) for rank in range(self.world)])]
        for place, axes in self.edges.items():
            cell = np.zeros(1, np.int64)  # of devices, in mesh order: the interval of each of their coordinates
            for at, n in zip(axes, place.hierarchy, strict=True):
                interval = np.searchsorted(sorted(at), np.arange(n), "right")
                cell = (cell[:, None] * (len(at) + 1) + interval).reshape(-1)
            look = np.full(self.world, -1)
            look[list(place.ranks)] = cell
            looks.append(look)
        return _numbered(looks)

    def _refined(self, colours: Colours) -> Colours:
        """Split classes until ranks of one class have peers of equal classes."""
        peers = [self._peers(key, hop) for key, hop in self.hops.items()]
        unlike = [hop for hop in self.hops.values() if not isinstance(hop, AlignedHop) and hop.parts and hop.groups]
        totals = [] if self.alike else [_totals(hop, self.world) for hop in unlike]  # all wait for the one with most
        count = 0
        while count < (now := len(np.unique(colours))):
            count = now
            looks = [look for one in peers for look in one.looks(colours)]
            colours = _numbered([colours, *totals, *looks])
        return colours

    def _peers(self, key: Hashable, hop: Hop) -> Peers:
        """With whom each rank communicates in a hop; found once, as that takes longer than to look at their classes."""
        if key not in self.peers:
            if hop.groups:
                links: dict[Hashable, int] = {}
                numbers = [links.setdefault(self.inside(group), len(links)) for group in hop.groups]
                self.peers[key] = GroupPeers(self.world, np.array(hop.groups), np.array(numbers))
            else:
                self.peers[key] = self._pairs(hop)
        return self.peers[key]

    def _pairs(self, hop: Hop) -> PairPeers:
        sizes = _sizes(hop, self.alike) if hop.parts else {}
        pairs: list[tuple[int, int]] = []  # (origin, to), in the order of targets
        whats: dict[Hashable, int] = {}
        numbers = []
        for t, to in enumerate(hop.target.ranks):
            for s in hop.sources(t) if isinstance(hop, AlignedHop) or hop.parts else ():
                origin = hop.source.ranks[s]
                what = self.inside((origin, to)), origin == to, sizes.get((t, s))
                pairs.append((origin, to))
                numbers.append(whats.setdefault(what, len(whats)))
        return PairPeers(self.world, np.array(pairs, np.int64).reshape(-1, 2), np.array(numbers, np.int64))


def _near(found: Iterable[int], alike: float) -> dict[int, int]:
    """Number → the largest one that it counts as equal to."""
    near: dict[int, int] = {}
    top = -1
    for number in sorted(set(found), reverse=True):
        if number < top * (1 - alike) or top < 0:
            top = number
        near[number] = top
    return near


def _totals(hop: Hop, world: int) -> Colours:
    """For each rank a number that says how many elements it sends in a collective, and how many it receives."""
    sent: Counter[int] = Counter()
    came: Counter[int] = Counter()
    for t, s in itertools.product(range(hop.target.size), range(hop.source.size)):
        if (to := hop.target.ranks[t]) != (origin := hop.source.ranks[s]):
            elements = sum(numel(part.target.size) for part in hop.parts[t][s])
            sent[origin] += elements
            came[to] += elements
    found = np.full((world, 2), -1)
    for rank in hop.source.ranks:
        found[rank] = sent[rank], came[rank]
    return numbered_rows(found)


def _sizes(hop: Hop, alike: float) -> dict[tuple[int, int], Hashable]:
    """(Target, source) of a hop that is not aligned → the sizes of what moves, and whether it is all that is there."""
    found: dict[tuple[int, int], Hashable] = {}
    near = _near((n for row in hop.parts for parts in row for p in parts for n in p.source.size), alike)
    for t, row in enumerate(hop.parts):
        for s, parts in enumerate(row):
            if parts:
                found[t, s] = tuple(
                    (tuple(near[n] for n in p.source.size), not any(p.source.start), not any(p.target.start))
                    for p in parts
                )
    return found


def _numbered(looks: Iterable[Colours]) -> Colours:
    """Number the ranks that look the same in all ways: equal numbers for equal ones."""
    return numbered_rows(np.stack(list(looks), axis=1))
