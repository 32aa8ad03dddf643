"""How a tensor lies over devices, as users write it: ``sbp.split(0)``, ``sbp.broadcast``, ``sbp.partial_sum``."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow_compiler import sbp as values
from actorflow_compiler.errors import LayoutError
from actorflow_compiler.sbp import Sbp as sbp

__all__ = ["broadcast", "partial_sum", "sbp", "split"]


@dataclass(frozen=True, slots=True)
class _Broadcast(values.Broadcast):
    def __call__(self) -> values.Broadcast:
        return values.B


@dataclass(frozen=True, slots=True)
class _PartialSum(values.PartialSum):
    def __call__(self) -> values.PartialSum:
        return values.P


def split(dim: int) -> values.Split:
    """Dimension ``dim`` is cut over the devices, as evenly as possible."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise LayoutError(f"split({dim!r}) was found; the number of a dimension was expected: split(0)")
    return values.Split(dim)


broadcast = values.B
partial_sum = values.P
