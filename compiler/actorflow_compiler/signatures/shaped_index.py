"""Terms of ops that read or write elements at given positions; they depend on the shapes of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorflow_compiler.core.op_call import OpCall, bind, operand
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.signatures.shaped_views import LOWER, one_other


def _aligned(x: Meta, index: Meta, dim: Any, along: str) -> tuple[str, str]:
    """Source and index of gather and scatter: dims other than ``dim`` run together where they are equal."""
    rank = len(x.shape)
    d = dim % max(1, rank)
    shared = [c if x.shape[k] == index.shape[k] else c.upper() for k, c in enumerate(LOWER[:rank])]
    return "".join("Z" if k == d else c for k, c in enumerate(shared)), "".join(
        along if k == d else c for k, c in enumerate(shared)
    )


def gather(call: OpCall) -> str | None:
    """``aZ,_,ai->ai``."""
    x, dim, index, *_ = bind(call)
    if len(operand(call, index).shape) != len(operand(call, x).shape):
        return None
    source, at = _aligned(operand(call, x), operand(call, index), dim, "z")
    return f"{source}+,_,{at}->{at}"


def scatter(call: OpCall) -> str | None:
    """Elements replaced by other tensors' or by a number."""
    x, dim, index, source = bind(call)
    same = [operand(call, v) for v in (x, index, source) if isinstance(v, Ref)]
    if len({len(m.shape) for m in same}) != 1 or len({m.shape for m in same[1:]}) != 1:
        return None
    into, at = _aligned(same[0], same[1], dim, "Y")
    return f"{into}+,_,{at},{at if isinstance(source, Ref) else ''}+->{into}"


def scatter_add(call: OpCall) -> str | None:
    """Add elements at positions; the positions may be split, since each part gives terms of the sum."""
    x, dim, index, source = bind(call)
    same = [operand(call, v) for v in (x, index, source)]
    if len({len(m.shape) for m in same}) != 1 or same[1].shape != same[2].shape:
        return None
    into, at = _aligned(same[0], same[1], dim, "z")
    return f"{into}+,_,{at},{at}+->{into}"


def index_select(call: OpCall) -> str | None:
    """``aZb,_,i->aib``."""
    x = call.ins[0].shape
    if not x or len(call.ins[1].shape) != 1:
        return None
    into, out = one_other(len(x), bind(call)[1] % len(x), "Z", "z")
    return f"{into}+,_,z->{out}"


def index_add(call: OpCall) -> str | None:
    """Add rows at positions."""
    x = call.ins[0].shape
    if not x or len(call.ins[1].shape) != 1:
        return None
    into, source = one_other(len(x), bind(call)[1] % len(x), "Z", "z")
    return f"{into}+,_,z,{source}+->{into}"


def _indexed(x: Meta, positions: Sequence[Meta | None]) -> tuple[str, str, str] | None:
    """Terms of tensor, positions and result of ``x[i, :, j]``."""
    given = [p for p in positions if p is not None]
    if any(p.dtype in ("bool", "uint8") for p in given) or not given:
        return None
    rank = max(len(p.shape) for p in given)
    at = [k for k, p in enumerate(positions) if p is not None]
    source = "".join(c.upper() if k in at else c for k, c in enumerate(LOWER[: len(x.shape)]))
    along = LOWER[::-1][:rank]
    together = at == list(range(at[0], at[0] + len(at)))
    kept = [c for c in source if c.islower()]
    before = at[0] if together else 0
    out = "".join(kept[:before]) + along + "".join(kept[before:])
    return source, ";".join([along] * len(given)), out


def index(call: OpCall) -> str | None:
    """``x[i, :, j]`` with tensors of positions."""
    x, positions = bind(call)
    found = _indexed(operand(call, x), [None if p is None else operand(call, p) for p in positions])
    return None if found is None else f"{found[0]}+,{found[1]}->{found[2]}"


def index_put(call: OpCall) -> str | None:
    """``x[i, :, j] = values``, or ``+=``, where the positions may be split, too."""
    x, positions, values, accumulate, *_ = bind(call)
    found = _indexed(operand(call, x), [None if p is None else operand(call, p) for p in positions])
    if found is None:
        return None
    source, along, out = found
    sizes = dict(zip(source, operand(call, x).shape, strict=True))
    for p in positions:
        shape = operand(call, p).shape if p is not None else ()
        sizes |= {
            c: n for c, n in zip(reversed(along.split(";")[0]), reversed(shape), strict=False) if sizes.get(c, 1) == 1
        }
    whole = operand(call, values).shape == tuple(sizes[c] for c in out)
    if not (accumulate and whole):  # a split would change which duplicate wins, or how often one counts
        frozen = set(along) - {";"}
        along, out = along.upper(), "".join(c.upper() if c in frozen else c for c in out)
    return f"{source}+,{along},{out}+->{source}"


def _row(call: OpCall, source: bool) -> tuple[str, str] | None:
    """A tensor and the rows put into it; the positions are not split."""
    x = call.ins[0].shape
    if not x:
        return None
    return one_other(len(x), bind(call)[1] % len(x), "Z", "Y" if source else "")


def index_fill(call: OpCall) -> str | None:
    """Rows filled with a number."""
    pair = _row(call, False)
    return None if pair is None else f"{pair[0]}+,_,Y,+->{pair[0]}"


def index_copy(call: OpCall) -> str | None:
    """Rows replaced by others."""
    pair = _row(call, True)
    return None if pair is None else f"{pair[0]}+,_,Y,{pair[1]}+->{pair[0]}"


def index_reduce(call: OpCall) -> str | None:
    """Rows reduced at positions by product, mean or extreme."""
    pair = _row(call, True)
    return None if pair is None else f"{pair[0]},_,Y,{pair[1]}->{pair[0]}"


def scatter_reduce(call: OpCall) -> str | None:
    """Sums as ``scatter_add``; for products and extremes the positions are not split."""
    x, dim, index, source, reduce, *include = bind(call)
    same = [operand(call, v) for v in (x, index, source)]
    if len({len(m.shape) for m in same}) != 1 or same[1].shape != same[2].shape:
        return None
    linear = reduce in ("sum", "mean")
    into, at = _aligned(same[0], same[1], dim, "z" if reduce == "sum" and include[0] else "Y")
    return f"{into}+,_,{at},{at}+->{into}" if linear else f"{into},_,{at},{at}->{into}"


def put(call: OpCall) -> str:
    """Write values at positions of the flattened tensor; when they are added instead, they may be split, too."""
    _, index, source, accumulate = bind(call)
    return ":+,.,.+->:" if accumulate and operand(call, index).shape == operand(call, source).shape else ":+,:,:+->:"


def searchsorted(call: OpCall) -> str:
    """Insertion positions in sorted values, which are either shared or given for each row."""
    return "N,.,_,_,_,N->." if len(call.ins[0].shape) == 1 else ".N,.m,_,_,_,.N->.m"


def histc(call: OpCall) -> str | None:
    """Counts between given bounds are sums over the elements."""
    _, _, low, high = bind(call)
    return ".->N" if low < high else ":->:"


def masked_index(call: OpCall) -> str | None:
    """``x[i, j]`` where a mask is true, else a number."""
    return ":+,.,.,+->." if _everywhere(call) else None


def masked_index_put(call: OpCall) -> str | None:
    """The backward of ``masked_index``: values added at positions."""
    return ":+,.,.,.+->:" if _everywhere(call) else None


def _everywhere(call: OpCall) -> bool:
    """Whether every dim is indexed by a tensor of positions."""
    x, _, positions, _ = bind(call)
    return None not in positions and len(positions) == len(operand(call, x).shape)
