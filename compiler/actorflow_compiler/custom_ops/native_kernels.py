"""Call kernels of torch that require a memory layout with operands in that layout.

Most kernels follow the strides of their operands.  Those named here do not: they rely on the layout that torch's
functions give the operands before they call the op.  A captured step contains the op alone, and its operands have the
strides that the plan gave them.  With these, some of the kernels would raise, and others would read out of bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.torch_internals import OpOverload, fast_callable

__all__ = ["native_kernel"]

Args = tuple[Any, ...]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # formats with channels innermost, by rank


def native_kernel(op: OpOverload) -> Callable[..., Any]:
    """The fastest callable that runs the op on operands of any strides; it copies only operands that do not fit."""
    call = fast_callable(op)
    lay = _LAYOUTS.get(str(op))
    return call if lay is None else functools.partial(_call_with_layout, call, lay)


def _call_with_layout(call: Callable[..., Any], lay: Callable[[Args], Args], *args: Any, **kwargs: Any) -> Any:
    return call(*lay(args), **kwargs)


def _dense(x: Any) -> Any:
    """A tensor made contiguous; other arguments unchanged."""
    return x.contiguous() if isinstance(x, Tensor) else x


def _dense_last(x: Any) -> Any:
    """A tensor copied unless its last dim has stride 1; other arguments unchanged."""
    return x.contiguous() if isinstance(x, Tensor) and x.dim() and x.stride(-1) != 1 else x


def _all_dense(args: Args) -> Args:
    return tuple(map(_dense, args))


def _last_dim_dense(args: Args) -> Args:
    return tuple(map(_dense_last, args))


def _vectors_dense(args: Args) -> Args:
    """Make vectors (one number for each channel) contiguous; other operands are unchanged."""
    return tuple(_dense(a) if isinstance(a, Tensor) and a.dim() == 1 else a for a in args)


def _normed(args: Args) -> Args:
    """Make operands contiguous, or channels-last where the input is."""
    return _in_format(args, _format(args[0]), args[0].shape)


def _normed_backward(args: Args) -> Args:
    """As ``_normed``, but contiguous without a gradient of the input: the channels-last kernel writes it regardless."""
    x, mask = args[1], args[9]
    return _in_format(args, _format(x) if mask[0] else torch.contiguous_format, x.shape)


def _in_format(args: Args, format_: torch.memory_format, shape: torch.Size) -> Args:
    """Convert tensors of this shape to a memory format, and make others contiguous."""
    return tuple(
        a.contiguous(memory_format=format_) if isinstance(a, Tensor) and a.shape == shape else _dense(a) for a in args
    )


def _format(x: Tensor) -> torch.memory_format:
    last = LAST.get(x.dim()) if x.device.type == "cpu" else None
    if last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format


def _pooled(args: Args) -> Args:
    """Make 4-d operands, which have no batch dim, contiguous; 5-d ones may be channels-last."""
    return tuple(_dense(a) if isinstance(a, Tensor) and a.dim() == 4 else a for a in args)


def _strided(args: Args) -> Args:
    """Make the operand contiguous; the offset argument counts from its first element."""
    x, size, stride, *offset = args
    x = x.contiguous()
    return x, size, stride, x.storage_offset() + _offset(offset)


def _strided_scatter(args: Args) -> Args:
    """As ``_strided``, with the source after the operand."""
    x, source, size, stride, *offset = args
    return x.clone(memory_format=torch.contiguous_format), source, size, stride, _offset(offset)


def _offset(given: Sequence[int | None]) -> int:
    return given[0] or 0 if given else 0


_NEEDS: Mapping[Callable[[Args], Args], str] = {
    _normed: "native_group_norm",
    _normed_backward: "native_group_norm_backward",
    _all_dense: "native_layer_norm_backward _fused_rms_norm_backward _weight_norm_interface "
    "_weight_norm_interface_backward _embedding_bag _embedding_bag_forward_only _embedding_bag_backward "
    "_embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward _pdist_forward _pdist_backward "
    "_cdist_backward adaptive_max_pool3d_backward isin.Tensor_Tensor linalg_matrix_exp nll_loss2d_backward "
    "_linalg_det _linalg_slogdet",
    _vectors_dense: "native_batch_norm_backward",
    _last_dim_dense: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
    "view.dtype view_copy.dtype view_as_complex view_as_complex_copy",
    _pooled: "max_pool3d_with_indices max_pool3d_with_indices_backward",
    _strided: "as_strided",
    _strided_scatter: "as_strided_scatter",
}
_LAYOUTS = {
    f"aten.{name}" if "." in name else f"aten.{name}.default": lay
    for lay, names in _NEEDS.items()
    for name in names.split()
}
