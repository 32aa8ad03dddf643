"""An op that moves or selects elements goes in; its term, which depends on shapes and arguments, comes out."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from actorflow_compiler.ops import Arg, Meta, Ref
from actorflow_compiler.signatures.call import OpCall, bind, first_out, operand

LOWER = string.ascii_lowercase
Shape = tuple[int, ...]


def view(call: OpCall) -> str | None:
    """Cut both shapes at each other's boundaries: ``[6,4] -> [2,12]`` is ``(ab)c->a(bc)``."""
    into, out = _refine(call.ins[0].shape, first_out(call).shape)
    return f"{into}+,#->{out}"


def _refine(x: Shape, y: Shape) -> tuple[str, str]:
    if 0 in x:
        return "".join(LOWER[: len(x)]).upper(), "".join(LOWER[: len(y)]).upper()
    names = iter(LOWER[::-1])
    left, right = _Dims(x), _Dims(y)
    while left.rest > 1 or right.rest > 1:
        a, b = left.rest, right.rest
        if a % b == 0 or b % a == 0:
            letter = next(names)
            left.take(letter, min(a, b))
            right.take(letter, min(a, b))
            continue
        for side in (left, right):  # no common boundary here: up to the next one nothing may be split
            side.take(next(names).upper(), side.rest)
        while a != b:
            side, a, b = (left, a * left.rest, b) if a < b else (right, a, b * right.rest)
            side.take(next(names).upper(), side.rest)
    return left.text(), right.text()


class _Dims:
    """The dims of a shape, taken from the right in pieces."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.groups: list[str] = [""] * len(shape)
        self.at = len(shape)
        self.rest = 1  # what is left of the current dim
        self.next()

    def next(self) -> None:
        while self.rest == 1 and self.at > 0:
            self.at -= 1
            self.rest = self.shape[self.at]

    def take(self, letter: str, size: int) -> None:
        self.groups[self.at] = letter + self.groups[self.at]
        self.rest //= size
        self.next()

    def text(self) -> str:
        return "".join("1" if not g else g if len(g) == 1 else f"({g})" for g in self.groups)


def transpose(call: OpCall) -> str:
    """``ab -> ba``."""
    _, i, j = bind(call)
    order = list(range(len(call.ins[0].shape)))
    if order:
        order[i], order[j] = order[j], order[i]
    return _permuted(order)


def permute(call: OpCall) -> str:
    """Dims in another order."""
    order = bind(call)[1]
    return _permuted([d % len(order) for d in order])


def _permuted(order: Sequence[int]) -> str:
    return f"{LOWER[: len(order)]}+,_->{''.join(LOWER[d] for d in order)}"


def unsqueeze(call: OpCall) -> str:
    """A new dim of size 1."""
    rank = len(call.ins[0].shape)
    d = bind(call)[1] % (rank + 1)
    return f"{LOWER[:rank]}+,_->{LOWER[:d]}1{LOWER[d:rank]}"


def squeeze(call: OpCall) -> str:
    """Dims of size 1 dropped."""
    shape, out = call.ins[0].shape, len(first_out(call).shape)
    rank = len(shape)
    dims = bind(call)[1:]
    chosen = range(rank) if not dims else dims[0] if isinstance(dims[0], tuple) else dims
    gone = {d % rank for d in chosen if shape[d] == 1} if rank else set()
    assert rank - len(gone) == out, call
    return f"{LOWER[:rank]}+->{''.join(c for d, c in enumerate(LOWER[:rank]) if d not in gone)}"


def expand(call: OpCall) -> str:
    """Dims of size 1 and new ones repeated."""
    x, rank = call.ins[0].shape, len(first_out(call).shape)
    letters = LOWER[:rank]
    return f"{letters[rank - len(x) :]}+,#->{letters}"


def repeat(call: OpCall) -> str:
    """``ab -> (Ra)b``."""
    x, times = call.ins[0].shape, bind(call)[1]
    new = len(times) - len(x)
    out = [
        c.upper() if i < new else c if n == 1 else f"({'ZYXWVUTS'[i % 8]}{c})"
        for i, (c, n) in enumerate(zip(LOWER, times, strict=False))
    ]
    return f"{LOWER[new : len(times)]}+,_->{''.join(out)}"


def _one_other(rank: int, dim: int, inside: str, outside: str) -> tuple[str, str]:
    """Two tensors that differ in one dim."""
    before, after = LOWER[:dim], LOWER[dim + 1 : rank]
    return before + inside + after, before + outside + after


def _blocks(size: int, part: int, start: int, dim: int) -> tuple[str, str] | None:
    """``(Qa)`` and ``a`` if the part of a dim is one of its equal blocks."""
    letter = LOWER[dim]
    if part and size % part == 0 and start % part == 0:
        return (f"(Q{letter})", letter) if size > part else (letter, letter)
    return None


def start_of(start: Arg, size: int) -> int:
    """Where a slice of a dim begins."""
    value = start or 0
    return int(max(0, min(size, value + size if value < 0 else value)))


def slice_(call: OpCall) -> str:
    """``x[:, lo:hi]``; one of several equal blocks may be split, each of them alike."""
    x, y = call.ins[0].shape, first_out(call).shape
    _, dim, start, _, step = bind(call)
    d = dim % len(x)
    pair = _blocks(x[d], y[d], start_of(start, x[d]), d) if step == 1 else None
    into, out = _one_other(len(x), d, *(pair or ("Y", "Z")))
    return f"{into}+->{out}"


def slice_backward(call: OpCall) -> str:
    """The gradient put at its place among zeros."""
    grad, full = call.ins[0].shape, first_out(call).shape
    _, _, dim, start, _, step = bind(call)
    d = dim % len(full)
    pair = _blocks(full[d], grad[d], start_of(start, full[d]), d) if step == 1 else None
    into, out = _one_other(len(full), d, *(pair or ("Y", "Z")))
    return f"{out}+,#->{into}"


def slice_scatter(call: OpCall) -> str:
    """A part of a tensor replaced."""
    x = call.ins[0].shape
    into, out = _one_other(len(x), bind(call)[2] % len(x), "Y", "Z")
    return f"{into}+,{out}+->{into}"


def select(call: OpCall) -> str:
    """``x[:, i]``."""
    x = call.ins[0].shape
    into, out = _one_other(len(x), bind(call)[1] % len(x), "Z", "")
    return f"{into}+->{out}"


def select_backward(call: OpCall) -> str:
    """The gradient put at its place among zeros."""
    full = first_out(call).shape
    into, out = _one_other(len(full), bind(call)[2] % len(full), "Z", "")
    return f"{out}+,#->{into}"


def select_scatter(call: OpCall) -> str:
    """One index of a dim replaced."""
    x = call.ins[0].shape
    into, out = _one_other(len(x), bind(call)[2] % len(x), "Z", "")
    return f"{into}+,{out}+->{into}"


def unbind(call: OpCall) -> str:
    """All indices of a dim."""
    x = call.ins[0].shape
    into, out = _one_other(len(x), bind(call)[1] % len(x), "Z", "")
    return f"{into}+->{','.join([out] * len(call.outs))}"


def split(call: OpCall) -> str:
    """Consecutive parts of a dim; equal ones may be split, each alike: ``(Qa) -> a,a,a``."""
    x = call.ins[0].shape
    _, sizes, dim = bind(call)
    d = dim % len(x)
    letter = LOWER[d]
    count = len(call.outs)
    equal = len(set(sizes)) == 1 if isinstance(sizes, tuple) else sizes * count == x[d]
    if equal:
        into, out = _one_other(len(x), d, f"(Q{letter})", letter)
    else:
        into, out = _one_other(len(x), d, "Y", "Z")
    return f"{into}+->{','.join([out] * count)}"


def cat(call: OpCall) -> str | None:
    """Tensors joined along a dim; equal ones may be split there, each alike: ``a;a -> (Qa)``."""
    tensors, dim = bind(call)
    y = first_out(call).shape
    shapes = [operand(call, t).shape for t in tensors]
    if any(len(s) != len(y) for s in shapes):  # torch drops 1-dim empty tensors
        return None
    d = dim % len(y)
    letter = LOWER[d]
    if len(set(shapes)) == 1:
        out, each = _one_other(len(y), d, f"(Q{letter})", letter)
        return f"{each}+->{out}"
    out, each = _one_other(len(y), d, "Y", "Z")
    return f"{each}+->{out}"


def stack(call: OpCall) -> str:
    """Tensors joined along a new dim."""
    rank = len(first_out(call).shape)
    out, each = _one_other(rank, bind(call)[1] % rank, "Z", "")
    return f"{each}+->{out}"


def pad(call: OpCall) -> str:
    """Constants around a tensor."""
    _, pads, _ = bind(call)
    rank = len(call.ins[0].shape)
    padded = {rank - 1 - i // 2 for i, n in enumerate(pads) if n}
    into = "".join(c.upper() if d in padded else c for d, c in enumerate(LOWER[:rank]))
    return f"{into}+,_,+->{into}"


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
    """Sums into places: the positions may be split, each part gives terms of the sum."""
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
    into, out = _one_other(len(x), bind(call)[1] % len(x), "Z", "z")
    return f"{into}+,_,z->{out}"


def index_add(call: OpCall) -> str | None:
    """Sums into rows."""
    x = call.ins[0].shape
    if not x or len(call.ins[1].shape) != 1:
        return None
    into, source = _one_other(len(x), bind(call)[1] % len(x), "Z", "z")
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
    if not (accumulate and whole):  # which of several values for one place wins, or how often one counts, would change
        frozen = set(along) - {";"}
        along, out = along.upper(), "".join(c.upper() if c in frozen else c for c in out)
    return f"{source}+,{along},{out}+->{source}"


def unpack(call: OpCall) -> str:
    """One of several equal pieces: ``(Qa) -> a``."""
    rank = len(call.ins[0].shape)
    d = call.args[1] % rank
    into, out = _one_other(rank, d, f"(Q{LOWER[d]})", LOWER[d])
    return f"{into}+->{out}"


def pack(call: OpCall) -> str:
    """Equal pieces joined: ``a -> (Qa)``."""
    rank = len(call.ins[0].shape)
    d = call.args[1] % rank
    out, each = _one_other(rank, d, f"(Q{LOWER[d]})", LOWER[d])
    return f"{each}+->{out}"
