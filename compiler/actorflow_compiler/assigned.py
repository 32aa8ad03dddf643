"""``p.data = x`` in a step goes in; a copy of ``x`` into ``p``, which a trace can see, comes out.

In PyTorch the two share memory from then on.  Here they do not; so ``x`` may not be used any more, and may not be what
the script or an optimizer had before the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from actorflow_compiler.errors import CaptureError
from actorflow_compiler.reads import warn

_SET = Tensor.data.__set__  # type: ignore[attr-defined]
_GRADIENT: Any = Tensor.grad  # a descriptor
_GRAD = _GRADIENT.__get__
_LOOKS = {  # that read no values
    Tensor.untyped_storage, Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
}  # fmt: skip
INSTEAD = "expected: p.copy_(x) under torch.no_grad(), which gives p the values of x and memory of its own"


class DataAssigned(TorchFunctionMode):
    """The mode in which a step is traced; ``kept`` are the tensors that outlive it."""

    def __init__(self, kept: Iterable[Tensor]) -> None:
        super().__init__()
        self._kept = {_memory(tensor) for tensor in kept}
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}  # by x's memory: x, kept alive, and p

    def of(self, tensor: Tensor) -> Tensor:
        """What has the values of a tensor as the step leaves it: ``p`` for ``x``."""
        return self._shared.get(_memory(tensor), (tensor, tensor))[1] if self._shared else tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET:
            return self._assign(*args)
        if self._shared and func not in _LOOKS and any(_memory(x) in self._shared for x in _tensors(args, kwargs)):
            raise CaptureError(f"after p.data = x, x is used again, which is p's memory from then on; {INSTEAD}")
        if func == _GRAD and not args[0].is_leaf and not args[0].retains_grad:
            warn(
                "the .grad of a tensor that the step has computed is None, as in PyTorch; expected: the tensor's "
                "retain_grad() before backward()"
            )
            return None
        return func(*args, **kwargs)

    def _assign(self, tensor: Tensor, data: Tensor) -> None:
        if tensor.shape != data.shape or tensor.dtype != data.dtype:
            raise CaptureError(
                f".data of a tensor {tensor.dtype}{list(tensor.shape)} is set to {data.dtype}{list(data.shape)}; "
                f"expected: data of the same shape and dtype, as variables of a plan keep theirs"
            )
        if _memory(data) in self._kept:
            raise CaptureError(
                f"p.data = x, for a tensor of shape {list(tensor.shape)}, lets two tensors of the script share memory; "
                f"{INSTEAD}"
            )
        with torch.no_grad():
            tensor.copy_(data)
        self._shared = {at: pair for at, pair in self._shared.items() if pair[1] is not tensor}
        self._shared[_memory(data)] = data, tensor


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
