"""``Layout``: the placement of a tensor and one SBP for each axis of its mesh, checked as users write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Broadcast, NdSbp, P, PartialSum, Sbp, Split, show
from actorflow_compiler.plan.region import device_shape

_known: dict[tuple[Placement, NdSbp], Layout] = {}

NOWHERE = (0,)  # the shape of the part of a tensor on a rank outside of its placement


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A placement, and one SBP for each axis of its mesh.

    There is one object for each (placement, sbp), so that layouts compare and hash by identity.
    Text form: ``S(0) on cpu:[0,1]``.
    """

    placement: Placement
    sbp: NdSbp

    def __new__(cls, placement: Placement, sbp: NdSbp) -> Layout:
        """Return the one object for this placement and sbp."""
        key = (placement, sbp)
        found = _known.get(key)
        # of two threads that make the same one at once, both get the first, and each fills in the same fields
        return found if found is not None else _known.setdefault(key, object.__new__(cls))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Layout, (self.placement, self.sbp))

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: object) -> Layout:
        return self

    def __str__(self) -> str:
        return f"{show(self.sbp)} on {self.placement}"


def layout_of(placement: object, sbp: object, shape: Sequence[int] | None = None, what: str = "this tensor") -> Layout:
    """The layout of a user's placement and sbp: one SBP, or a list with one for each axis of the placement's mesh.

    With the logical ``shape`` of the tensor, negative dims are counted from the end, and a dim that it does not have
    is an error.  Raises LayoutError for anything that is no placement, no SBP, or does not fit the mesh or the shape.
    """
    if not isinstance(placement, Placement):
        raise LayoutError(
            f"{placement!r} was found where the placement of {what} was expected; "
            f'write placement=flow.placement("cpu", [0, 1])'
        )
    given = (sbp,) if isinstance(sbp, Split | Broadcast | PartialSum) else sbp
    if not isinstance(given, list | tuple):
        raise LayoutError(f"{sbp!r} was found where the sbp of {what} was expected; {_HOW}")
    axes = len(placement.hierarchy)
    if len(given) != axes:
        raise LayoutError(
            f"{len(given)} sbp entr{'y was' if len(given) == 1 else 'ies were'} found for {what}; its placement "
            f"{placement} has {axes} mesh ax{'is' if axes == 1 else 'es'}, so {axes} "
            f"{'was' if axes == 1 else 'were'} expected, one for each: sbp=[flow.sbp.broadcast, …]"
        )
    entries = tuple(_entry(entry, shape, what) for entry in given)
    return Layout(placement, entries)


_HOW = "flow.sbp.split(dim), flow.sbp.broadcast or flow.sbp.partial_sum was expected, or a list with one for each axis"


def _entry(entry: object, shape: Sequence[int] | None, what: str) -> Sbp:
    """One entry as the plain value, its dim counted from the front."""
    if isinstance(entry, Broadcast):
        return B
    if isinstance(entry, PartialSum):
        return P
    if not isinstance(entry, Split):
        raise LayoutError(f"{entry!r} was found as an sbp of {what}; {_HOW}")
    if shape is None:
        return entry
    if not -len(shape) <= entry.dim < len(shape):
        raise LayoutError(
            f"{entry} was found for {what} of shape {tuple(shape)}, which has {len(shape)} dims; "
            + (f"a dim in [{-len(shape)}, {len(shape)}) was expected" if shape else "broadcast was expected")
        )
    return Split(entry.dim % len(shape), entry.blocks, entry.unit)


def everywhere(placement: Placement) -> Layout:
    """The layout of a tensor that is whole on every device of a placement."""
    return Layout(placement, (B,) * len(placement.hierarchy))


@lru_cache(maxsize=1 << 14)
def local_shape(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The shape of the part that ``rank`` holds of a tensor of logical ``shape``; ``(0,)`` outside of the placement.

    Raises LayoutError for a split that does not fit the shape.
    """
    if rank not in layout.placement:
        return NOWHERE
    return device_shape(shape, layout.sbp, layout.placement, layout.placement.index(rank))


def is_whole(layout: Layout) -> bool:
    """Whether every device of the placement has the whole tensor."""
    sizes = zip(layout.sbp, layout.placement.hierarchy, strict=True)
    return all(entry == B or n == 1 for entry, n in sizes)


def has_terms(layout: Layout) -> bool:
    """Whether the tensor is a partial sum along some axis: the sum of terms on different devices."""
    return any(entry == P and n > 1 for entry, n in zip(layout.sbp, layout.placement.hierarchy, strict=True))
