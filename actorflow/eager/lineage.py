"""A number that says how a global tensor was made: ranks compare it when they exchange the tensor.

The number mixes the op, the numbers that the script gave to it, and the lineages of its operands, so that a rank that
has run another op, or the same one with another number, is found out when it next exchanges what came of it.  What a
rank computes for itself and does not exchange concerns no other rank.

- Copies of a value have its lineage: whether autograd makes one depends on who else refers to the value.
- Floats count as scripts write them, with few digits.  Those with more are computed, perhaps of replicas on unequal
  processors, whose last bits may differ.
- All gradients of a backward pass have one lineage, that of the pass: a function that a rank has called before may go
  back in other ops than one that it has not.
- A tensor that comes from another placement has the lineage of its spec, as ranks outside of a placement may have
  made theirs in another way.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor

from actorflow_compiler.core.tensor_bytes import contents
from actorflow_compiler.core.torch_internals import in_transform, number_of_backward_pass

__all__ = [
    "COPY",
    "Lineage",
    "RecordedLineages",
    "LineageRecorder",
    "backward_pass",
    "code_of",
    "code_of_op",
    "code_of_plain",
    "code_of_value",
    "is_as_written",
    "known_code",
    "lineage_of",
    "of_output",
]

Lineage = int  # equal in all processes that have made a tensor in the same way

COPY = 0  # the code of an op whose result is its first operand
DIGITS, LARGE = 6, 1e6  # floats that count: digits after the point; from this on, digits in all
_SPREAD = 2654435761  # keeps -1 and -2 apart, which have one hash in Python
OTHER = 2  # the code of values that do not count

aten = torch.ops.aten
_COPIES = frozenset(
    {
        aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.lift.default,
        aten.lift_fresh.default,
    }
)  # fmt: skip
# the old values of their first operand do not matter
_WITHOUT_FIRST = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"}) | {
    f"aten::{name}" for name in (
        "empty_like", "full_like", "ones_like", "zeros_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_zeros",
    )
}  # fmt: skip


def code_of(name: str) -> int:
    """The code of a function's name; positive."""
    return zlib.crc32(name.encode()) + 1


def code_of_op(func: Any) -> int:
    """The code of an op: COPY, or negative where its first operand does not count; in place or not makes no difference.

    An op that changes its operand in place computes what the other one does, and autograd may take either.
    """
    if func in _COPIES:
        return COPY
    name = func._schema.name
    code = code_of(f"{name.rstrip('_')}.{func._schema.overload_name}")
    return -code if name in _WITHOUT_FIRST else code


def is_as_written(value: Any) -> bool:
    """Whether a number has as few digits as scripts write."""
    if isinstance(value, complex):
        return is_as_written(value.real) and is_as_written(value.imag)
    if not isinstance(value, float) or math.isinf(value):
        return True
    return (round(value, DIGITS) if abs(value) < LARGE else float(f"{value:.{DIGITS}g}")) == value


def code_of_value(value: Any) -> int:
    """What an argument that is no tensor adds; equal in all processes for equal values."""
    kind = type(value)
    key = (kind, value if kind is not list else tuple(value))
    try:
        found = _codes.get(key)
    except TypeError:  # without a hash
        return OTHER
    if found is None:
        if len(_codes) >= MOST:
            _codes.clear()
        found = _codes[key] = _code_of(value)
    return found


def _code_of(value: Any) -> int:
    if isinstance(value, list | tuple):
        return hash(tuple([_code_of(v) for v in value]))
    if isinstance(value, complex):
        return hash((_code_of(value.real), _code_of(value.imag)))
    if isinstance(value, float):
        return hash(float(value) * _SPREAD + 1) if is_as_written(value) else OTHER
    if isinstance(value, Integral):
        return hash(int(value) * _SPREAD + 1)
    return code_of(str(value)) if isinstance(value, _NAMED) else OTHER


_NAMED = (str, torch.dtype, torch.layout, torch.memory_format)  # not devices, whose numbers may differ
MOST = 1 << 12  # values whose codes are known
_codes: dict[tuple[type, Any], int] = {}
known_code = _codes.get  # the code of a type and a value with a hash; None where ``code_of_value`` was not asked for it


def code_of_plain(tensor: Tensor) -> int:
    """What a plain tensor adds: the value of one without dims, the indices of one of integers; in the CPU's memory."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or in_transform():
        return OTHER
    if not tensor.dim():
        return code_of_value(tensor.item())
    if tensor.dtype not in _INTEGERS or tensor.numel() > MOST:
        return OTHER
    return zlib.crc32(contents(tensor)) + 1


_INTEGERS = frozenset({torch.int64, torch.int32})


def of_output(lineage: Lineage, number: int) -> Lineage:
    """The lineage of one of several outputs of an op."""
    return hash((lineage, number))


def lineage_of(code: int, made_of: tuple[Any, ...], pass_lineage: Lineage) -> Lineage:
    """The lineage of what an op makes.

    ``made_of`` has the lineages of its tensors and the codes of its other arguments; ``pass_lineage`` is that of the
    backward pass that this rank may be in.
    """
    if number_of_backward_pass() != -1:
        return pass_lineage
    if code > 0:
        return hash((code, made_of))
    return made_of[0] if code == COPY else hash((code, made_of[1:]))


# ---- the lineages that a function's results have, op by op


class KnownLineage(int):
    """A lineage of which it is known where it comes from, while a function's ops are recorded."""

    index: int

    @classmethod
    def of(cls, lineage: Lineage, index: int) -> KnownLineage:
        """The lineage number ``index`` of a recording."""
        made = cls(lineage)
        made.index = index
        return made


@dataclass(frozen=True, slots=True)
class RecordedLineages:
    """How the lineages of a function's results come from those of its operands."""

    steps: tuple[tuple[int, tuple[tuple[bool, int], ...]], ...]  # code, and what is mixed: (known, its index), or codes
    results: tuple[int, ...]  # indices

    def of(self, operands: Sequence[Lineage]) -> list[Lineage]:
        """The lineages of the results."""
        found = list(operands)
        for code, mixed in self.steps:
            made_of = tuple([found[n] if known else n for known, n in mixed])
            found.append(hash((code, made_of)) if code else hash(made_of))
        return [found[i] for i in self.results]


class LineageRecorder:
    """Records, while a function is called, how the lineages of its results come about.

    The operands' lineages are known ones meanwhile: give each what ``operand`` returns.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, tuple[tuple[bool, int], ...]]] = []
        self._known = 0

    def operand(self, lineage: Lineage) -> KnownLineage:
        """The lineage of the next operand as a known one."""
        self._known += 1
        return KnownLineage.of(lineage, self._known - 1)

    def op(self, code: int, made_of: tuple[Any, ...], outputs: Sequence[Lineage], several: bool) -> list[Lineage]:
        """The lineages of an op's outputs, as it has set them, as known ones; those of copies are known already."""
        if all(isinstance(lineage, KnownLineage) for lineage in outputs):
            return [*outputs]
        one = self._step(code, made_of if code > 0 else made_of[1:], 0 if several else outputs[0])
        return [self._step(COPY, (one, i), lineage) for i, lineage in enumerate(outputs)] if several else [one]

    def record(self, results: Sequence[Lineage]) -> RecordedLineages | None:
        """The record; None where a result's lineage does not come from these ops alone."""
        if not all(isinstance(r, KnownLineage) for r in results):
            return None
        return RecordedLineages(tuple(self._steps), tuple(r.index for r in results if isinstance(r, KnownLineage)))

    def _step(self, code: int, made_of: tuple[Any, ...], lineage: Lineage) -> KnownLineage:
        mixed = tuple([(True, m.index) if isinstance(m, KnownLineage) else (False, m) for m in made_of])
        self._steps.append((code, mixed))
        self._known += 1
        return KnownLineage.of(lineage, self._known - 1)


# ---- backward passes


class _Rank(Protocol):
    pass_lineage: Lineage


@contextlib.contextmanager
def backward_pass(rank: _Rank, *of: Lineage) -> Iterator[None]:
    """Give the gradients that a rank computes in the body the lineage of the tensors that they are gradients of."""
    before = rank.pass_lineage
    rank.pass_lineage = hash((_BACKWARD, of))
    try:
        yield
    finally:
        rank.pass_lineage = before


_BACKWARD = code_of("backward")
