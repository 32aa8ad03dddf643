"""Shared parts of decomposition tables for ``make_fx``: their type, a registering decorator, the dtype of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.torch_internals import OpOverload

Decomposition = Callable[..., Any]
Table = dict[OpOverload, Decomposition]

NARROW = (torch.float16, torch.bfloat16)  # sums of these are computed in float32


def registering_into(table: Table) -> Callable[..., Callable[[Decomposition], Decomposition]]:
    """A decorator that registers functions in a table: ``@registering_into(table)(op, another_op)``."""

    def of(*ops: OpOverload) -> Callable[[Decomposition], Decomposition]:
        def register(function: Decomposition) -> Decomposition:
            table.update(dict.fromkeys(ops, function))
            return function

        return register

    return of


def widened(x: Tensor) -> Tensor:
    """The tensor in the dtype in which sums are computed."""
    return x.to(torch.float32) if x.dtype in NARROW else x
