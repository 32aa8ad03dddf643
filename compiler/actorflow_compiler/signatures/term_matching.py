"""Match the term of an op against the shapes of a call: which index runs along which dim, and how large it is."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.op_call import CALLS, CALLS_STAY, OpCall, bind
from actorflow_compiler.core.ops import Arg, Meta, Ref
from actorflow_compiler.core.sbp import Parts, Split, canonical
from actorflow_compiler.custom_ops.split_classes import first_axis
from actorflow_compiler.signatures.notation import ArgumentKind, Dim, DimsTerm, Linearity, OperandTerm, Term, parse
from actorflow_compiler.signatures.table import term_of

Group = tuple[str, ...]  # the indices that share a dim, outer first; () for a dim that is broadcast


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """An operand or output of a call, with the indices that run along its dims."""

    meta: Meta
    dims: tuple[Group, ...]
    mark: Linearity = Linearity.NONE
    values: str = ""

    def has(self, letter: str) -> bool:
        """Whether the index runs along one of its dims."""
        return any(letter in group for group in self.dims)

    def where(self, letter: str, size: dict[str, int]) -> tuple[int, int, int] | None:
        """Dim, product of the sizes before the index in it, product of those after it."""
        for dim, group in enumerate(self.dims):
            if f"{letter}^" in group:
                return dim, 1, 1
            if letter in group:
                at = group.index(letter)
                return dim, math.prod(size[c] for c in group[:at]), math.prod(size[c] for c in group[at + 1 :])
        return None

    def layout(self, letter: str, size: dict[str, int], blocks: int, unit: int, parts: Parts) -> Split | None:
        """The tensor's layout when the index is cut in ``blocks`` and units of ``unit``; None without the index."""
        found = self.where(letter, size)
        if found is None:
            return None
        dim, before, after = found
        return canonical(Split(dim, before * blocks, unit * after), self.meta.shape[dim], parts)

    def cut_in(self, layout: Split, size: dict[str, int]) -> str | None:
        """The index that this layout of the tensor cuts; None if there is none."""
        whole = 1
        for letter in self.dims[layout.dim]:
            whole *= size[letter]
            if whole > layout.blocks:
                return letter
        return None


@dataclass(frozen=True, slots=True)
class IndexedCall:
    """An op instance with the indices of its operands and outputs."""

    ins: tuple[IndexedTensor, ...]  # of each operand
    outs: tuple[IndexedTensor | None, ...]  # None: not used, or ignored by the notation
    size: dict[str, int]
    splittable: tuple[str, ...]
    never_empty: frozenset[str]  # the op cannot run where one of these has size 0
    affine: bool  # a number other than 0 is added, so a sum of terms does not pass
    parts: dict[str, Parts]  # index → the only devices it may be split over, plainly
    uneven: frozenset[str]  # indices that have several sizes, other than 1


@kept_while_compiling(CALLS, stay=CALLS_STAY)
def index_call(call: OpCall) -> IndexedCall | None:
    """Match the table's term of an op with the call's shapes; None where there is no term or it does not fit them."""
    text = term_of(call)
    return None if text is None else match_term(call, text)


def match_term(call: OpCall, text: str) -> IndexedCall | None:
    """Match any term with the call's shapes; None where it does not fit them."""
    return _TermMatcher(call, parse(text)).run()


class _TermMismatchError(Exception):
    """The notation does not fit the shapes."""


class _TermMatcher:
    def __init__(self, call: OpCall, term: Term) -> None:
        self.call, self.term = call, term
        self.frozen: set[str] = {c for c in term.letters if c.isupper()}
        self.affine = False
        self.size: dict[str, int] = {}
        self.uneven: set[str] = set()
        self.parts: dict[str, Parts] = {}
        self.pairs: dict[int, tuple[OperandTerm, Meta]] = {}
        self.named: list[tuple[Arg, bool]] = []  # values of "@" arguments, and whether "@!"
        self.given: list[tuple[Dim, int]] = []  # dims whose sizes are arguments

    def run(self) -> IndexedCall | None:
        try:
            return self.match()
        except _TermMismatchError:
            return None

    def match(self) -> IndexedCall:
        self.read()
        outs = self.call.outs
        templates = self.term.outs
        if len(templates) < len(outs):
            raise _TermMismatchError
        used = [(t, m) for t, m in zip(templates, outs, strict=False) if t is not None and m is not None]
        rank = max(
            (len(m.shape) - _explicit(o.dims) for o, m in [*self.operands(), *used] if "." in o.dims),
            default=0,
        )
        free = [c for c in string.ascii_lowercase if c not in self.term.letters][:rank]
        named = self.named_dims(free)
        ins = tuple(self.indexed(i, free, named) for i in range(len(self.call.ins)))
        made = tuple(
            None if t is None or m is None else self.made(t, m, free, named)
            for t, m in zip(templates, outs, strict=False)
        )
        self.infer_sizes([*ins, *(o for o in made if o is not None)])
        splittable = tuple(c for c, n in self.size.items() if n > 1 and c not in self.frozen and c.isalpha())
        never_empty = frozenset(self.term.never_empty.replace(".", "".join(free)))
        ins = tuple(map(_unit_dims, ins))
        made = tuple(None if o is None else _unit_dims(o) for o in made)
        return IndexedCall(
            ins, made, self.size, splittable, never_empty, self.affine, self.parts, frozenset(self.uneven)
        )

    def read(self) -> None:
        """Read each argument by its entry in the term."""
        for argument, value in zip(self.term.arguments, bind(self.call), strict=False):
            if argument.kind == ArgumentKind.DIMS:
                self.named.append((value, argument.frozen))
            elif argument.kind == ArgumentKind.SIZES and value is not None:
                sizes = value if isinstance(value, tuple) else (value,)
                dims = ranked(argument.operands[0].dims, len(sizes))
                if len(dims) != len(sizes):
                    raise _TermMismatchError
                self.given += zip(dims, sizes, strict=True)
            elif argument.kind == ArgumentKind.PARTS:
                self.parts[argument.index] = first_axis(value)[1]
            elif argument.kind == ArgumentKind.TENSOR:
                tensors = [v for v in value if v is not None] if isinstance(value, tuple) else [value]
                operands = argument.operands if len(argument.operands) > 1 else argument.operands * len(tensors)
                if len(operands) != len(tensors):
                    raise _TermMismatchError
                for o, v in zip(operands, tensors, strict=True):
                    if isinstance(v, Ref):
                        self.pairs[v.index] = (o, self.call.ins[v.index])
                    elif o.mark == Linearity.ADDEND and isinstance(v, int | float) and v != 0:
                        self.affine = True

    def operands(self) -> Iterator[tuple[OperandTerm, Meta]]:
        yield from self.pairs.values()

    def named_dims(self, free: Sequence[str]) -> frozenset[str]:
        """The indices that "@" arguments name; frozen as the notation says."""
        found: set[str] = set()
        for value, frozen in self.named:
            if value is None or value == ():
                dims: Iterable[int] = range(len(free))
            else:
                dims = (value,) if isinstance(value, int) else value
            letters = {free[d % len(free)] for d in dims} if free else set()
            if frozen or not self.term.reduces:
                self.frozen |= letters
            found |= letters
        return frozenset(found)

    def indexed(self, i: int, free: Sequence[str], named: frozenset[str]) -> IndexedTensor:
        meta = self.call.ins[i]
        if i not in self.pairs:
            return IndexedTensor(meta, ((),) * len(meta.shape))
        o, _ = self.pairs[i]
        return IndexedTensor(meta, self.groups(o.dims, meta, free, named), o.mark, o.values)

    def made(self, o: OperandTerm, meta: Meta, free: Sequence[str], named: frozenset[str]) -> IndexedTensor:
        groups = self.groups(o.dims, meta, free, named)
        if not {":", "/"} & set(o.dims) and _explicit(o.dims) + ("." in o.dims) * len(free) != len(meta.shape):
            raise _TermMismatchError
        return IndexedTensor(meta, groups, values=o.values)

    def groups(self, template: DimsTerm, meta: Meta, free: Sequence[str], named: frozenset[str]) -> tuple[Group, ...]:
        """One group for each dim, aligned at the right."""
        groups: list[Group] = []
        for dim in ranked(template, len(meta.shape)):
            if dim == ".":
                groups += [(c,) for c in free]
            elif dim == "/":
                keepdim = len(meta.shape) == len(free)
                groups += [() if c in named else (c,) for c in free if keepdim or c not in named]
            else:
                assert isinstance(dim, tuple)
                groups.append(dim)
        spare = len(groups) - len(meta.shape)
        if spare < 0:
            raise _TermMismatchError
        return tuple(groups[spare:])

    def infer_sizes(self, tensors: Sequence[IndexedTensor]) -> None:
        """Find sizes of indices: first of those alone in a dim, then of the last unknown one in a dim."""
        dims = [(group, n) for t in tensors for group, n in zip(t.dims, t.meta.shape, strict=True)]
        dims += [(group, n) for group, n in self.given if isinstance(group, tuple)]
        for group, n in dims:
            if len(group) == 1:
                old = self.size.get(group[0], 1)
                if 1 != old != n != 1:
                    self.frozen.add(group[0])
                    self.uneven.add(group[0])
                self.size[group[0]] = n if old == 1 else old
        shared = [(group, n) for group, n in dims if len(group) > 1]
        progress = True
        while progress:
            progress = False
            for group, n in shared:
                unknown = [c for c in group if c not in self.size]
                if len(unknown) == 1:
                    self.size[unknown[0]] = n // max(1, math.prod(self.size[c] for c in group if c in self.size))
                    progress = True
        for group, n in shared:
            if any(c not in self.size for c in group) or n not in (1, math.prod(self.size[c] for c in group)):
                raise _TermMismatchError


def _explicit(template: DimsTerm) -> int:
    return sum(1 for dim in template if dim not in (".", ":", "/"))


def ranked(template: DimsTerm, rank: int) -> DimsTerm:
    """The template with ``:`` replaced by as many dims without an index as the rank needs."""
    if ":" not in template:
        return template
    at = template.index(":")
    return (*template[:at], *((),) * max(0, rank - _explicit(template)), *template[at + 1 :])


def _unit_dims(tensor: IndexedTensor) -> IndexedTensor:
    """The tensor with its dims of size 1 marked as broadcast."""
    return replace(
        tensor, dims=tuple(() if n == 1 else group for group, n in zip(tensor.dims, tensor.meta.shape, strict=True))
    )
