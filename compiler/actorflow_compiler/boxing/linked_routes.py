"""Routes on hardware whose links are not all alike, such as from the devices of one node to those of another.

``aligned_route`` counts bytes.  What each device of a pipeline stage needs whole would cross the link between nodes
once for each of them; here it crosses once in all: each device sends a part to its like, and those gather the parts
over the links inside of their node.
"""

from __future__ import annotations

import math

from actorflow_compiler.boxing.aligned import MOST, NotAlignedError, aligned_route
from actorflow_compiler.boxing.routes import Hop, Shape, groups_along
from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_compiler.core.ops import ITEM_BYTES, Meta
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.runs import length
from actorflow_compiler.core.sbp import B, NdSbp, P, Sbp, Split
from actorflow_compiler.plan.region import count, region


def link_along(hardware: Hardware, placement: Placement, axis: int) -> Link:
    """The slowest link of the groups of devices along a mesh axis of a placement."""
    links = {hardware.link(group, collective=True) for group in groups_along(placement, (axis,))}
    return min(links, key=lambda link: (link.bytes_per_s, -link.latency_s))


def are_linked_one_to_one(source: Placement, target: Placement) -> bool:
    """Whether each device has its like on the other placement: meshes of one shape, without weights or common ranks."""
    return (
        source.hierarchy == target.hierarchy
        and not (source.weights or target.weights)
        and set(source.ranks).isdisjoint(target.ranks)
    )


def seconds_in_parts(source: Sbp, target: Sbp, nbytes: float, count: int, near: Link, far: Link) -> float:
    """Seconds from one placement to another, whose devices are linked one to one, along one mesh axis of ``count``.

    Each device sends its part over the link ``far``; ``near`` are the links inside of the placements, over which what
    are partial sums is reduced before, and what is needed whole is gathered afterwards.  Infinite to partial sums.
    """
    if target == P:
        return math.inf
    inside = nbytes * (1 - 1 / count) / near.bytes_per_s + near.latency_s
    return nbytes / count / far.bytes_per_s + far.latency_s + inside * ((source == P) + (target == B))


class LinkedRoutes:
    """The routes of values on some hardware, each found once."""

    def __init__(self, hardware: Hardware, most: float = math.inf) -> None:
        """``most``: see ``aligned_route``."""
        self.hardware, self.most = hardware, most
        self._found: dict[tuple[Meta, Placement, NdSbp, Placement, NdSbp], tuple[Hop, ...]] = {}

    def find(self, meta: Meta, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> tuple[Hop, ...]:
        """The hops that take a value from one layout to another, in order.  Raises as ``aligned_route``."""
        key = (meta, source, a, target, b)
        if key not in self._found:
            middle = self._parts(meta, source, a, target, b)
            if middle is None:
                self._found[key] = self._route(meta.shape, source, a, target, b)
            else:
                ways = (source, a, source, middle), (source, middle, target, middle), (target, middle, target, b)
                self._found[key] = tuple(hop for way in ways for hop in self._route(meta.shape, *way))
        return self._found[key]

    def _route(self, shape: Shape, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> tuple[Hop, ...]:
        """The route by bytes alone; of many devices, what becomes a partial sum is first taken whole by all of them.

        It moves more, and which devices take what is known without a look at all pairs of them.
        """
        whole = tuple(B if y == P and x != P else y for x, y in zip(a, b, strict=False))
        if source.size * target.size <= MOST or len(a) != len(b) or whole == b:
            return aligned_route(shape, source, a, target, b, self.most)
        try:
            return aligned_route(shape, source, a, target, b, MOST)
        except NotAlignedError:
            ways = (source, a, target, whole), (target, whole, target, b)
            return tuple(hop for way in ways for hop in aligned_route(shape, *way, self.most))

    def _parts(self, meta: Meta, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> NdSbp | None:
        """The layout in whose parts a value crosses a slow link; None where that would save no time."""
        if source == target or not meta.shape or not are_linked_one_to_one(source, target):
            return None
        far = self.hardware.link((*source.ranks, *target.ranks))
        whole = count(region(meta.shape, b, target, 0)) * ITEM_BYTES[meta.dtype]
        middle, saved = list(b), 0.0
        for k, n in enumerate(source.hierarchy):
            if n == 1 or (a[k] == b[k] and isinstance(a[k], Split)):
                continue
            near = link_along(self.hardware, target, k)
            part = b[k] if isinstance(b[k], Split) else _even_split(meta.shape, source, a[k], tuple(middle), k)
            if b[k] == P or part is None or near.bytes_per_s <= far.bytes_per_s:
                return None
            middle[k] = part
            if b[k] == B:  # all but a part of it moves inside of nodes, and not between them
                each = whole * (1 - 1 / n)
                saved += each / far.bytes_per_s - each / near.bytes_per_s - near.latency_s
            elif a[k] == P:  # terms are reduced to what is sent: to one device, and not to all
                saved += (n - 1) * far.latency_s
            if isinstance(a[k], Split) and part != a[k]:  # other parts are exchanged before
                saved -= whole / n / near.bytes_per_s + near.latency_s
        return tuple(middle) if saved > 0 else None


def _even_split(shape: Shape, place: Placement, given: Sbp, here: NdSbp, axis: int) -> Split | None:
    """The split along a mesh axis into equal parts of what a device holds in the layout ``here``, if there is one.

    It is the one ``given`` if that is equal, else of the first dimension that no later axis splits, nor any in blocks.
    """
    taken = {e.dim for k, e in enumerate(here) if isinstance(e, Split) and (k > axis or e != Split(e.dim))}
    sizes = [length(runs) for runs in region(shape, here, place, 0)]
    even = [d for d, size in enumerate(sizes) if size and size % place.hierarchy[axis] == 0 and d not in taken]
    if isinstance(given, Split) and given.dim in even:
        return given
    return Split(even[0]) if even else None
