"""The instruction format that the logical graph and a plan's bodies share: op name, plain arguments, outputs.

An argument is a ``Ref`` to a value, a ``Symbol`` for one of torch's enumerations, a plain Python
number, string or None, or a (nested) tuple of these.  Nothing else can be in a graph or a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """The part of a training step that an instruction belongs to."""

    SOURCE = "source"  # where arguments arrive; in lowered programs only
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the half of a split backward pass that gives the gradients of weights; in lowered programs only
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Ref:
    """The value with this number."""

    index: int

    def __str__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dtype, layout, memory format or device of torch, by its text: ``torch.float32``, ``device:cpu``."""

    text: str

    def __str__(self) -> str:
        return self.text


Arg = Any  # Ref | Symbol | int | float | bool | str | None | tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class Meta:
    """Dtype and shape of a tensor that need not exist yet."""

    shape: tuple[int, ...]
    dtype: str  # "float32"

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        count = ITEM_BYTES[self.dtype]
        for n in self.shape:
            count *= n
        return count

    @property
    def is_float(self) -> bool:
        """Whether the dtype is floating-point or complex, so that the tensor may be a partial sum."""
        return self.dtype in FLOATS

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


FEW_BITS = frozenset({"bfloat16", "float16"})  # in which the sum of many terms keeps few of the last ones
FLOATS = frozenset({"float32", "float64", "float16", "bfloat16", "complex64", "complex128"})
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def refs(args: tuple[Arg, ...]) -> list[int]:
    """The numbers of all values that arguments name, in order."""
    found: list[int] = []
    for arg in args:
        kind = type(arg)
        if kind is Ref:
            found.append(arg.index)
        elif kind is tuple:
            found += refs(arg)
    return found


def substitute(arg: Arg, change: Callable[[int], Arg]) -> Arg:
    """The argument with every ``Ref`` replaced by ``change(index)``."""
    kind = type(arg)
    if kind is Ref:
        return change(arg.index)
    if kind is tuple and arg:
        return tuple([substitute(part, change) for part in arg])
    return arg


def substitute_all(
    args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], change: Callable[[int], Arg]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The arguments of an instruction with every ``Ref`` replaced, first those by position, then those by name."""
    return (
        tuple([substitute(arg, change) for arg in args]),
        tuple([(name, substitute(arg, change)) for name, arg in kwargs]) if kwargs else (),
    )


def show(arg: Arg) -> str:
    """The short text form of an argument."""
    if isinstance(arg, tuple):
        return f"[{', '.join(map(show, arg))}]"
    return str(arg)
