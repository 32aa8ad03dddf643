"""Choose the layouts of an op's operands and results, and the op that this rank then runs on its parts.

The table of signatures that jobs use says which layouts may go together; here the cheapest for this one op is taken,
one mesh axis after the other.  The choice is a pure function, so that it is the same on every rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actorflow.eager.layout import Layout
from actorflow_compiler.boxing.routes import busiest_bytes, bytes_bound
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import UNMEASURED
from actorflow_compiler.core.ops import ITEM_BYTES, Meta
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, NdSbp, P, Parts, Sbp, Split, largest, local_shape, smallest
from actorflow_compiler.infer.prices import LOCAL, Prices, prices_of
from actorflow_compiler.plan.region import coordinates
from actorflow_compiler.signatures import OpCall, Signature, local_call, signatures


@dataclass(frozen=True, slots=True)
class OpOperand:
    """The properties of an operand on which the choice depends."""

    meta: Meta  # of the whole
    layout: Layout
    name: str  # "argument 1 of aten.add.Tensor"
    small: bool = False  # a number or plain tensor, which every rank has


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layouts that an op is run with, and the op that this rank runs."""

    needs: tuple[Layout, ...]  # of each operand
    outs: tuple[Layout | None, ...]  # of each output
    local: OpCall | None  # the op that this rank runs; None outside of the placement


def placement_for(operands: Sequence[OpOperand], fixed: Placement | None = None) -> Placement:
    """The placement that an op runs on: that of its operands, else the one that costs the fewest bytes moved.

    ``fixed`` is the placement of a tensor that the op changes in place.  Raises LayoutError if two placements cost the
    same.
    """
    if fixed is not None:
        return fixed
    where = list(dict.fromkeys(o.layout.placement for o in operands if not o.small))
    if len(where) == 1:
        return where[0]
    cost = {p: sum(_move_bytes(o, p) for o in operands if not o.small) for p in where}
    best = min(cost.values())
    cheapest = [p for p in where if cost[p] == best]
    if len(cheapest) > 1:
        big = [o for o in operands if not o.small and (o.meta.shape or len(operands) == 2)] or operands
        lines = "\n".join(f"  {o.name}: {o.meta} {o.layout}" for o in big)
        ways = " or ".join(f"x.to_global(placement={_spelled(p)})" for p in cheapest)
        raise LayoutError(
            f"the operands are on different placements, and moving either way costs {best:.0f} bytes:\n{lines}\n"
            f"  say where the op is to run: move one of them with {ways}"
        )
    return cheapest[0]


def _spelled(p: Placement) -> str:
    """A placement as source text."""
    ranks: list[Any] = list(p.ranks)
    axes = [w or (1,) * n for w, n in zip(p.weights, p.hierarchy, strict=False)]  # of weights there may be none
    weights: list[Any] = [math.prod(line) for line in itertools.product(*axes)]
    return f'flow.placement("{p.type}", {_nested(ranks, p)}{f", weights={_nested(weights, p)}" if axes else ""})'


def _nested(values: list[Any], p: Placement) -> list[Any]:
    """The values of a placement's devices, nested as its mesh is."""
    for n in reversed(p.hierarchy[1:]):
        values = [values[i : i + n] for i in range(0, len(values), n)]
    return values


def _move_bytes(o: OpOperand, to: Placement) -> float:
    here = o.layout.placement
    if here == to:
        return 0.0
    sbp = o.layout.sbp if here.hierarchy == to.hierarchy else (B,) * len(to.hierarchy)
    return bytes_bound(o.meta.shape, ITEM_BYTES[o.meta.dtype], here, o.layout.sbp, to, sbp)


def choose(
    call: OpCall, operands: Sequence[OpOperand], placement: Placement, rank: int, kept: Sequence[tuple[int, int]] = ()
) -> LayoutChoice:
    """Choose a signature for each mesh axis.

    ``kept`` are (operand, output) pairs whose output should have the operand's present layout, because the op changes
    it in place; where no signature gives that, the cheapest is taken, and the caller moves the result back.
    """
    at = coordinates(placement, placement.index(rank)) if rank in placement else None
    first = mine = call
    needs: list[list[Sbp]] = [[] for _ in operands]
    outs: list[list[Sbp]] = [[] for _ in call.outs]
    ragged: set[tuple[int, int]] = set()
    for axis, parts in enumerate(placement.axes):
        have = [_entry(o, placement, axis) for o in operands]
        s = _cheapest(first, operands, have, placement, axis, ragged, kept)
        ragged |= _ragged(first, s, parts)
        for need, entry in zip(needs, s.ins, strict=True):
            need.append(entry)
        for out, made in zip(outs, s.outs, strict=True):
            out.append(made if made is not None else B)
        first = local_call(first, s, parts, largest(parts))
        if at is not None:
            mine = local_call(mine, s, parts, at[axis])
    return LayoutChoice(
        tuple(Layout(placement, tuple(need)) for need in needs),
        tuple(
            Layout(placement, tuple(out)) if meta is not None else None
            for out, meta in zip(outs, call.outs, strict=True)
        ),
        mine if at is not None else None,
    )


def _entry(o: OpOperand, placement: Placement, axis: int) -> Sbp:
    here: NdSbp = o.layout.sbp
    if o.layout.placement == placement:
        return here[axis]
    return here[axis] if o.layout.placement.hierarchy == placement.hierarchy else B


def _cheapest(
    call: OpCall,
    operands: Sequence[OpOperand],
    have: Sequence[Sbp],
    placement: Placement,
    axis: int,
    ragged: set[tuple[int, int]],
    kept: Sequence[tuple[int, int]],
) -> Signature:
    parts = placement.axes[axis]
    cuts = [e for e in have if isinstance(e, Split) and (e.blocks > 1 or e.unit > 1)]
    options = signatures(call, parts, wanted=cuts)
    if placement.hierarchy[axis] == 1:
        return options[0]
    fits = [s for s in options if not _splits_ragged(ragged, s) and _fits(call, s, parts)]
    assert fits, call  # all broadcast always fits

    prices = prices_of(UNMEASURED[placement.type].slowest)

    def cost(s: Signature) -> tuple[float, int]:
        """Seconds, then bytes that every device holds, which decide between equally fast signatures."""
        total = 0.0
        for o, meta, entry, need in zip(operands, call.ins, have, s.ins, strict=True):
            total += _seconds(entry, need, meta.nbytes, parts, o.small or o.layout.placement == placement, prices)
        for i, out in kept:
            made, meta = s.outs[out], call.ins[i]
            total += _seconds(made if made is not None else B, have[i], meta.nbytes, parts, True, prices)
        held = sum(m.nbytes for m, e in zip(call.outs, s.outs, strict=True) if m and not isinstance(e, Split))
        return total, held

    return min(fits, key=cost)


def _seconds(have: Sbp, need: Sbp, nbytes: int, parts: Parts, same: bool, prices: Prices) -> float:
    if same and have == need:
        return 0.0
    if need == P and isinstance(have, Split):  # nothing moves now, but the sum has to be made later
        have, need = P, B
    moved = busiest_bytes(have, need, nbytes, parts, parts, same)
    return moved / prices.bandwidth + prices.latency if moved else LOCAL


def _fits(call: OpCall, s: Signature, parts: Parts) -> bool:
    """Whether the signature's layouts fit the shapes, so that every device has its part."""
    try:
        for meta, entry in zip(call.ins, s.ins, strict=True):
            local_shape(meta.shape, entry, parts, largest(parts))
        local_call(call, s, parts, largest(parts))
    except LayoutError:
        return False
    return True


def _splits_ragged(ragged: set[tuple[int, int]], s: Signature) -> bool:
    """Whether a signature splits a dim whose size an earlier axis has made different on different devices."""
    return any(isinstance(e, Split) and (i, e.dim) in ragged for i, e in enumerate((*s.ins, *s.outs)))


def _ragged(call: OpCall, s: Signature, parts: Parts) -> set[tuple[int, int]]:
    """(number of the operand or output, dim) of the dims that are cut unevenly."""
    most, least = largest(parts), smallest(parts)
    return {
        (i, e.dim)
        for i, (meta, e) in enumerate(zip((*call.ins, *call.outs), (*s.ins, *s.outs), strict=True))
        if meta is not None
        and isinstance(e, Split)
        and local_shape(meta.shape, e, parts, most) != local_shape(meta.shape, e, parts, least)
    }
