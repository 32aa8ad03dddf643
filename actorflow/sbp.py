"""``flow.sbp``: layouts of a tensor on devices: ``sbp.split(0)``, ``sbp.broadcast``, ``sbp.partial_sum``."""

from __future__ import annotations

from actorflow.support.nearest_names import answer_with_nearest
from actorflow_compiler.core import sbp as values
from actorflow_compiler.core.errors import LayoutError

__all__ = ["broadcast", "partial_sum", "sbp", "split"]


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


def split(dim: int | None = None, *, axis: int | None = None) -> values.Split:
    """A layout that splits dimension ``dim`` over the devices, as evenly as possible.

    ``axis`` is another name for ``dim``.  Raises LayoutError if it is no integer, and where both are given.
    """
    if axis is not None:
        if dim is not None:
            raise LayoutError(f"split({dim!r}, axis={axis!r}) was found; one of the two was expected: split({dim!r})")
        dim = axis
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise LayoutError(f"split({dim!r}) was found; the number of a dimension was expected: split(0)")
    return values.Split(dim)


sbp = values.Split | values.Broadcast | values.PartialSum  # what each of them is, for isinstance
broadcast: values.Broadcast = _Broadcast()
partial_sum: values.PartialSum = _PartialSum()

answer_with_nearest(__name__)
