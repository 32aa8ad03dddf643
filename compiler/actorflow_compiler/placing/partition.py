"""Partition a sequence of units into stages so that the slowest stage is as fast as possible (dynamic programming)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from actorflow_compiler.core.errors import LayoutError

POSITIONS = 512  # places to cut at that are looked at; of longer sequences a selection
HALVINGS = 4  # of the interval in which the fastest cut is that saves bytes
EXACT = 1e-9  # share by which the longest stretch may be longer than the least


@dataclass(frozen=True, slots=True)
class PartitionUnit:
    """An indivisible unit, and its costs in an iteration on the devices of a stage.

    seconds: forward and backward; parameters: bytes that stay, with their gradients and optimizer state;
    activations: bytes that are kept for the backward pass of one micro-batch; crossing: bytes that go both
    ways over a cut before the unit (ignored for the first).
    """

    seconds: float
    parameters: float = 0.0
    activations: float = 0.0
    crossing: float = 0.0


def partition(
    units: Sequence[PartitionUnit],
    stages: int,
    *,
    bytes_per_second: float = math.inf,
    pieces: int = 1,
    memory: float = math.inf,
    slack: float = 0.0,
    slowness: Sequence[float] = (),
) -> tuple[int, ...]:
    """The first unit of each of ``stages`` stages, so that the largest stage's seconds are least.

    A stage takes the seconds of its units, times its ``slowness`` (1, if none are given), and those of the bytes that
    cross its two cuts, at ``bytes_per_second``.
    Among equally fast partitions the one with the fewest crossing bytes is taken; since seconds are estimates,
    ``slack`` lets the largest stage take that fraction longer where it saves bytes.  Stage k of S holds its parameters
    and the activations of min(``pieces``, S - k) micro-batches, in at most ``memory`` bytes.

    The result is optimal for up to ``POSITIONS`` units; of more, each cut is the cheapest in a stretch of about
    1/``POSITIONS`` of all seconds.  Takes O(stages · units²).  Raises LayoutError where there are fewer units than
    stages, and where no cut fits the memory.
    """
    if stages < 1:
        raise LayoutError(f"{stages} stages were found; 1 or more were expected")
    if stages > len(units):
        raise LayoutError(f"{stages} stages were found, but there are {len(units)} units to share among them")
    costs = _Costs(units, _positions(units, max(POSITIONS, 16 * stages)), bytes_per_second)
    kinds = [(slow, min(pieces, stages - k)) for k, slow in enumerate(slowness or (1.0,) * stages)]
    by_kind = {kind: costs.seconds_of(*kind, memory) for kind in dict.fromkeys(kinds)}  # stages alike share a table
    tables = [by_kind[kind] for kind in kinds]
    fastest = _least(tables)
    if not math.isfinite(fastest):
        least = _least([np.where(costs.empty, np.inf, costs.bytes_of(alive)) for _, alive in kinds])
        raise LayoutError(
            f"no cut into {stages} stages fits {memory:.4g} bytes for each; the fittest needs {least:.4g}. "
            f"Give more memory, more stages, more micro-batches, or another optimizer"
        )
    crossing, cuts = _cuts(tables, costs.crossing, fastest)
    low, high = fastest, fastest * (1 + slack)
    fewest, _ = _cuts(tables, costs.crossing, high) if slack else (crossing, cuts)
    if fewest < crossing:  # the fastest partition with so few crossing bytes
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            crossing, _ = _cuts(tables, costs.crossing, middle)
            low, high = (low, middle) if crossing <= fewest else (middle, high)
        _, cuts = _cuts(tables, costs.crossing, high)
    return tuple(int(costs.positions[c]) for c in cuts)


def stage_seconds(
    units: Sequence[PartitionUnit],
    first: Sequence[int],
    bytes_per_second: float = math.inf,
    slowness: Sequence[float] = (),
) -> list[float]:
    """The seconds of each stage of a partition."""
    ends = [*first, len(units)]
    crossing = [0.0, *(units[f].crossing for f in first[1:]), 0.0]
    return [
        sum(u.seconds for u in units[a:b]) * slow + (crossing[k] + crossing[k + 1]) / bytes_per_second
        for k, ((a, b), slow) in enumerate(zip(pairwise(ends), slowness or (1.0,) * len(first), strict=True))
    ]


def least_longest(seconds: Sequence[float], stages: int) -> float:
    """The least that the longest of ``stages`` stretches of a sequence can take; what crosses cuts costs nothing.

    Takes O(stages · log(units)) for each halving of the interval in which the result is.  Infinite where there are
    fewer units than stages.
    """
    if stages > len(seconds):
        return math.inf
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    low, high = max(float(np.max(seconds)), float(sums[-1]) / stages), float(sums[-1])
    while high - low > EXACT * high:
        middle, ends = (low + high) / 2, [0]
        for _ in range(stages):
            ends.append(int(np.searchsorted(sums, sums[ends[-1]] + middle, side="right")) - 1)
        if ends[-1] == len(seconds):
            high = float(np.diff(sums[ends]).max())
        else:
            low = middle
    return high


class _Costs:
    """Cost tables indexed by [first position, end position]; a pair that is no stage costs infinity."""

    def __init__(
        self,
        units: Sequence[PartitionUnit],
        positions: Sequence[int],
        bytes_per_second: float,
    ) -> None:
        self.positions = np.array(positions)
        self.crossing = np.array([units[p].crossing if 0 < p < len(units) else 0.0 for p in positions])
        self.crosses = self.crossing / bytes_per_second
        self.empty = np.tri(len(positions), dtype=bool)
        self.work = self._between([u.seconds for u in units])
        self.parameters = self._between([u.parameters for u in units])
        self.activations = self._between([u.activations for u in units])

    def _between(self, values: Sequence[float]) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(values)])[self.positions]
        table: np.ndarray = sums[None, :] - sums[:, None]
        return table

    def seconds_of(self, slowness: float, alive: int, memory: float) -> np.ndarray:
        """Seconds of a stage that computes so many times as long as its units say; infinite above the ``memory``."""
        table: np.ndarray = self.work * slowness + self.crosses[:, None] + self.crosses[None, :]
        table[self.empty] = np.inf
        if memory < math.inf:
            table[self.bytes_of(alive) > memory] = np.inf
        return table

    def bytes_of(self, alive: int) -> np.ndarray:
        """Bytes that a stage with the activations of so many micro-batches holds, for each pair of positions."""
        table: np.ndarray = self.parameters + self.activations * alive
        return table


def _positions(units: Sequence[PartitionUnit], most: int) -> list[int]:
    """The positions to consider as cuts, with both ends: all, or in each stretch of time the one with fewest bytes.

    If some stretches have no position, others with few crossing bytes fill up the number.
    """
    if len(units) <= most:
        return list(range(len(units) + 1))
    before = np.concatenate([[0.0], np.cumsum([u.seconds + 1e-30 for u in units])])
    stretch = np.minimum(before[1:-1] / before[-1] * most, most - 1).astype(int)
    best: dict[int, int] = {}
    for position, s in enumerate(stretch, 1):
        if s not in best or units[position].crossing < units[best[s]].crossing:
            best[s] = position
    chosen = set(best.values())
    others = sorted((p for p in range(1, len(units)) if p not in chosen), key=lambda p: units[p].crossing)
    return [0, *sorted([*chosen, *others[: max(0, most - 1 - len(chosen))]]), len(units)]


def _least(tables: Sequence[np.ndarray]) -> float:
    """The least that the largest stage can cost; ``tables[k]`` has the costs of stage k."""
    least = tables[0][0]
    for table in tables[1:]:
        least = np.maximum(least[:, None], table).min(axis=0)
    return float(least[-1])


def _cuts(tables: Sequence[np.ndarray], crossing: np.ndarray, limit: float) -> tuple[float, list[int]]:
    """The fewest crossing bytes with no stage above ``limit``, and the position at which each stage begins."""
    limit *= 1 + 1e-12  # the same sums in another order
    total = np.where(tables[0][0] <= limit, 0.0, np.inf)
    came = []
    for table in tables[1:]:
        sums = np.where(table <= limit, (total + crossing)[:, None], np.inf)
        came.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    cuts = [len(crossing) - 1]
    for back in reversed(came):
        cuts.append(int(back[cuts[-1]]))
    return float(total[-1]), [0, *reversed(cuts[1:])]
