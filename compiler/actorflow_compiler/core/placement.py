"""Placements: an ordered set of devices, or a mesh of them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.sbp import Parts

MOST_WEIGHT = 1_000_000


class _WithIndices:
    """Something that keeps what is found of it, beside its fields, so that this is no part of its digest."""

    __slots__ = ("_indices",)

    _indices: dict[int, int]  # rank → index


@dataclass(frozen=True, slots=True)
class Placement(_WithIndices):
    """The devices that a value or an op lives on.

    ``ranks`` lists them in mesh order (last axis fastest); ``hierarchy`` is the mesh's shape.  ``weights`` has, for
    each mesh axis, those by which a dim that is split over the axis is shared among its devices, or () where they share
    equally; it is () where all axes do.  They are kept in lowest terms, so that equal shares are equal placements.
    Text form: ``cpu:[0,1]`` or ``cpu:[0,1,2,3](2,2)``, followed by weights: ``cpu:[0,1]*[2,1]``,
    ``cpu:[0,1,2,3](2,2)*[2,1]*[1,1]``.
    """

    type: str  # "cpu" | "cuda", as users write it
    ranks: tuple[int, ...]
    hierarchy: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False, default=0)  # kept, as ranks may be thousands

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
        if self.weights:
            object.__setattr__(self, "weights", _in_lowest_terms(self.weights, self.hierarchy))
        object.__setattr__(self, "_hash", hash((self.ranks, self.hierarchy, self.weights)))

    @property
    def axes(self) -> tuple[Parts, ...]:
        """The devices along each mesh axis: their number, or a weight for each of them."""
        if not self.weights:
            return self.hierarchy
        return tuple(weights or n for weights, n in zip(self.weights, self.hierarchy, strict=True))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shares(self) -> tuple[float, ...]:
        """The fraction that each device has of what is split over all axes; they add up to 1."""
        axes = [w or (1,) * n for w, n in zip(self.weights or ((),) * len(self.hierarchy), self.hierarchy, strict=True)]
        total = math.prod(map(sum, axes))
        return tuple(math.prod(line) / total for line in itertools.product(*axes))

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self._index_of

    def index(self, rank: int) -> int:
        """The position of ``rank`` in mesh order.  Raises ValueError for a rank that is not in the placement."""
        found = self._index_of.get(rank)
        if found is None:
            raise ValueError(f"rank {rank} was asked for in {self}; expected: one of its ranks")
        return found

    @property
    def _index_of(self) -> dict[int, int]:
        """Rank → its index; made when it is first asked for, as ranks may be thousands."""
        try:
            return self._indices
        except AttributeError:
            found = {rank: index for index, rank in enumerate(self.ranks)}
            object.__setattr__(self, "_indices", found)
            return found

    def __str__(self) -> str:
        mesh = "" if len(self.hierarchy) == 1 else f"({','.join(map(str, self.hierarchy))})"
        axes = zip(self.weights, self.hierarchy, strict=False)  # of weights there may be none
        weights = "".join(f"*[{','.join(map(str, w or (1,) * n))}]" for w, n in axes)
        return f"{self.type}:[{','.join(map(str, self.ranks))}]{mesh}{weights}"

    def __repr__(self) -> str:
        weights = f", weights={self.weights!r}" if self.weights else ""
        return f"Placement(type={self.type!r}, ranks={self.ranks!r}, hierarchy={self.hierarchy!r}{weights})"


Ranks = Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]


def placement(type: str, ranks: Ranks, weights: Any = None) -> Placement:
    """``placement("cuda", [0, 1])``; a nested list makes a mesh.

    ``weights`` are whole numbers above 0, one for each rank, nested as the ranks are: of a dim that is split over the
    devices each gets a part in proportion to its weight.  Those of a mesh have to be a product: a weight for each place
    along the first axis, times one for each place along the second, and so on.

    Raises LayoutError for duplicate, negative, ragged or missing ranks, and for weights that do not fit them.
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
    made = Placement(type, tuple(flat), hierarchy)
    if weights is None:
        return made
    return Placement(type, made.ranks, hierarchy, _along_axes(weights, hierarchy))


def _in_lowest_terms(weights: tuple[tuple[int, ...], ...], hierarchy: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The weights of each axis without a common factor; () for an axis of equal ones, and where all axes are so."""
    if len(weights) != len(hierarchy):
        raise LayoutError(
            f"a mesh of shape {hierarchy} has {len(hierarchy)} axes; weights of {len(weights)} were found"
        )
    found = []
    for axis, n in zip(weights, hierarchy, strict=True):
        if axis and (len(axis) != n or min(axis) < 1):
            raise LayoutError(f"{n} weights above 0 were expected along an axis of {n} devices; {axis} was found")
        common = math.gcd(*axis)
        found.append(tuple(w // common for w in axis) if len(set(axis)) > 1 else ())
    return tuple(found) if any(found) else ()


def _along_axes(weights: Any, hierarchy: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The weights along each axis of a mesh, given one for each device, nested as the mesh is."""
    flat: list[int] = []
    sizes = " × ".join(map(str, hierarchy))
    what = f"{sizes} weights, one for each rank and nested as the ranks are, were"

    def read(node: Any, shape: tuple[int, ...]) -> None:
        if shape:
            if not isinstance(node, list | tuple | range):
                raise LayoutError(f"weights={weights!r} was found for a placement; {what} expected")
            if len(node) != shape[0]:
                raise LayoutError(
                    f"weights={weights!r} was found for a placement, with {len(node)} in the place of {shape[0]}; "
                    f"{what} expected"
                )
            for child in node:
                read(child, shape[1:])
            return
        if isinstance(node, list | tuple | range):
            raise LayoutError(f"weights={weights!r} was found for a placement; {what} expected")
        flat.append(_weight(node, weights))

    read(weights.tolist() if hasattr(weights, "tolist") else weights, hierarchy)
    found = []
    step = len(flat)
    for n in hierarchy:
        step //= n
        line = [flat[i * step] for i in range(n)]
        common = math.gcd(*line)
        found.append(tuple(w // common for w in line))
    products = [math.prod(line) for line in itertools.product(*found)]
    if any(w * products[0] != p * flat[0] for w, p in zip(flat, products, strict=True)):
        raise LayoutError(
            f"weights={weights!r} was found for a mesh of {sizes}, by which the devices along an axis do not share "
            f"alike everywhere; a product of weights along each axis was expected, such as [[4, 2], [2, 1]], "
            f"where each row is twice the next one, and so is each column"
        )
    return tuple(found)


def _weight(value: Any, weights: Any) -> int:
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not 1 <= found <= MOST_WEIGHT:
        hint = "; of 1.5 and 1 make 3 and 2" if isinstance(value, float) and math.isfinite(value) and value > 0 else ""
        raise LayoutError(
            f"the weight {value!r} was found in weights={weights!r} of a placement; a whole number from 1 to "
            f"{MOST_WEIGHT:,} was expected for each rank: its share of a split dim, in proportion to the others{hint}"
        )
    return found
