"""``flow.sbp``: layouts of a tensor on devices: ``sbp.split(0)``, ``sbp.broadcast``, ``sbp.partial_sum``."""

from __future__ import annotations

from actorflow_compiler.core import sbp as values
from actorflow_compiler.core.errors import LayoutError

__all__ = ["broadcast", "partial_sum", "split"]


class _Broadcast(values.Broadcast):
    """Every device holds the whole tensor; ``broadcast()`` is the same as ``broadcast``."""

    __slots__ = ()

    def __call__(self) -> values.Broadcast:
        return values.B

    def __eq__(self, other: object) -> bool:
        return isinstance(other, values.Broadcast)

    __hash__ = values.Broadcast.__hash__


class _PartialSum(values.PartialSum):
    """Every device holds one term of a sum, which is the tensor; ``partial_sum()`` is the same as ``partial_sum``."""

    __slots__ = ()

    def __call__(self) -> values.PartialSum:
        return values.P

    def __eq__(self, other: object) -> bool:
        return isinstance(other, values.PartialSum)

    __hash__ = values.PartialSum.__hash__


def split(dim: int) -> values.Split:
    """A layout that splits dimension ``dim`` over the devices, as evenly as possible.

    Raises LayoutError if ``dim`` is no integer.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise LayoutError(f"split({dim!r}) was found; the number of a dimension was expected: split(0)")
    return values.Split(dim)


broadcast: values.Broadcast = _Broadcast()
partial_sum: values.PartialSum = _PartialSum()
