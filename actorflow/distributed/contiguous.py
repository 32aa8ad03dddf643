"""Collectives of tensors that are not contiguous: Gloo takes the memory behind their first element for their values."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor

from actorflow_compiler.core.errors import CallError

__all__ = ["with_contiguous"]

_WRITTEN = {  # what a collective writes; the others copy, or refuse, what is not contiguous
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "reduce_scatter": "output",
    "scatter": "tensor",
}
_READ = {"reduce_scatter": "input_list", "scatter": "scatter_list"}


def with_contiguous(name: str, given: MutableMapping[str, Any]) -> Callable[[], object]:
    """Replace tensors in the arguments of a collective by contiguous copies; the function returned writes them back.

    Raises CallError for such a tensor with ``async_op``, as nobody could say when it is to be written back.
    """
    read = _READ.get(name, "")
    if given.get(read):
        given[read] = [t.contiguous() for t in given[read]]
    written = _WRITTEN.get(name, "")
    mine = given.get(written)
    if not isinstance(mine, Tensor) or mine.is_contiguous():
        return lambda: None
    if given.get("async_op"):
        raise CallError(
            f"the collective {name} was given async_op=True and a tensor of shape {tuple(mine.shape)} with strides "
            f"{mine.stride()}, which is not contiguous; expected: {name} of tensor.contiguous(), and "
            f"tensor.copy_(…) after wait()"
        )
    copy = given[written] = mine.contiguous()
    return lambda: mine.copy_(copy)
