"""Layouts (SBP) of a logical tensor over one axis of a mesh: split, broadcast or partial sum; and their arithmetic.

Text forms: ``S(0)``, ``S(0,3)`` (three outer blocks), ``S(0,1,16)`` (units of sixteen), ``B``, ``P``; their ``repr`` is
what users write.

How a split dim is shared among the devices of an axis is decided by ``share`` alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actorflow_compiler.core.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Split:
    """Dimension ``dim`` is cut over the devices.

    The dimension is read as ``blocks`` equal outer blocks; each block, in units of ``unit``
    elements, is cut as evenly as possible (the first devices get the remainder), or by the weights
    of the devices (``share``).  ``blocks`` is 3 for a fused QKV projection; ``unit`` is 16 for rows
    of 16 elements that must stay together.
    """

    dim: int
    blocks: int = 1
    unit: int = 1

    def __str__(self) -> str:
        tail = (self.blocks, self.unit) if self.unit != 1 else (self.blocks,) if self.blocks != 1 else ()
        return f"S({','.join(map(str, (self.dim, *tail)))})"

    def __repr__(self) -> str:
        return f"flow.sbp.split({self.dim})" if (self.blocks, self.unit) == (1, 1) else str(self)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every device holds the whole tensor."""

    def __str__(self) -> str:
        return "B"

    def __repr__(self) -> str:
        return "flow.sbp.broadcast"


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Every device holds a term; the tensor is their sum."""

    def __str__(self) -> str:
        return "P"

    def __repr__(self) -> str:
        return "flow.sbp.partial_sum"


Sbp = Split | Broadcast | PartialSum
NdSbp = tuple[Sbp, ...]  # one entry for each axis of the mesh
Parts = int | tuple[int, ...]  # the devices along a mesh axis: how many equal ones, or a weight above 0 for each
B = Broadcast()
P = PartialSum()


def parse(text: str) -> Sbp:
    """``"S(0)"`` → ``Split(0)``.  Raises LayoutError for anything that is not the text of an SBP."""
    text = text.strip()
    if text in ("B", "P"):
        return B if text == "B" else P
    found = re.fullmatch(r"S\((-?\d+)(?:,(\d+))?(?:,(\d+))?\)", text.replace(" ", ""))
    if not found:
        raise LayoutError(f"found {text!r} where an SBP was expected: write S(dim), B or P")
    dim, blocks, unit = found.groups()
    return Split(int(dim), int(blocks or 1), int(unit or 1))


def parse_nd(text: str) -> NdSbp:
    """``"[S(0),B]"`` or ``"S(0)"`` → a tuple with one SBP for each mesh axis."""
    text = text.strip()
    if text.startswith("["):
        return tuple(parse(part) for part in re.findall(r"S\([^)]*\)|[BP]", text))
    return (parse(text),)


def show(sbp: Sbp | Iterable[Sbp]) -> str:
    """The short text form; a one-axis tuple prints without brackets."""
    if isinstance(sbp, Split | Broadcast | PartialSum):
        return str(sbp)
    parts = [str(s) for s in sbp]
    return parts[0] if len(parts) == 1 else f"[{','.join(parts)}]"


def device_count(parts: Parts) -> int:
    """The number of devices along an axis."""
    return parts if isinstance(parts, int) else len(parts)


def even_shares(parts: Parts) -> int:
    """The number of which a size has to be a multiple, so that every device gets exactly what its weight says."""
    return parts if isinstance(parts, int) else sum(parts)


def largest(parts: Parts) -> int:
    """The device of an axis that never gets less than any other: the first one of the largest weight."""
    return 0 if isinstance(parts, int) else parts.index(max(parts))


def smallest(parts: Parts) -> int:
    """The device of an axis that never gets more than any other: the last one of the smallest weight."""
    return parts - 1 if isinstance(parts, int) else len(parts) - 1 - parts[::-1].index(min(parts))


def share(units: int, parts: Parts, index: int) -> tuple[int, int]:
    """The half-open range that device ``index`` of ``parts`` owns of ``units`` things.

    Equal devices get equally many, the first ones one more where that does not go.  With weights, each gets
    ``units`` · weight / (sum of the weights), rounded down, and those with the largest remainders (the first of equal
    ones) one more.  Equal weights give what no weights give, and a larger weight never gets less than a smaller one.
    """
    if isinstance(parts, int):
        small, extra = divmod(units, parts)
        start = index * small + min(index, extra)
        return start, start + small + (index < extra)
    bounds = _bounds(units, parts)
    return bounds[index], bounds[index + 1]


@functools.lru_cache(maxsize=1 << 14)
def _bounds(units: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Where the share of each device begins, and where the last one ends."""
    total = sum(weights)
    counts = [units * w // total for w in weights]
    order = sorted(range(len(weights)), key=lambda i: -(units * weights[i] % total))
    for i in order[: units - sum(counts)]:
        counts[i] += 1
    return (0, *itertools.accumulate(counts))


def all_share(units: int, parts: Parts) -> bool:
    """Whether every device gets some of ``units`` things."""
    start, stop = share(units, parts, smallest(parts))
    return start < stop


def spans(size: int, split: Split, parts: Parts, index: int) -> tuple[tuple[int, int], ...]:
    """The ranges (start, length) of a dimension of ``size`` elements that one device holds, in order.

    One range for each outer block.  Raises LayoutError when ``size`` is no multiple of blocks·unit.
    """
    block, rest = divmod(size, split.blocks)
    if rest or block % split.unit:
        raise LayoutError(f"{split} does not fit a dimension of {size}: {split.blocks} blocks of units of {split.unit}")
    start, stop = share(block // split.unit, parts, index)
    lo, n = start * split.unit, (stop - start) * split.unit
    return tuple((b * block + lo, n) for b in range(split.blocks))


def local_size(size: int, split: Split, parts: Parts, index: int) -> int:
    """How many elements of a dimension of ``size`` one device holds."""
    return sum(n for _, n in spans(size, split, parts, index))


def local_shape(shape: Sequence[int], sbp: Sbp, parts: Parts, index: int) -> tuple[int, ...]:
    """The shape of one device's part of a tensor of ``shape`` along one mesh axis."""
    if not isinstance(sbp, Split):
        return tuple(shape)
    out = list(shape)
    out[sbp.dim] = local_size(out[sbp.dim], sbp, parts, index)
    return tuple(out)


def canonical(split: Split, size: int, parts: Parts) -> Split:
    """The same cut with the smallest description: the unit is dropped where the cut is even."""
    if split.unit != 1 and split.blocks and (size // (split.blocks * split.unit)) % even_shares(parts) == 0:
        return Split(split.dim, split.blocks, 1)
    return split


def check_fits(sbp: Sbp, shape: Sequence[int], parts: Parts, what: str) -> Sbp:
    """Return ``sbp`` with its dim made non-negative; raise LayoutError if a tensor of ``shape`` cannot have it.

    ``what`` names the tensor in the error.
    """
    if not isinstance(sbp, Split):
        return sbp
    rank = len(shape)
    if not -rank <= sbp.dim < rank:
        raise LayoutError(
            f"{what} has shape {tuple(shape)}, so {sbp} does not fit it: dim {sbp.dim} was found, "
            f"a dim in [{-rank}, {rank}) was expected; choose another dim or broadcast"
        )
    fixed = Split(sbp.dim % rank, sbp.blocks, sbp.unit)
    size = shape[fixed.dim]
    if size % (fixed.blocks * fixed.unit):
        raise LayoutError(
            f"{what} has shape {tuple(shape)}: dim {fixed.dim} of {size} is not a multiple of "
            f"{fixed.blocks * fixed.unit} as {fixed} needs"
        )
    if size < device_count(parts):
        raise LayoutError(
            f"{what} has shape {tuple(shape)}: dim {fixed.dim} of size {size} cannot be split over "
            f"{device_count(parts)} devices; split a larger dim or broadcast"
        )
    return fixed


def numel(shape: Iterable[int]) -> int:
    """The number of elements of a tensor of ``shape``."""
    return math.prod(shape)
