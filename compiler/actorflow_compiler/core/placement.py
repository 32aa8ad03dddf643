"""Placements: an ordered set of devices, or a mesh of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actorflow_compiler.core.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices that a value or an op lives on.

    ``ranks`` lists them in mesh order (last axis fastest); ``hierarchy`` is the mesh's shape.
    Text form: ``cpu:[0,1]`` or ``cpu:[0,1,2,3](2,2)``.
    """

    type: str  # "cpu" | "cuda", as users write it
    ranks: tuple[int, ...]
    hierarchy: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.type not in ("cpu", "cuda"):
            raise LayoutError(f'placement type {self.type!r} was found; "cpu" or "cuda" was expected')
        if not self.ranks:
            raise LayoutError("a placement needs at least one rank; an empty list was found")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise LayoutError(f"a placement needs distinct, non-negative ranks; {list(self.ranks)} was found")
        if math.prod(self.hierarchy) != len(self.ranks):
            raise LayoutError(
                f"a mesh of shape {self.hierarchy} needs {math.prod(self.hierarchy)} ranks; "
                f"{len(self.ranks)} were found"
            )

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def index(self, rank: int) -> int:
        """The position of ``rank`` in mesh order."""
        return self.ranks.index(rank)

    def __str__(self) -> str:
        mesh = "" if len(self.hierarchy) == 1 else f"({','.join(map(str, self.hierarchy))})"
        return f"{self.type}:[{','.join(map(str, self.ranks))}]{mesh}"


Ranks = Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]


def placement(type: str, ranks: Ranks) -> Placement:
    """``placement("cuda", [0, 1])``; a nested list makes a mesh.

    Raises LayoutError for duplicate, negative, ragged or missing ranks.
    """
    flat: list[int] = []

    def shape(node: object) -> tuple[int, ...]:
        if isinstance(node, int):
            flat.append(node)
            return ()
        if not isinstance(node, Sequence):
            raise LayoutError(f"ranks must be integers or nested lists of them; {node!r} was found")
        shapes = {shape(child) for child in node}
        if len(shapes) > 1:
            raise LayoutError(f"a mesh must be rectangular; {ranks!r} was found")
        return (len(node), *(shapes.pop() if shapes else ()))

    hierarchy = shape(ranks)
    return Placement(type, tuple(flat), hierarchy)
