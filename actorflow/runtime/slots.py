"""The tokens in the slots of one register.

Firings put their outputs into slots, and each reader takes a token for each of its firings.  Slots hold references, so
nothing is copied, and a slot drops its token as soon as the last reader has taken it.  For the compute thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actorflow.transport.redistribution import dtype_of
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import FEW_BITS
from actorflow_compiler.plan.plan import LAST, SUM, CombineKind, Register, TensorSpec

Token = Sequence[Any]  # a tensor for each of the register's specs


class Slots:
    """The tokens that a register holds on the rank of its readers.

    Initial tokens are zeros.  The constructor raises PlanError for a dim to concatenate along that a tensor lacks.
    """

    __slots__ = ("_combine", "_count", "_left", "_parts", "_values", "fill", "id", "nbytes", "specs", "uses")

    def __init__(self, register: Register, device: torch.device) -> None:
        self.id = register.id
        self.specs = register.tensors
        self.nbytes = register.nbytes
        self.fill = register.fill
        self.uses = sum(read.firings for read in register.readers)  # how often each token is taken
        self._count = register.slots
        self._combine = tuple(_combination(register.id, spec) for spec in register.tensors) if self.fill > 1 else ()
        self._parts: list[Any] = []
        self._values: list[Token | None] = [None] * register.slots
        self._left = [0] * register.slots
        for slot in range(register.initial):
            self._values[slot] = [
                torch.zeros(t.shape, dtype=dtype_of(t.dtype), device=device) for t in register.tensors
            ]
            self._left[slot] = self.uses

    @property
    def owns(self) -> bool:
        """Whether its tokens are new tensors that nothing else refers to once their only reader has taken them."""
        return self.uses == 1 and self.fill > 1 and all(c is not None for c in self._combine)

    def held(self, slot: int) -> Token | None:
        """The token in a slot, if there is one."""
        return self._values[slot]

    def put(self, sequence: int, token: Token) -> None:
        """Put token number ``sequence`` into its slot."""
        if self.uses:
            slot = sequence % self._count
            self._values[slot] = token
            self._left[slot] = self.uses

    def sums(self, places: Collection[int]) -> list[Tensor]:
        """The sums so far at some positions of the token that is being made; empty before its first firing."""
        return [self._parts[i] for i in places] if self._parts else []

    def add(self, sequence: int, outputs: Token, complete: bool, summed: Collection[int] = ()) -> None:
        """Add the outputs of one firing to the token that is being made; if ``complete``, put it into its slot.

        At the positions in ``summed``, the kernel does the sum itself: its first output is a new tensor, to which later
        firings have added in place.
        """
        parts = self._parts
        if not parts:
            parts.extend(None for _ in outputs)
        for i, (how, value) in enumerate(zip(self._combine, outputs, strict=True)):
            if how is None:
                parts[i] = value
            elif how >= 0:
                parts[i] = parts[i] or []
                parts[i].append(value)
            elif i in summed:
                parts[i] = value
            elif parts[i] is None:
                parts[i] = (value,)  # may be shared, so the next firing must not add to it in place
            elif isinstance(parts[i], tuple):
                few_bits = self.specs[i].dtype in FEW_BITS  # the sum of many would keep few of the last terms
                parts[i] = (parts[i][0].float() if few_bits else parts[i][0]) + value
            else:
                parts[i].add_(value)
        if complete:
            self._parts = []
            made = zip(self._combine, parts, outputs, strict=True)
            self.put(sequence, [_finish(how, part, value.dtype) for how, part, value in made])

    def forgo(self, sequence: int, complete: bool) -> None:
        """Count a firing of a call that is given up: it fills its slot with an empty token, which readers ignore."""
        if self.fill > 1:
            self._parts = []
        if complete:
            self.put(sequence, ())

    def blank(self) -> list[Tensor]:
        """Uninitialized tensors, which a transfer sends in place of an empty token."""
        return [torch.empty(t.shape, dtype=dtype_of(t.dtype)) for t in self.specs]

    def take(self, sequence: int) -> Token:
        """Take the token for one firing of one reader; the last reader empties the slot."""
        slot = sequence % self._count
        token = self._values[slot]
        assert token is not None, f"register {self.id} holds no token {sequence}"
        if self.uses == 1:
            self._values[slot] = None
        else:
            self._left[slot] -= 1
            if not self._left[slot]:
                self._values[slot] = None
        return token


def of_one_firing(spec: TensorSpec, fill: int) -> TensorSpec:
    """The shape and dtype of one firing's output, if ``fill`` firings make the tensor ``spec`` of a register.

    If the outputs are concatenated, each is an equal part along that dim; else each has the shape of ``spec``.
    """
    if spec.combine.kind is not CombineKind.CAT or fill == 1:
        return spec
    at = spec.combine.dim
    return replace(spec, shape=(*spec.shape[:at], spec.shape[at] // fill, *spec.shape[at + 1 :]))


def _combination(register: int, spec: TensorSpec) -> int | None:
    """How to combine firings: the dim to concatenate along, -1 to sum, None to keep the last output."""
    if spec.combine == LAST:
        return None
    if spec.combine == SUM:
        return -1
    if spec.combine.dim >= len(spec.shape):
        raise PlanError(
            f'register {register}: combine "{spec.combine}" of a tensor of shape {spec.shape} was found; one of its '
            f"dims was expected"
        )
    return spec.combine.dim


def _finish(how: int | None, part: Any, dtype: torch.dtype) -> Tensor:
    if how is None:
        found = part
    elif how >= 0:
        found = torch.cat(part, how)
    else:
        found = part[0] if isinstance(part, tuple) else part.to(dtype)
    assert isinstance(found, Tensor)
    return found
