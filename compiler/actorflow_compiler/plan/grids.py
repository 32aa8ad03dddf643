"""Find the regular grids in a list of boxes: many equal boxes at regular distances are one strided view of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from actorflow_compiler.core.sbp import numel

if TYPE_CHECKING:
    from actorflow_compiler.plan.plan import Box

__all__ = ["Grid", "grids"]

MOST_COUNTS = 8  # dims of a grid, beside those of its boxes: kernels take views of a limited number of dims


@dataclass(frozen=True, slots=True)
class Grid:
    """Equal boxes of a tensor that do not overlap, at regular distances, in the order of their indices (row-major).

    The box of index (i, j, ...) begins at ``start`` + i · ``steps[0]`` + j · ``steps[1]`` + ...  A single box has no
    ``counts``.
    """

    start: tuple[int, ...]  # of the first box
    size: tuple[int, ...]  # of each box
    counts: tuple[int, ...] = ()  # boxes along each dim of the grid
    steps: tuple[tuple[int, ...], ...] = ()  # for each dim of the grid, the distance from a box to the next

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the view: the grid, then a box."""
        return (*self.counts, *self.size)

    @property
    def extent(self) -> tuple[int, ...]:
        """The size of the smallest box around all boxes."""
        found = list(self.size)
        for count, step in zip(self.counts, self.steps, strict=True):
            found = [n + (count - 1) * by for n, by in zip(found, step, strict=True)]
        return tuple(found)


def grids(boxes: Sequence[Box]) -> tuple[Grid, ...]:
    """The boxes as grids: together these have the elements of the boxes, box after box, in the order of the list.

    Boxes that fit no grid are grids of a single box.  Of a tuple the result is kept.

    >>> grids([Box((0, 0), (1, 2)), Box((0, 4), (1, 2)), Box((3, 0), (1, 2)), Box((3, 4), (1, 2))])
    (Grid(start=(0, 0), size=(1, 2), counts=(2, 2), steps=((3, 0), (0, 4))),)
    """
    if len(boxes) < 2:
        return tuple(Grid(box.start, box.size) for box in boxes)
    return _kept(_Same(boxes)) if isinstance(boxes, tuple) else _found(boxes)


class _Same:
    """A key that is equal only for the same object, whose contents are not hashed."""

    __slots__ = ("boxes",)

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes

    def __hash__(self) -> int:
        return id(self.boxes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.boxes is self.boxes


@lru_cache(maxsize=1 << 12)
def _kept(key: _Same) -> tuple[Grid, ...]:
    return _found(key.boxes)


def _found(boxes: Iterable[Box]) -> tuple[Grid, ...]:
    found = [Grid(box.start, box.size) for box in boxes]
    for _ in range(MOST_COUNTS):
        joined = _rows(found)
        if len(joined) == len(found):
            break
        found = joined
    return tuple(found)


def _rows(of: Sequence[Grid]) -> list[Grid]:
    """Join equal grids at equal distances that follow one another to grids of one more dim."""
    rows: list[Grid] = []
    at = 0
    while at < len(of):
        first, stop = of[at], at + 1
        step = _step(first, of[stop]) if stop < len(of) else None
        if step is not None and _apart(first, step):
            while stop < len(of) and _step(of[stop - 1], of[stop]) == step:
                stop += 1
            first = Grid(first.start, first.size, (stop - at, *first.counts), (step, *first.steps))
        rows.append(first)
        at = stop
    return rows


def _step(a: Grid, b: Grid) -> tuple[int, ...] | None:
    """The distance from a grid to one that differs only in its start; None for other grids."""
    if (a.size, a.counts, a.steps) != (b.size, b.counts, b.steps):
        return None
    return tuple(y - x for x, y in zip(a.start, b.start, strict=True))


def _apart(grid: Grid, step: tuple[int, ...]) -> bool:
    """Whether copies of a grid that are not empty lie ahead of each other at this distance, and do not overlap."""
    ahead = all(by >= 0 for by in step) and numel(grid.size) > 0
    return ahead and any(by >= n for by, n in zip(step, grid.extent, strict=True))
