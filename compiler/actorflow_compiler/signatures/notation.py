"""The notation of signatures: its tokens, and the parser of a term.

A term has one entry for each argument of the op in schema order, ``->``, and one for each output::

    addmm            mn+,mk*,kn*->mn
    _softmax         .,@->.
    embedding        vd+,.<v>->.d
    cat              abc+;abc+->a(Qb)c
    group norm       n(gc):,(gc),(gc),#n,#(gc),_,#g->n(gc):,ng,ng

==============  ===========================================================================
lowercase       an index that may be split
UPPERCASE       an index that may not
``(ab)``        one dim that two indices share, the outer one first
``1``           a dim of size 1
``.``           all leading dims, aligned at the right, broadcast as PyTorch does
``:``           any dims, none of which may be split
``+`` ``*``     linear: a sum of terms passes if all ``+`` operands, or one ``*`` operand, are
                sums of terms (a number in a ``+`` place must be 0)
``<v>``         the values of this operand or output are positions along index v
``a;b``         the tensors of a list, one by one; a single entry stands for all
``@``           this argument names dims of the operand; they may not be split, unless the output
                is ``/``: then splitting one of them makes the output a sum of terms
``@!``          as ``@``, and they may never be split
``/``           the ``.`` dims without those that ``@`` names (or with size 1: keepdim)
``#``           this argument is the shape of the first output that is used
``#n(gc)``      this argument is the size of these dims: a number for one dim, else a list
``v^``          one element for each part of index v, on the devices of each axis that the argument
                ``^v`` lists; v and this dim together may be split over the first number of them
``_``           ignored: a tensor here must be broadcast, an output here is broadcast
==============  ===========================================================================

A term may end in `` !`` and indices (``.`` for those of the leading dims): the op cannot run where one
of them has size 0, so each device must get some of it.

Arguments past the last entry are ignored.  An index that an output lacks is summed over: splitting
it makes that output a sum of terms.  Tensors with fewer dims than their entry are aligned at the right.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import StrEnum

Dim = str | tuple[str, ...]  # "." | ":" | "/" | the letters of a dim, () for size 1
DimsTerm = tuple[Dim, ...]

_DIM = re.compile(r"\(([A-Za-z]+)\)|([A-Za-z]\^?)|([1.:/])")


class Linearity(StrEnum):
    """In which way an op is linear in an operand, so that sums of terms pass."""

    NONE = ""
    ADDEND = "+"  # together with all other operands that have this mark
    FACTOR = "*"  # alone


class ArgumentKind(StrEnum):
    """The meaning of an argument's entry in a term."""

    TENSOR = "tensor"
    IGNORED = "ignored"
    DIMS = "dims"  # the argument names dims
    SHAPE = "shape"  # it is the shape of the first output
    SIZES = "sizes"  # it is the size of some dims
    PARTS = "parts"  # it lists the numbers of parts into which an index is cut


@dataclass(frozen=True, slots=True)
class OperandTerm:
    """How an output, or the tensors of one argument, are indexed."""

    dims: DimsTerm
    mark: Linearity
    values: str  # the index that the values are positions of, or ""


@dataclass(frozen=True, slots=True)
class ArgumentTerm:
    """How one argument of the op is described."""

    kind: ArgumentKind
    operands: tuple[OperandTerm, ...] = ()  # one, or one for each tensor of a list; for "sizes": the dims
    frozen: bool = False  # of "dims": never split
    index: str = ""  # of "parts": which index they are parts of


@dataclass(frozen=True, slots=True)
class Term:
    """A parsed term."""

    text: str
    arguments: tuple[ArgumentTerm, ...]
    outs: tuple[OperandTerm | None, ...]  # None: ignored
    letters: frozenset[str]
    never_empty: str  # indices of which each device must get some; "." for all of the leading dims

    @property
    def reduces(self) -> bool:
        """Whether an output is made by summing over named dims."""
        return any(out is not None and "/" in out.dims for out in self.outs)


@functools.cache
def parse(text: str) -> Term:
    """Parse a term; raises ValueError for text that is no term."""
    term, _, never_empty = text.partition(" !")
    left, arrow, right = term.partition("->")
    if not arrow:
        raise ValueError(f"{text!r} has no '->'")
    arguments = tuple(_parse_argument(entry, text) for entry in left.split(",")) if left else ()
    outs = tuple(None if entry == "_" else _parse_operand(entry, text) for entry in right.split(","))
    return Term(text, arguments, outs, frozenset(c for c in text if c.isalpha()), never_empty)


def _parse_argument(entry: str, text: str) -> ArgumentTerm:
    if entry in _PLAIN:
        return _PLAIN[entry]
    if entry.startswith("#"):
        return ArgumentTerm(ArgumentKind.SIZES, (_parse_operand(entry[1:], text),))
    if entry.startswith("^"):
        return ArgumentTerm(ArgumentKind.PARTS, index=entry[1:])
    return ArgumentTerm(ArgumentKind.TENSOR, tuple(_parse_operand(e, text) for e in entry.split(";")))


_PLAIN = {
    "_": ArgumentTerm(ArgumentKind.IGNORED),
    "@": ArgumentTerm(ArgumentKind.DIMS),
    "@!": ArgumentTerm(ArgumentKind.DIMS, frozen=True),
    "#": ArgumentTerm(ArgumentKind.SHAPE),
}


def _parse_operand(entry: str, text: str) -> OperandTerm:
    found = re.fullmatch(r"([^+*<]*)([+*]?)(?:<([a-z])>)?", entry)
    if found is None:
        raise ValueError(f"{entry!r} in {text!r} is no operand")
    dims, mark, values = found.groups()
    return OperandTerm(_parse_dims(dims, text), Linearity(mark), values or "")


def _parse_dims(entry: str, text: str) -> DimsTerm:
    dims: list[Dim] = []
    at = 0
    for found in _DIM.finditer(entry):
        if found.start() != at:
            break
        at = found.end()
        group, letter, sign = found.groups()
        dims.append(tuple(group) if group else (letter,) if letter else () if sign == "1" else sign)
    if at != len(entry):
        raise ValueError(f"{entry[at:]!r} in {text!r} is no dim")
    if sum(dim in (".", ":", "/") for dim in dims) > 1:
        raise ValueError(f"{entry!r} in {text!r} has more than one entry for any number of dims")
    return tuple(dims)
