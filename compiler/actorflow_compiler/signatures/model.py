"""The values of this package: an op instance, and one legal way to lay its operands and outputs over a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow_compiler.ops import Arg, Meta
from actorflow_compiler.sbp import Sbp


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op instance: ``Ref(i)`` in its arguments is the i-th tensor operand, numbered by appearance."""

    op: str  # "aten.mm.default" | "actorflow.unpack"
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    ins: tuple[Meta, ...]
    outs: tuple[Meta | None, ...]  # None: not used, or not a tensor


@dataclass(frozen=True, slots=True)
class Signature:
    """One legal combination of SBPs for a mesh axis."""

    ins: tuple[Sbp, ...]
    outs: tuple[Sbp | None, ...]
    letter: str | None  # the index letter that is split; None for all-broadcast and for plain linearity
    blocks: int = 1  # outer blocks of the letter itself
    unit: int = 1  # elements of the letter that stay together
