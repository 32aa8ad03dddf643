"""The text of a rule and an op instance go in; the index letters of every operand, output and size argument come out.

Terms stand in the order of the op's schema arguments, separated by commas, then ``->`` and the outputs:

- a lowercase letter is a dim that may be split, an UPPERCASE one may not; ``(ab)`` is a group; ``1`` a dim of size 1
- ``.`` stands for all further dims, aligned at the right as in broadcasting
- ``+`` behind a term: the op is linear in all ``+`` operands together; ``*``: linear in each of them alone
- ``<v>`` behind a term: its values index letter v
- ``#v`` and ``[..]`` are integer and list arguments that are sizes of letters
- ``@`` names the dims that the op works along: they may not be split; ``@+`` may be, for the op sums over them
- ``/`` in an output: the dims without those of ``@``
- ``a;b`` are the terms of a list of tensors; ``_`` is ignored; ``|c`` at the end: only c may be split
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actorflow_compiler.ops import Arg, Ref
from actorflow_compiler.signatures.model import OpCall

Group = tuple[str, ...]  # letters of one dim, outermost first; () for a dim of size 1
Dims = tuple[Group, ...]
_TOKEN = re.compile(r"\(([A-Za-z]*)\)|([A-Za-z1./])")


@dataclass(frozen=True, slots=True)
class Operand:
    """The letters of a tensor operand."""

    dims: Dims
    mark: str  # "" | "+" | "*"
    indexes: str  # the letter that its values index, or ""


@dataclass(frozen=True, slots=True)
class Spec:
    """A rule applied to an op instance."""

    text: str
    operands: tuple[Operand, ...]
    outs: tuple[Dims | None, ...]
    sizes: Mapping[str, int]
    size_args: Mapping[str, tuple[str, Dims | str]]  # argument → ("letter", v) or ("list", dims)
    fixed: frozenset[str]  # letters that may not be split
    linear: bool  # whether partial sums may pass


def arguments(call: OpCall) -> list[tuple[str, Arg]]:
    """The op's arguments by name in schema order; those of our own ops are positional."""
    namespace, name, overload = (*call.op.split("."), "default")[:3]
    if namespace == "actorflow":
        return [(str(i), a) for i, a in enumerate(call.args)] + list(call.kwargs)
    schema = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema
    given: dict[str, Arg] = dict(call.kwargs)
    given.update(zip((a.name for a in schema.arguments), call.args, strict=False))
    return [(a.name, given.get(a.name, a.default_value)) for a in schema.arguments]


def is_tensor(arg: Arg) -> bool:
    """Whether an argument is a tensor."""
    return isinstance(arg, Ref)


def is_tensors(arg: Arg) -> bool:
    """Whether an argument is a list with tensors in it."""
    return isinstance(arg, tuple) and any(isinstance(a, Ref) for a in arg)


def apply(text: str, call: OpCall) -> Spec:
    """Read a rule for an op instance.  Raises ValueError where it does not fit."""
    body, _, only = text.partition("|")
    left, right = body.split("->")
    terms = left.split(",") if left else []
    out_terms = right.split(",") if right else []
    args = arguments(call)
    terms += ["_"] * (len(args) - len(terms))
    out_terms += ["_"] * (len(call.outs) - len(out_terms))
    return _Reader(text, call, args, terms, out_terms, only).read()


class _Reader:
    def __init__(self, text: str, call: OpCall, args: list[tuple[str, Arg]], terms: list[str], outs: list[str], only: str) -> None:
        self.text, self.call, self.args, self.terms, self.out_terms, self.only = text, call, args, terms, outs, only
        self.sizes: dict[str, int] = {}
        self.rank = self._dots()
        self.along: set[str] = set()
        self.fixed: set[str] = set()

    def _dots(self) -> int:
        """How many dims the dots stand for: the most that any term needs."""
        most = 0
        for (_, value), term in zip(self.args, self.terms, strict=True):
            if is_tensor(value) and "." in term:
                most = max(most, len(self.call.ins[value.index].shape) - self._letters(term))
        for meta, term in zip(self.call.outs, self.out_terms, strict=True):
            if meta is not None and "." in term:
                most = max(most, len(meta.shape) - self._letters(term))
        return most

    @staticmethod
    def _letters(term: str) -> int:
        return len(_TOKEN.findall(term.partition("<")[0].rstrip("+*").replace(".", "")))

    def read(self) -> Spec:
        for (_, value), term in zip(self.args, self.terms, strict=True):
            if term.startswith("@"):
                dims = range(self.rank) if value is None or value == () else (value,) if isinstance(value, int) else value
                self.along = {f".{d % self.rank}" for d in dims} if self.rank else set()
                if not term.endswith("+"):
                    self.fixed |= self.along
        operands: dict[int, Operand] = {}
        size_args: dict[str, tuple[str, Dims | str]] = {}
        linear = True
        pending: list[tuple[str, str, Arg]] = []
        for (name, value), term in zip(self.args, self.terms, strict=True):
            if is_tensor(value):
                operands[value.index] = self._operand(term, value)
            elif is_tensors(value):
                parts = term.split(";") if ";" in term else [term] * len(value)
                for part, ref in zip(parts, value, strict=True):
                    if isinstance(ref, Ref):
                        operands[ref.index] = self._operand(part, ref)
            elif term[:1] == "#":
                size_args[name] = ("letter", term[1:])
            elif term[:1] == "[":
                pending.append((name, term[1:-1], value))
            elif term.endswith("+") and not term.startswith("@") and isinstance(value, int | float) and value != 0:
                linear = False  # something is added
        outs = tuple(None if m is None else self._dims(t, m.shape) for m, t in zip(self.call.outs, self.out_terms, strict=True))
        for name, term, value in pending:
            length = len(value) if isinstance(value, tuple) else 0
            first = next((m for m in self.call.outs if m is not None), None)
            shape: Sequence[int] = first.shape if first is not None and len(first.shape) == length else (2,) * length
            size_args[name] = ("list", self._dims(term, shape, note=False))
        self._grouped_sizes([*((o.dims, self.call.ins[i].shape) for i, o in operands.items()), *(
            (d, m.shape) for d, m in zip(outs, self.call.outs, strict=True) if d is not None and m is not None
        )])  # fmt: skip
        linear = linear and all(m.is_float for m in self.call.outs if m is not None)
        if self.only:
            self.fixed |= set(self.sizes) - set(self.only)
        ordered = tuple(operands.get(i, Operand(((),) * len(m.shape), "", "")) for i, m in enumerate(self.call.ins))
        return Spec(self.text, ordered, outs, self.sizes, size_args, frozenset(self.fixed), linear)

    def _operand(self, term: str, ref: Ref) -> Operand:
        shape = self.call.ins[ref.index].shape
        body, _, index = term.partition("<")
        mark = index[-1:] if index[-1:] in ("+", "*") else body[-1:] if body[-1:] in ("+", "*") else ""
        return Operand(self._dims(body.rstrip("+*"), shape), mark, index.partition(">")[0])

    def _dims(self, term: str, shape: Sequence[int], note: bool = True) -> Dims:
        if term == "_":
            return ((),) * len(shape)
        groups: list[Group] = []
        for match in _TOKEN.finditer(term):
            inside, one = match.groups()
            if one == ".":
                groups += [(f".{i}",) for i in range(self.rank)]
            elif one == "/":
                keep = len(shape) == self.rank
                groups += [(f".{i}",) if f".{i}" not in self.along else () for i in range(self.rank) if keep or f".{i}" not in self.along]
            elif one == "1":
                groups.append(())
            else:
                groups.append((one,) if one else tuple(inside))
        if len(groups) < len(shape):
            raise ValueError(f"{self.call.op}: {self.text!r} gives {len(groups)} dims for a tensor of shape {tuple(shape)}")
        groups = groups[len(groups) - len(shape) :] if shape else []
        dims = tuple(() if n == 1 else g for g, n in zip(groups, shape, strict=True)) if note else tuple(groups)
        if note:
            for group, n in zip(dims, shape, strict=True):
                if len(group) == 1:
                    self.sizes[group[0]] = max(n, self.sizes.get(group[0], 0))
        return dims

    def _grouped_sizes(self, tensors: Sequence[tuple[Dims, Sequence[int]]]) -> None:
        """Sizes of letters that occur only inside groups: what the others leave."""
        for dims, shape in tensors:
            for group, n in zip(dims, shape, strict=True):
                unknown = [x for x in group if x not in self.sizes]
                if len(unknown) == 1:
                    self.sizes[unknown[0]] = n // max(1, math.prod(self.sizes[x] for x in group if x in self.sizes))


def schema_name(op: str) -> str:
    """``aten.sum.dim_IntList`` → ``sum.dim_IntList``, ``aten.mm.default`` → ``mm``, ``actorflow.first`` → ``actorflow.first``."""
    namespace, name, overload = (*op.split("."), "default")[:3]
    if namespace != "aten":
        return f"{namespace}.{name}"
    return name if overload == "default" else f"{name}.{overload}"


def tags_of(op: str) -> Any:
    """The tags that torch gives an op."""
    namespace, name, overload = (*op.split("."), "default")[:3]
    if namespace == "actorflow":
        return ()
    return getattr(getattr(getattr(torch.ops, namespace), name), overload).tags
