"""Tensors for results that are not available yet: shape and dtype are known, and any other use waits for the value."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow_compiler.core.monkey_patches import original
from actorflow_compiler.core.torch_internals import only_dispatch

__all__ = ["METADATA", "TensorFuture", "LazyTensor", "wait_for_values"]

_no_override = only_dispatch


def _getters(*names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name))  # torch versions differ


# functions and properties that need no memory of the tensor
METADATA: frozenset[Any] = _getters(
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "names", "itemsize", "nbytes",
    "output_nr", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn",
    "is_xla", "is_mps", "is_xpu", "is_ipu", "is_vulkan", "is_maia", "is_mtia",
) | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_contiguous,
    Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.storage_offset,
    Tensor.get_device, Tensor.__len__, Tensor.is_conj, Tensor.is_neg, Tensor.is_inference,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip


class TensorFuture:
    """The value of one result; the first thread that reads it fetches it, and it is kept from then on.

    ``fetch`` waits for the value and raises the error that ended the run.  The reference to it is dropped once it has
    returned, so that everything it holds can be freed.
    """

    __slots__ = ("__weakref__", "_fetch", "_lock", "_value")

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch: Callable[[], Tensor] | None = fetch
        self._lock = threading.Lock()
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        """Wait for the value and return it."""
        with self._lock:
            if self._value is None:
                assert self._fetch is not None
                self._value = self._fetch()
                self._fetch = None
            return self._value

    def settle(self) -> None:
        """Fetch the value, which must be available, so that its source can be freed.

        An error is not raised here, but when the value is read.
        """
        with contextlib.suppress(Exception):
            self.value()


class LazyTensor(Tensor):
    """A result of a call: shape, dtype and device are known at once, anything else waits for the value.

    The result of an operation on it is a plain tensor.
    """

    _promise: TensorFuture
    part: TensorFuture | None = None  # this rank's part of it, where it has one and that is not all of it
    kept = False  # whether a step stored it in the script's state, where it becomes a tensor of the script

    @staticmethod
    def of(
        promise: TensorFuture,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        dropped: Callable[[], object] | None = None,
    ) -> LazyTensor:
        """A handle on ``promise``; ``dropped`` is called when the handle is garbage-collected."""
        result: LazyTensor = Tensor._make_wrapper_subclass(LazyTensor, shape, dtype=dtype, device=device)
        result._promise = promise
        if dropped is not None:
            weakref.finalize(result, dropped).atexit = False
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with _no_override():
                return func(*args, **(kwargs or {}))
        if not kwargs and _LEAVES.issuperset(map(type, args)):  # as in float(loss), which scripts call at each step
            args = [one._promise.value() if type(one) is LazyTensor else one for one in args]
            return original(func)(*args)
        args, kwargs = wait_for_values((args, kwargs or {}))
        return original(func)(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = wait_for_values((args, kwargs or {}))
        return func(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """For NumPy: an array that shares the value's memory unless the dtype differs or a copy is requested."""
        array = self._promise.value().numpy()
        return array.astype(dtype, copy=bool(copy)) if dtype is not None or copy else array


_LEAVES = frozenset({LazyTensor, Tensor, int, float, bool, str, type(None), torch.dtype, torch.device})


def wait_for_values(tree: Any) -> Any:
    """The tree with every ``LazyTensor`` replaced by its value."""
    return pytree.tree_map_only(LazyTensor, lambda r: r._promise.value(), tree)
