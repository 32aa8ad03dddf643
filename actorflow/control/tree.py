"""The tree of a run's ranks, over which they join, agree, and hear of plans and failures; rank 0 is its root.

A rank's messages to all go to the ranks below it, which pass them on, and what all tell rank 0 comes up the same way.
So no rank hears from more than ``fan_out`` others, whatever the number of ranks.  No clock and no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Span", "Tree", "common", "spans_of"]

Span = tuple[int, int]  # the first of some consecutive ranks, and the one after the last


@dataclass(frozen=True)
class Tree:
    """The tree as one rank sees it: ranks are numbered level by level, each level from left to right.

    >>> tree = Tree(rank=1, world=12, fan_out=3)
    >>> tree.parent, tree.children, tree.subtree
    (0, (4, 5, 6), ((1, 2), (4, 7)))
    >>> tree.holds(1, 6), tree.holds(1, 7)
    (True, False)
    """

    rank: int
    world: int
    fan_out: int

    @property
    def parent(self) -> int:
        """The rank above this one; -1 for rank 0."""
        return self.parent_of(self.rank)

    def parent_of(self, rank: int) -> int:
        """The rank above another one; -1 for rank 0."""
        return (rank - 1) // self.fan_out if rank else -1

    @cached_property
    def children(self) -> tuple[int, ...]:
        """The ranks next below this one."""
        return tuple(self._children_of(self.rank))

    def is_leaf(self, rank: int) -> bool:
        """Whether there is no rank below another one."""
        return not self._children_of(rank)

    @cached_property
    def subtree(self) -> tuple[Span, ...]:
        """This rank and all below it, in order."""
        return tuple(self.subtree_of(self.rank))

    def subtree_of(self, rank: int) -> Iterator[Span]:
        """A rank and all below it, in order: those of a level are consecutive."""
        first, end = rank, rank + 1
        while first < self.world:
            yield first, min(end, self.world)
            first, end = first * self.fan_out + 1, end * self.fan_out + 1

    def holds(self, above: int, rank: int) -> bool:
        """Whether a rank is ``above`` or below it."""
        return 0 <= rank < self.world and any(first <= rank < end for first, end in self.subtree_of(above))

    def _children_of(self, rank: int) -> range:
        first = rank * self.fan_out + 1
        return range(min(first, self.world), min(first + self.fan_out, self.world))


def spans_of(ranks: Iterable[int]) -> list[Span]:
    """Some ranks, in order, as spans.

    >>> spans_of([1, 2, 3, 7])
    [(1, 4), (7, 8)]
    """
    found: list[Span] = []
    for rank in ranks:
        if found and found[-1][1] == rank:
            found[-1] = found[-1][0], rank + 1
        else:
            found.append((rank, rank + 1))
    return found


def common(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """The ranks that are in both.

    >>> common([(1, 4), (7, 8)], [(2, 9)])
    [(2, 4), (7, 8)]
    """
    both = ((max(first, start), min(end, stop)) for first, end in a for start, stop in b)
    return [(first, end) for first, end in both if first < end]
