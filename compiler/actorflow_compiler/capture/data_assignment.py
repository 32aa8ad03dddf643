"""Turn ``p.data = x`` in a step into a copy of ``x`` into ``p``, which a trace can see.

In PyTorch, ``x`` and ``p`` share memory from then on; here they do not.  So ``x`` may not be changed any more, nor read
after ``p`` has changed, and it may not be a tensor that the script or an optimizer had before the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.core.torch_internals import memory_of
from actorflow_compiler.core.user_code import is_users
from actorflow_compiler.values.reads import warn

_SET = Tensor.data.__set__  # type: ignore[attr-defined]
_GRADIENT: Any = Tensor.grad  # a descriptor
_GRAD = _GRADIENT.__get__
_LOOKS = {  # functions that read no values
    Tensor.untyped_storage, Tensor.storage_offset, Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride,
    Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
}  # fmt: skip
_KEEPS_STATISTICS = {F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}  # write statistics
_CHANGING = {f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")} | {
    "__setitem__", "__idiv__",
}  # fmt: skip
INSTEAD = "expected: p.copy_(x) under torch.no_grad(), which gives p the values of x and memory of its own"


def _by_user(frame: FrameType | None) -> bool:
    """Whether the user's code made the call; frames of other ``TorchFunctionMode``s do not count."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


class DataAssignmentMode(TorchFunctionMode):
    """The mode that handles ``p.data = x`` while a step is traced; ``kept`` are the tensors that outlive the step.

    ``asked`` is called with each tensor whose ``.grad`` the user's code reads.
    """

    def __init__(self, kept: Iterable[Tensor], asked: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._gradient_read = asked
        self._kept = {memory_of(tensor) for tensor in kept}
        self._changed: set[int] = set()  # memory that was written since an assignment
        self._shared: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by x's memory: each x, kept alive, and its p

    def holder_of(self, tensor: Tensor) -> Tensor:
        """The tensor that holds the values of ``tensor`` at the end of the step: ``p`` if it is an ``x``, else itself.

        Raises CaptureError for another view of the memory of an ``x``.
        """
        pairs = self._shared.get(memory_of(tensor), []) if self._shared else []
        if not pairs:
            return tensor
        for x, p in pairs:
            if _view_key(x) == _view_key(tensor):
                return p
        raise CaptureError(f"after p.data = x, what shares memory with x is kept for the next call; {INSTEAD}")

    def check_results(self, results: Iterable[Tensor]) -> None:
        """Raise CaptureError for a result that would share memory with a ``p``."""
        if self._shared and any(memory_of(r) in self._shared for r in results):
            raise CaptureError(f"after p.data = x, x is returned, which is p's memory from then on; {INSTEAD}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET:
            return self._assign(*args)
        if self._shared and func not in _LOOKS:
            self._check(func, args, kwargs)
        if func == _GRAD:
            if not args[0].is_leaf and not args[0].retains_grad:
                warn(
                    "the .grad of a tensor that the step has computed is None, as in PyTorch; expected: the tensor's "
                    "retain_grad() before backward()"
                )
                return None
            if _by_user(sys._getframe(1)):
                self._gradient_read(args[0])
        return func(*args, **kwargs)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise CaptureError for an op that would give another result if ``x`` and ``p`` shared their memory."""
        changes = in_place(func, kwargs) or func in _KEEPS_STATISTICS
        for x in _tensors(args, kwargs):
            for _, p in self._shared.get(memory_of(x), ()):
                if changes or memory_of(p) in self._changed:
                    raise CaptureError(
                        f"after p.data = x, x is used again, which is p's memory from then on; {INSTEAD}"
                    )
        if changes:
            self._changed |= {memory_of(x) for x in _tensors(args, kwargs)}

    def _assign(self, tensor: Tensor, data: Tensor) -> None:
        if tensor.shape != data.shape or tensor.dtype != data.dtype:
            raise CaptureError(
                f".data of a tensor {tensor.dtype}{list(tensor.shape)} is set to {data.dtype}{list(data.shape)}; "
                f"expected: data of the same shape and dtype, as variables of a plan keep theirs"
            )
        if _view_key(data) == _view_key(tensor):
            return  # p.data -= x: it has changed in place already
        if memory_of(data) in self._kept:
            raise CaptureError(
                f"p.data = x, for a tensor of shape {list(tensor.shape)}, lets two tensors of the script share memory; "
                f"{INSTEAD}"
            )
        with torch.no_grad():
            tensor.copy_(data)
        for at, pairs in self._shared.items():
            self._shared[at] = [pair for pair in pairs if pair[1] is not tensor]
        self._changed.discard(memory_of(tensor))
        self._shared.setdefault(memory_of(data), []).append((data, tensor))


def in_place(func: Any, kwargs: Any) -> bool:
    """Whether a function of torch writes its first argument, or ``out``."""
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    changes = name in _CHANGING if name.startswith("__") else name.endswith("_")
    return changes or "out" in kwargs or kwargs.get("inplace") is True


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _view_key(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors over the same elements of the same memory."""
    return memory_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
