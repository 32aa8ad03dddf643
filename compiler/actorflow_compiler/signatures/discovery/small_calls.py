"""Shrink an op call to calls of the same op on small tensors, and find which of their sizes are one index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from actorflow_compiler.core.op_call import ArgumentPath, OpCall, bind, put, rebind
from actorflow_compiler.core.ops import Arg, Meta, Symbol
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.signatures.discovery.execute import DrawKind, draw, meta_of, on_meta, run
from actorflow_compiler.signatures.discovery.rules import at

T = TypeVar("T")
Attempt = Callable[[Callable[[], T | None]], T | None]  # runs a function; None if it raised
SizePosition = tuple[
    str, ArgumentPath
]  # where a size occurs: ("dim", (operand, dim)) | ("arg", path in the schema's arguments)
Sizes = Mapping[SizePosition, int]

UNEVEN = (5, 7, 11, 3, 13, 17, 19, 23, 29, 31, 37, 41)
EVEN = (6, 12, 4, 8, 18, 10, 14, 16, 20, 22, 24, 26)
LARGEST = 1 << 20  # elements of all tensors of a call together
SUBSETS = 96  # most subsets of a group of equal sizes that are tried as an index of their own
PRECISE = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex64": "complex128"}
USABLE = {"float16": "float32", "bfloat16": "float32"}


@dataclass(frozen=True, slots=True)
class SmallCall:
    """A call with small sizes."""

    call: OpCall
    groups: tuple[frozenset[SizePosition], ...]  # each group has the sizes that only change together


def small_calls(call: OpCall, attempt: Attempt[OpCall], apart: bool = True) -> tuple[tuple[SmallCall, ...], float]:
    """Up to two small calls like ``call``, of uneven and of even sizes, and their tolerance for rounding.

    They are in float64 if the op supports it, so that a real difference cannot pass as rounding.  With
    ``apart``, sizes that are equal by chance become different.  There are no small calls if the op refuses
    small sizes and its own are too large.
    """
    for precise, tolerance in ((with_dtypes(call, PRECISE), 1e-11), (with_dtypes(call, USABLE), 1e-5)):
        found = _Shrinking(precise, attempt).run(apart)
        if found:
            return found, tolerance
    return (), 0.0


def with_dtypes(call: OpCall, change: Mapping[str, str]) -> OpCall:
    """The call with other dtypes."""

    def arg(value: Arg) -> Arg:
        if isinstance(value, tuple):
            return tuple(map(arg, value))
        if isinstance(value, Symbol):
            name = value.text.removeprefix("torch.")
            return Symbol(f"torch.{change[name]}") if name in change else value
        return value

    def meta(m: Meta) -> Meta:
        return Meta(m.shape, change.get(m.dtype, m.dtype))

    return OpCall(
        call.op,
        arg(call.args),
        tuple((k, arg(v)) for k, v in call.kwargs),
        tuple(map(meta, call.ins)),
        tuple(None if m is None else meta(m) for m in call.outs),
    )


def resized(call: OpCall, sizes: Sizes) -> OpCall:
    """The call with other sizes; its outputs are as before."""
    shapes = [list(m.shape) for m in call.ins]
    given = bind(call)
    new: dict[int, Arg] = {}
    for (kind, path), n in sizes.items():
        if kind == "dim":
            shapes[path[0]][path[1]] = n
        else:
            new[path[0]] = put(new.get(path[0], given[path[0]]), path[1:], n)
    args, kwargs = rebind(call, new)
    ins = tuple(replace(m, shape=tuple(s)) for m, s in zip(call.ins, shapes, strict=True))
    return OpCall(call.op, args, kwargs, ins, call.outs)


def slots(call: OpCall) -> dict[int, list[SizePosition]]:
    """Size above 1 → the places where it occurs: dims of operands, and whole-number arguments equal to a dim."""
    found: dict[int, list[SizePosition]] = {}
    for i, m in enumerate(call.ins):
        for d, n in enumerate(m.shape):
            if n > 1:
                found.setdefault(n, []).append(("dim", (i, d)))
    known = set(found) | {n for m in call.outs if m is not None for n in m.shape if n > 1}
    for path, n in _numbers(bind(call), ()):
        if n in known:
            found.setdefault(n, []).append(("arg", path))
    return found


def _numbers(arg: Arg, path: ArgumentPath) -> Iterator[tuple[ArgumentPath, int]]:
    if isinstance(arg, tuple):
        for i, part in enumerate(arg):
            yield from _numbers(part, (*path, i))
    elif type(arg) is int:
        yield path, arg


class _Shrinking:
    def __init__(self, call: OpCall, attempt: Attempt[OpCall]) -> None:
        self.call, self.attempt = call, attempt

    def run(self, apart: bool) -> tuple[SmallCall, ...]:
        groups = list(slots(self.call).values())
        first = self.first_sizes(groups)
        if first is None:
            return ()
        sizes, groups = first
        if apart:
            sizes, groups = self.refine(sizes, groups)
        uneven = self.accepted(sizes)
        if uneven is None:
            return ()
        found = tuple(map(frozenset, groups))
        even = self.even(sizes, groups)
        return (SmallCall(uneven, found), *([SmallCall(even, found)] if even else []))

    def accepted(self, sizes: Sizes, execute: bool = True) -> OpCall | None:
        """The call with these sizes and the outputs that it then has; None where the op refuses it."""
        call = resized(self.call, sizes)
        return self.attempt(lambda: self.made(call, execute))

    def made(self, call: OpCall, execute: bool) -> OpCall | None:
        outs = on_meta(call)
        if outs is not None:
            shaped = self.with_outs(call, outs)
            if shaped is None or not execute:
                return shaped
            if volume(shaped) > LARGEST:
                return None
        elif volume(call) > LARGEST:
            return None
        for kind in (DrawKind.NORMAL, DrawKind.POSITIVE):  # some ops take positive numbers only
            try:
                return self.with_outs(call, run(call.op, call.args, call.kwargs, draw(call, 0, kind)))
            except Exception:
                if kind == DrawKind.POSITIVE:
                    raise
        return None

    def with_outs(self, call: OpCall, outs: Sequence[Tensor | None]) -> OpCall | None:
        """The call with the metas of these outputs; None if their number or ranks differ from the original's."""
        if len(outs) != len(self.call.outs):
            return None
        made: list[Meta | None] = []
        for before, out in zip(self.call.outs, outs, strict=True):
            if before is None:
                made.append(None)
            elif out is None or out.dim() != len(before.shape):
                return None
            else:
                made.append(meta_of(out))
        return replace(call, outs=tuple(made))

    def orders_as_before(self, sizes: Sizes) -> bool:
        """Whether each size compares to the whole numbers among the arguments as the original size did.

        A slice of the first ten elements, for example, behaves differently on a dim of five.
        """
        bounds = [abs(n) for path, n in _numbers(bind(self.call), ()) if ("arg", path) not in sizes]
        return all(_order(n, b) == _order(self.size(s), b) for s, n in sizes.items() for b in bounds)

    def equal_as_before(self, small: OpCall, sizes: Sizes) -> bool:
        """Whether dims of outputs equal the sizes of the same operand dims as in the original call."""
        new = {self.size(s): n for s, n in sizes.items()}
        pairs = [
            (m, n)
            for before, after in zip(self.call.outs, small.outs, strict=True)
            if before is not None and after is not None
            for m, n in zip(before.shape, after.shape, strict=True)
        ]
        return all(new[m] == n if m in new else n < 2 or n not in new.values() for m, n in pairs)

    def is_like_original(self, sizes: Sizes, execute: bool = True) -> bool:
        """Whether the call with these sizes has the same structure as the original."""
        if not self.orders_as_before(sizes):
            return False
        found = self.accepted(sizes, execute)
        return found is not None and self.equal_as_before(found, sizes)

    def first_sizes(
        self, groups: list[list[SizePosition]]
    ) -> tuple[dict[SizePosition, int], list[list[SizePosition]]] | None:
        """Small sizes, equal where they were equal; the numbers among the arguments follow if the op lets them."""
        dims = [[s for s in g if s[0] == "dim"] for g in groups]
        for chosen in (groups, dims) if dims != groups else (groups,):
            sizes = {s: n for g, n in zip(chosen, UNEVEN, strict=False) for s in g}
            if len(chosen) <= len(UNEVEN) and self.is_like_original(sizes):
                return sizes, [g for g in chosen if g]
        one_by_one: dict[SizePosition, int] = {}
        kept: list[list[SizePosition]] = []
        taken: set[int] = set()
        for group, dim in zip(groups, dims, strict=True):
            part, n = self.shrink_group(one_by_one, group, dim, taken)
            taken.add(n)
            one_by_one.update(dict.fromkeys(part, n))
            kept.append(part)
        if self.is_like_original(one_by_one):
            return one_by_one, [g for g in kept if g]
        as_it_is = {s: self.size(s) for g in groups for s in g}
        return (as_it_is, groups) if self.accepted(as_it_is) is not None else None

    def shrink_group(
        self, others: Sizes, group: list[SizePosition], dims: list[SizePosition], taken: set[int]
    ) -> tuple[list[SizePosition], int]:
        """Another size for one group, if the op takes one."""
        before = self.size(group[0])
        for n in (*UNEVEN[:7], *EVEN[:6]):
            for chosen in (group, dims) if dims and dims != group else (group,):
                sizes = {**others, **dict.fromkeys(chosen, n)}
                if n not in taken and self.is_like_original(sizes, execute=False):
                    return chosen, n
        return group, before

    def size(self, slot: SizePosition) -> int:
        kind, path = slot
        n: int = self.call.ins[path[0]].shape[path[1]] if kind == "dim" else at(bind(self.call), path)
        return n

    def refine(
        self, sizes: Sizes, groups: Sequence[list[SizePosition]]
    ) -> tuple[dict[SizePosition, int], list[list[SizePosition]]]:
        """Make sizes different that are equal only by chance."""
        now = dict(sizes)
        found: list[list[SizePosition]] = []
        for group in groups:
            rest = list(group)
            tried = 0
            again = len(rest) > 1
            while again:
                again = False
                for part in _subsets(rest):
                    tried += 1
                    free = (dict.fromkeys(part, n) for n in (*UNEVEN, *EVEN) if n not in now.values())
                    fresh = next(filter(self.orders_as_before, free), None)
                    if fresh is None or tried > SUBSETS:
                        break
                    changed = {**now, **fresh}
                    if self.accepted(changed) is not None:
                        now = changed
                        found.append(part)
                        rest = [s for s in rest if s not in part]
                        again = len(rest) > 1
                        break
            found.append(rest)
        return now, found

    def even(self, sizes: Sizes, groups: Sequence[list[SizePosition]]) -> OpCall | None:
        """The call with sizes that divide evenly, as far as the op takes such."""
        wanted = {**sizes, **{s: n for g, n in zip(groups, EVEN, strict=False) for s in g}}
        found = self.accepted(wanted) if self.orders_as_before(wanted) else None
        if found is not None:
            return found
        now = dict(sizes)
        for group in groups:
            for n in EVEN:
                wanted = {**now, **dict.fromkeys(group, n)}
                if n not in now.values() and self.orders_as_before(wanted) and self.accepted(wanted) is not None:
                    now = wanted
                    break
        return self.accepted(now)


def _order(a: int, b: int) -> int:
    """-1, 0 or 1, as the first is less than, equal to or more than the second."""
    return (a > b) - (a < b)


def _subsets(group: list[SizePosition]) -> Iterator[list[SizePosition]]:
    """Subsets of a group, those most likely to be an index of their own first."""
    yield from ([s] for s in group)
    dims = sorted({path[1] for kind, path in group if kind == "dim"})
    if len(dims) > 1:
        for d in dims:
            yield [s for s in group if s[0] == "dim" and s[1][1] == d]
    for count in (2, 3):
        if len(group) > count:
            yield from map(list, itertools.combinations(group, count))


def volume(call: OpCall) -> int:
    """The number of elements of all tensors of a call."""
    return sum(numel(m.shape) for m in (*call.ins, *call.outs) if m is not None)


def paths(group: Iterable[SizePosition]) -> tuple[ArgumentPath, ...]:
    """The arguments among the sizes of a group."""
    return tuple(sorted(path for kind, path in group if kind == "arg"))
