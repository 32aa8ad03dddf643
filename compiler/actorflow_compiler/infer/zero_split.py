"""Choose the dim that ZeRO splits of a variable, by how long its parts take to be gathered.

ZeRO's axis splits a dim before later mesh axes do.  If one of these splits the same dim, ZeRO splits it in blocks,
one for each part of the later axis, so that a device's part lies in what it needs once ZeRO's is gathered:
``[S(0,2),S(0)]`` beside a tensor axis of two devices.  Where sizes do not divide, it cannot, and the parts that a
device needs lie on devices of other groups as well: it lacks more, and asks for it over slower links.  For a bias and
the like, the bytes that this saves are not worth messages between all those devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from actorflow_compiler.boxing.routes import groups_along
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, NdSbp, Sbp, Split, device_count, even_shares
from actorflow_compiler.hints.constrain import Wish
from actorflow_compiler.infer.axes import UNEVEN
from actorflow_compiler.plan.region import count, intersect, nests, region

FEW = 1 << 17  # elements of a variable that is rather kept whole than split once more on a dim that is split already


def zero_split(beside: Wish, shape: Sequence[int], axis: int, placement: Placement, hardware: Hardware) -> Split | None:
    """The split along mesh axis ``axis`` of a variable of ``shape``; None if no dim is large enough, or it is small.

    ``beside`` are its layouts along the other axes, as far as they are known.  Dims that divide evenly, or nearly so,
    come before others; of these it is the one whose parts are gathered soonest, and of equally good ones the first.
    A variable of few elements is not split where later axes split all dims that it could be.
    """
    parts = placement.axes[axis]
    splits = [(k, e) for k, e in enumerate(beside) if isinstance(e, Split) and k != axis and placement.hierarchy[k] > 1]
    # (price, blocks, elements that some devices lack to have equally many, dim)
    even: list[tuple[float, int, int, int]] = []
    large: list[tuple[float, int, int, int]] = []
    for d, n in enumerate(shape):
        along = [placement.axes[k] for k, e in splits if e.dim == d]
        cut = math.prod(map(device_count, along))
        lacks = -n % (even_shares(parts) * math.prod(map(even_shares, along)))
        if not n or n // cut < device_count(parts):
            continue
        blocks = _blocks(n, axis, [(k, e) for k, e in splits if e.dim == d], placement)
        entries = tuple(
            Split(0, blocks) if k == axis else Split(0, e.blocks, e.unit) if isinstance(e, Split) and e.dim == d else B
            for k, e in enumerate((*beside, *(None,) * len(placement.hierarchy))[: len(placement.hierarchy)])
        )
        try:
            price = _lacked(n, entries, axis, placement) / _bandwidth(entries, axis, placement, hardware)
        except LayoutError:  # blocks or units that do not fit what ZeRO's axis leaves
            continue
        (even if lacks <= n * UNEVEN else large).append((price, blocks, lacks, d))
    mixed = {e.dim for k, e in splits if k > axis}
    if math.prod(shape) <= FEW and mixed and mixed >= {d for *_, d in (*even, *large)}:
        return None
    if not even and not large:
        return None
    _, blocks, _, dim = min(even) if even else min(large, key=lambda one: (one[0], -shape[one[3]]))
    return Split(dim, blocks)


def _blocks(n: int, axis: int, splits: Sequence[tuple[int, Split]], placement: Placement) -> int:
    """The blocks of ZeRO's split of a dim of ``n``, so that it leaves each part of a later axis in one group; or 1."""
    if len(splits) != 1 or splits[0][0] < axis:
        return 1
    ((later, entry),) = splits
    blocks = entry.blocks * placement.hierarchy[later]
    return blocks if nests(n, Split(0, blocks), placement.axes[axis], entry, placement.axes[later]) else 1


def _lacked(n: int, entries: NdSbp, axis: int, placement: Placement) -> float:
    """The largest fraction that a device lacks of the part of a dim of ``n`` that it needs once ZeRO's is gathered."""
    axes = tuple(k for k, e in enumerate(entries) if e != B)
    sizes = tuple(placement.hierarchy[k] for k in axes)
    weights = tuple(placement.weights[k] for k in axes) if placement.weights else ()
    mesh = Placement(placement.type, tuple(range(math.prod(sizes))), sizes, weights)
    return _lacked_on(n, tuple(entries[k] for k in axes), axes.index(axis), mesh)


@functools.lru_cache(maxsize=1 << 10)
def _lacked_on(n: int, entries: NdSbp, axis: int, mesh: Placement) -> float:
    gathered: tuple[Sbp, ...] = tuple(B if k == axis else e for k, e in enumerate(entries))
    most = 0.0
    for index in range(mesh.size):
        needed = region((n,), gathered, mesh, index)
        both = intersect(needed, region((n,), entries, mesh, index))
        if count(needed):
            most = max(most, 1 - (count(both) if both else 0) / count(needed))
    return most


def _bandwidth(entries: NdSbp, axis: int, placement: Placement, hardware: Hardware) -> float:
    """Bytes/s of the slowest link among the devices that gather a dim together.

    Later axes that split it mix groups, unless ZeRO splits it in blocks.
    """
    zero = entries[axis]
    mixes = isinstance(zero, Split) and zero.blocks == 1
    axes = tuple(k for k, e in enumerate(entries) if k == axis or (mixes and k > axis and e != B))
    return min(hardware.link(group, collective=True).bytes_per_s for group in groups_along(placement, axes))
