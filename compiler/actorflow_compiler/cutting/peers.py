"""Compute the peers of every rank in one communication, as arrays over all ranks, and divide rank classes by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Colours: TypeAlias = NDArray[np.int64]  # for each rank the number of its class, or of what it looks like


@dataclass(frozen=True, slots=True, eq=False)
class GroupPeers:
    """The groups of ranks of a collective."""

    world: int
    groups: NDArray[np.int64]  # [groups, members]
    links: NDArray[np.int64]  # of each group: equal numbers for equally fast links

    def looks(self, colours: Colours) -> Iterator[Colours]:
        """Of each rank: over which link its group communicates, and how many members of each class it has."""
        members = np.sort(colours[self.groups], axis=1)
        look = np.full(self.world, -1)
        look[self.groups] = numbered_rows(np.column_stack([self.links, members]))[:, None]
        yield look


@dataclass(frozen=True, slots=True, eq=False)
class PairPeers:
    """Pairs of ranks of which one sends to the other."""

    world: int
    pairs: NDArray[np.int64]  # [pairs, (from, to)], in the order of targets
    whats: NDArray[np.int64]  # of each pair: equal numbers for what moves alike, over equally fast links

    def looks(self, colours: Colours) -> Iterator[Colours]:
        """Of each rank: what it sends to ranks of which classes, and what it receives, in the order of targets."""
        for one, other in ((0, 1), (1, 0)):
            moved = numbered_rows(np.column_stack([self.whats, colours[self.pairs[:, other]]]))
            ranks = self.pairs[:, one]
            order = np.argsort(ranks, kind="stable")
            mine, begin = np.unique(ranks[order], return_index=True)
            rows: dict[bytes, int] = {}
            look = np.full(self.world, -1)
            look[mine] = [rows.setdefault(row.tobytes(), len(rows)) for row in np.split(moved[order], begin[1:])]
            yield look


Peers: TypeAlias = GroupPeers | PairPeers


def numbered_rows(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row of a matrix a number, equal for equal rows."""
    if not len(rows):
        return np.zeros(0, np.int64)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
