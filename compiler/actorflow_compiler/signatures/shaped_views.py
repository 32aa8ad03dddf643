"""Terms of ops that move, join or select elements; they depend on the shapes and arguments of a call."""

from __future__ import annotations

import string
from collections.abc import Sequence

from actorflow_compiler.core.op_call import OpCall, bind, first_out, operand
from actorflow_compiler.core.ops import Arg

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
        c.upper() if i < new or not n else c if n == 1 else f"({'ZYXWVUTS'[i % 8]}{c})"
        for i, (c, n) in enumerate(zip(LOWER, times, strict=False))
    ]
    return f"{LOWER[new : len(times)]}+,_->{''.join(out)}"


def one_other(rank: int, dim: int, inside: str, outside: str) -> tuple[str, str]:
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
    """``x[:, lo:hi]``; if it is one of several equal blocks, the dim may be split within each block."""
    x, y = call.ins[0].shape, first_out(call).shape
    _, dim, start, _, step = bind(call)
    d = dim % len(x)
    pair = _blocks(x[d], y[d], start_of(start, x[d]), d) if step == 1 else None
    into, out = one_other(len(x), d, *(pair or ("Y", "Z")))
    return f"{into}+->{out}"


def slice_backward(call: OpCall) -> str:
    """The gradient put at its place among zeros."""
    grad, full = call.ins[0].shape, first_out(call).shape
    _, _, dim, start, _, step = bind(call)
    d = dim % len(full)
    pair = _blocks(full[d], grad[d], start_of(start, full[d]), d) if step == 1 else None
    into, out = one_other(len(full), d, *(pair or ("Y", "Z")))
    return f"{out}+,#->{into}"


def slice_scatter(call: OpCall) -> str:
    """A part of a tensor replaced."""
    x = call.ins[0].shape
    into, out = one_other(len(x), bind(call)[2] % len(x), "Y", "Z")
    return f"{into}+,{out}+->{into}"


def select(call: OpCall) -> str:
    """``x[:, i]``."""
    x = call.ins[0].shape
    into, out = one_other(len(x), bind(call)[1] % len(x), "Z", "")
    return f"{into}+->{out}"


def select_backward(call: OpCall) -> str:
    """The gradient put at its place among zeros."""
    full = first_out(call).shape
    into, out = one_other(len(full), bind(call)[2] % len(full), "Z", "")
    return f"{out}+,#->{into}"


def select_scatter(call: OpCall) -> str:
    """One index of a dim replaced."""
    x = call.ins[0].shape
    into, out = one_other(len(x), bind(call)[2] % len(x), "Z", "")
    return f"{into}+,{out}+->{into}"


def unbind(call: OpCall) -> str:
    """All indices of a dim."""
    x = call.ins[0].shape
    into, out = one_other(len(x), bind(call)[1] % len(x), "Z", "")
    return f"{into}+->{','.join([out] * len(call.outs))}"


def split(call: OpCall) -> str:
    """Consecutive parts of a dim; equal parts may be split, all in the same way: ``(Qa) -> a,a,a``."""
    x = call.ins[0].shape
    _, sizes, dim = bind(call)
    d = dim % len(x)
    letter = LOWER[d]
    count = len(call.outs)
    equal = len(set(sizes)) == 1 if isinstance(sizes, tuple) else sizes * count == x[d]
    if equal:
        into, out = one_other(len(x), d, f"(Q{letter})", letter)
    else:
        into, out = one_other(len(x), d, "Y", "Z")
    return f"{into}+->{','.join([out] * count)}"


def cat(call: OpCall) -> str | None:
    """Tensors joined along a dim; equal ones may be split there, all in the same way: ``a;a -> (Qa)``."""
    tensors, dim = bind(call)
    y = first_out(call).shape
    shapes = [operand(call, t).shape for t in tensors]
    if any(len(s) != len(y) for s in shapes):  # torch drops 1-dim empty tensors
        return None
    d = dim % len(y)
    letter = LOWER[d]
    if len(set(shapes)) == 1:
        out, each = one_other(len(y), d, f"(Q{letter})", letter)
        return f"{each}+->{out}"
    out, each = one_other(len(y), d, "Y", "Z")
    return f"{each}+->{out}"


def stack(call: OpCall) -> str:
    """Tensors joined along a new dim."""
    rank = len(first_out(call).shape)
    out, each = one_other(rank, bind(call)[1] % rank, "Z", "")
    return f"{each}+->{out}"


def pad(call: OpCall) -> str:
    """Constants around a tensor."""
    _, pads, _ = bind(call)
    rank = len(call.ins[0].shape)
    padded = {rank - 1 - i // 2 for i, n in enumerate(pads) if n}
    into = "".join(c.upper() if d in padded else c for d, c in enumerate(LOWER[:rank]))
    return f"{into}+,_,+->{into}"


def unpack(call: OpCall) -> str:
    """One of several equal pieces: ``(Qa) -> a``."""
    rank = len(call.ins[0].shape)
    d = call.args[1] % rank
    into, out = one_other(rank, d, f"(Q{LOWER[d]})", LOWER[d])
    return f"{into}+->{out}"


def pack(call: OpCall) -> str:
    """Equal pieces joined: ``a -> (Qa)``."""
    rank = len(call.ins[0].shape)
    d = call.args[1] % rank
    out, each = one_other(rank, d, f"(Q{LOWER[d]})", LOWER[d])
    return f"{each}+->{out}"


def arange(call: OpCall) -> str | None:
    """``a<a>``: a range of whole numbers may be split; fractions would round differently in each part."""
    return "->a<a>" if all(float(v).is_integer() for v in arange_of(call)) else None


def arange_of(call: OpCall) -> tuple[float, float]:
    """Start and step."""
    kind = call.op.rpartition(".")[2]
    if kind == "default":
        return 0, 1
    return call.args[0], bind(call)[2] if kind == "start_step" else 1


def _without(rank: int, dims: Sequence[int]) -> tuple[str, str]:
    """The indices of all dims, with ``dims`` never split, and the indices of the other dims alone."""
    gone = {d % rank for d in dims}
    letters = LOWER[:rank]
    return "".join(c.upper() if d in gone else c for d, c in enumerate(letters)), "".join(
        c for d, c in enumerate(letters) if d not in gone
    )


def diagonal(call: OpCall) -> str:
    """``AbC -> bZ``."""
    x, rest = _without(len(call.ins[0].shape), bind(call)[2:4])
    return f"{x}+->{rest}Z"


def diagonal_backward(call: OpCall) -> str:
    """``bZ -> AbC``."""
    x, rest = _without(len(first_out(call).shape), bind(call)[3:5])
    return f"{rest}Z+,#->{x}"


def diagonal_scatter(call: OpCall) -> str:
    """A diagonal replaced."""
    x, rest = _without(len(call.ins[0].shape), bind(call)[3:5])
    return f"{x}+,{rest}Z+->{x}"


def diag_embed(call: OpCall) -> str:
    """``bZ -> AbC``."""
    x, rest = _without(len(first_out(call).shape), bind(call)[2:4])
    return f"{rest}Z+->{x}"


def only(call: OpCall) -> str:
    """An op on single indices of the dim that the argument names; only that dim may be split."""
    rank = len(call.ins[0].shape)
    d = bind(call)[2] % rank
    x = "".join(c if k == d else c.upper() for k, c in enumerate(LOWER[:rank]))
    return f"{x}->{x}"


def _windows(x: Shape, dim: int, size: int, step: int) -> tuple[str, str, str] | None:
    """``a(bW)``, ``abW`` and ``!b``; windows that overlap or leave a remainder are not split."""
    if not x:
        return None
    d = dim % len(x)
    if size != step or x[d] % size:
        into, out = one_other(len(x), d, "Y", "Z")
        return into, f"{out}W", ""
    into, out = one_other(len(x), d, f"({LOWER[d]}W)", LOWER[d])
    return into, f"{out}W", f" !{LOWER[d]}"


def unfold(call: OpCall) -> str | None:
    """Windows along a dim, in a new dim."""
    found = _windows(call.ins[0].shape, *bind(call)[1:])
    return None if found is None else f"{found[0]}+->{found[1]}{found[2]}"


def unfold_backward(call: OpCall) -> str | None:
    """The gradients of windows summed."""
    found = _windows(first_out(call).shape, *bind(call)[2:])
    return None if found is None else f"{found[1]}+,#->{found[0]}{found[2]}"


def glu(call: OpCall) -> str:
    """``(Qa) -> a``: one half gates the other."""
    rank = len(call.ins[0].shape)
    d = bind(call)[1] % rank
    into, out = one_other(rank, d, f"(Q{LOWER[d]})", LOWER[d])
    return f"{into}->{out}"


def glu_backward(call: OpCall) -> str:
    """``a,(Qa) -> (Qa)``."""
    rank = len(call.ins[0].shape)
    d = bind(call)[2] % rank
    into, out = one_other(rank, d, f"(Q{LOWER[d]})", LOWER[d])
    return f"{out}+,{into}->{into}"


def view_as_dtype(call: OpCall) -> str:
    """The same bytes, read otherwise: elements of another size change the last dim."""
    return ".->." if call.ins[0].nbytes and call.ins[0].shape == first_out(call).shape else ".Y->.Z"
