"""``flow.placement``: make a placement from a device type and ranks."""

from __future__ import annotations

import operator
from typing import Any

from actorflow.support.nearest_names import unknown_attribute
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.placement import placement as make

__all__ = ["placement"]


class _Placements:
    """``placement(type, ranks, weights)`` makes a placement of these ranks, ``placement.all(type)`` of all ranks."""

    __slots__ = ()

    def __call__(self, type: str, ranks: Any = None, weights: Any = None) -> Placement:
        """The devices of ``ranks``: a list, a range or an array; if it is nested or has several dims, a mesh.

        ``weights`` say how unequal devices share: a whole number from 1 to 1,000,000 for each rank, nested as the
        ranks are.  Of a dim that is split over the devices, each gets a contiguous part of weight / (sum of the
        weights) of it, rounded so that the largest remainders get one element more; a device may get none.  Those of a
        mesh have to be a product of weights along each axis.  Equal weights, such as ``[2, 2]``, are the same as none,
        and ``[4, 2]`` are the same as ``[2, 1]``.

        >>> flow.placement("cuda", ranks=[[0, 1], [2, 3]]).hierarchy
        (2, 2)
        >>> print(flow.placement("cuda", [0, 1], weights=[4, 2]))
        cuda:[0,1]*[2,1]

        Raises LayoutError for ranks that do not form a placement, and for weights that do not fit them.
        """
        if ranks is None:
            raise LayoutError(
                f'placement("{type}") was found without ranks; write placement("{type}", [0, 1]), or '
                f'placement.all("{type}") for all of them'
            )
        return make(type, _listed(ranks), weights)

    def all(self, type: str) -> Placement:
        """The devices of all ranks of this run, in one dimension.

        >>> flow.placement.all("cpu")
        Placement(type='cpu', ranks=(0,), hierarchy=(1,))
        """
        from actorflow.eager.current import world

        return make(type, range(world()))

    def __getattr__(self, name: str) -> Any:
        raise unknown_attribute(self, "flow.placement", name)

    def __instancecheck__(self, thing: object) -> bool:
        return isinstance(thing, Placement)

    def __repr__(self) -> str:
        return "actorflow.placement"


def _listed(ranks: Any) -> Any:
    """Convert arrays, tuples and ranges to nested lists of plain integers."""
    if hasattr(ranks, "tolist"):
        ranks = ranks.tolist()
    if isinstance(ranks, list | tuple | range):
        return [_listed(r) for r in ranks]
    try:
        return operator.index(ranks)
    except TypeError:
        raise LayoutError(
            f"{ranks!r} was found among the ranks of a placement; integers, or nested lists, ranges or arrays of them "
            f"were expected"
        ) from None


placement = _Placements()
