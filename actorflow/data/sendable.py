"""Convert samples to a form that can be sent to another process, without changing the dataset that they are from."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["sendable"]


def sendable(samples: dict[int, Any]) -> dict[int, Any]:
    """The samples, by place, or none where one cannot be sent, such as an open file or a lock.

    Torch sends a tensor by moving all of its storage to shared memory, so a row of a large tensor becomes a copy here.
    """
    try:
        _Trial(io.BytesIO()).dump(samples)
    except Exception:
        return {}
    made: dict[int, Any] = pytree.tree_map_only(Tensor, _alone, samples)
    return made


class _Trial(ForkingPickler):
    """Pickles what is sent, but for tensors, which torch would move and keep open until somebody receives them."""

    def reducer_override(self, obj: Any) -> Any:
        """Nothing in place of a tensor that can be sent."""
        if isinstance(obj, Tensor):
            if obj.requires_grad and not obj.is_leaf:
                raise TypeError("a tensor with a graph cannot be sent")
            return int, ()
        return (int, ()) if isinstance(obj, torch.UntypedStorage) else NotImplemented


def _alone(tensor: Tensor) -> Tensor:
    """The tensor with a storage of its own."""
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
