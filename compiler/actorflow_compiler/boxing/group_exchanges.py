"""What each rank sends to, and receives from, the other members of its group in a hop that is a collective."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from actorflow_compiler.boxing.routes import BoxCopy, Hop, HopKind
from actorflow_compiler.plan.plan import Box, Exchange

Group = tuple[int, ...]  # ranks


class GroupExchanges:
    """The exchanges of all ranks of a hop, each of which is made once for the members of a group that are alike.

    In an all-gather all members have equal exchanges, though they hold different parts, and so they have in a
    reduce-scatter: what takes time and memory grows with the size of a group, not with its square.
    """

    def __init__(self, hop: Hop, same: dict[Exchange, Exchange]) -> None:
        """``same`` has one object for equal exchanges, also of other hops."""
        self._hop, self._same = hop, same
        self._source = {rank: at for at, rank in enumerate(hop.source.ranks)}
        self._target = {rank: at for at, rank in enumerate(hop.target.ranks)}
        self._groups: dict[Group, _Group] = {}

    def of(self, rank: int, group: Group) -> tuple[Exchange, ...]:
        """A rank's exchange in its group; none for an all-reduce, which takes and gives everything."""
        hop = self._hop
        if hop.kind is HopKind.ALL_REDUCE:
            return ()
        found = self._groups.get(group)
        if found is None:
            sources, targets = ([at[r] for r in group] for at in (self._source, self._target))
            found = self._groups[group] = _Group(hop, sources, targets, self._same)
        return (found.exchange(self._source[rank], self._target[rank]),)


class _Group:
    """The members of one group, as devices of the source and the target of a hop, by what they give and take."""

    def __init__(
        self, hop: Hop, sources: Sequence[int], targets: Sequence[int], same: dict[Exchange, Exchange]
    ) -> None:
        self._hop, self._same = hop, same
        self._given, self._gives = _alike((hop.given_by(s), s) for s in sources)
        self._taken, self._takes = _alike((hop.taken_by(t), t) for t in targets)
        self._pairs: dict[tuple[int, int], tuple[BoxCopy, ...]] = {}  # (target, source), the first of those alike
        self._sends: dict[int, tuple[tuple[Box, ...], ...]] = {}  # source → the boxes for each member
        self._receives: dict[int, tuple[tuple[Box, ...], ...]] = {}  # target → those from each member
        self._made: dict[tuple[int, int], Exchange] = {}

    def exchange(self, source: int, target: int) -> Exchange:
        """The exchange of a member that is these devices of the source and the target."""
        s, t = self._gives[source], self._takes[target]
        if (s, t) not in self._made:
            found = Exchange(self._send(s), self._receive(t), self._hop.add)
            self._made[s, t] = self._same.setdefault(found, found)
        return self._made[s, t]

    def _send(self, s: int) -> tuple[tuple[Box, ...], ...]:
        if s not in self._sends:
            boxes = {t: tuple(p.source for p in self._pair(t, s)) for t in dict.fromkeys(self._taken)}
            self._sends[s] = tuple(boxes[t] for t in self._taken)
        return self._sends[s]

    def _receive(self, t: int) -> tuple[tuple[Box, ...], ...]:
        if t not in self._receives:
            boxes = {s: tuple(p.target for p in self._pair(t, s)) for s in dict.fromkeys(self._given)}
            self._receives[t] = tuple(boxes[s] for s in self._given)
        return self._receives[t]

    def _pair(self, t: int, s: int) -> tuple[BoxCopy, ...]:
        if (t, s) not in self._pairs:
            self._pairs[t, s] = self._hop.pair(t, s)
        return self._pairs[t, s]


def _alike(looks: Iterable[tuple[Hashable, int]]) -> tuple[list[int], dict[int, int]]:
    """For each device the first one that looks like it, as a list in their order, and by device."""
    first: dict[Hashable, int] = {}
    found = {device: first.setdefault(look, device) for look, device in looks}
    return list(found.values()), found
