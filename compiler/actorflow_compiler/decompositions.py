"""Ops written out in simpler ones, so that few layouts suffice: means as sums, losses with denominators from the target alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for reductions


def mean_dim(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A mean is a sum times a constant."""
    dims = list(range(x.dim())) if not dim else list(dim)
    count = math.prod(x.shape[d] for d in dims)
    return aten.mul.Scalar(aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype), 1.0 / count if count else math.nan)


def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean of all elements."""
    return mean_dim(x, None, dtype=dtype)


def vector_norm(x: Tensor, ord: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """A Euclidean norm is the root of a sum of squares."""
    if ord != 2:
        return NotImplemented
    dims = list(range(x.dim())) if dim is None else list(dim)
    x = x if dtype is None else x.to(dtype)
    return aten.sqrt.default(aten.sum.dim_IntList(aten.mul.Tensor(x, x), dims, keepdim))


def target_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The total weight of a loss over classes, from the target alone."""
    counted = aten.ne.Scalar(target, ignore_index)
    if weight is None:
        return aten.sum.default(aten._to_copy.default(counted, dtype=dtype))
    index = aten.where.self(counted, target, aten.zeros_like.default(target))
    each = aten.index.Tensor(weight, [aten.view.default(index, [target.numel()])])
    return aten.sum.default(aten.mul.Tensor(each, aten._to_copy.default(aten.view.default(counted, [target.numel()]), dtype=dtype)))


def _loss_forward(op: Any) -> Callable[..., Any]:
    def run(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
        if reduction != MEAN:
            return NotImplemented
        total = target_weight(target, weight, ignore_index, x.dtype)
        return aten.div.Tensor(op(x, target, weight, SUM, ignore_index)[0], total), total

    return run


def _loss_backward(op: Any) -> Callable[..., Any]:
    def run(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total: Tensor) -> Any:
        if reduction != MEAN:
            return NotImplemented
        weights = target_weight(target, weight, ignore_index, x.dtype)
        return op(aten.div.Tensor(grad, weights), x, target, weight, SUM, ignore_index, weights)

    return run


def mse_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Any:
    """Squares, then a sum."""
    difference = aten.sub.Tensor(x, target)
    squares = aten.mul.Tensor(difference, difference)
    return squares if reduction == 0 else mean(squares) if reduction == MEAN else aten.sum.default(squares)


def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Linear in the gradient."""
    factor = 2.0 / x.numel() if reduction == MEAN else 2.0
    return aten.mul.Tensor(aten.mul.Scalar(aten.sub.Tensor(x, target), factor), grad)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    """The gradient of the bias is a sum by itself."""
    if not output_mask[2]:
        return NotImplemented
    mask = [output_mask[0], output_mask[1], False]
    dx, dw, _ = aten.convolution_backward.default(grad, x, weight, None, stride, padding, dilation, transposed, output_padding, groups, mask)
    return dx, dw, aten.sum.dim_IntList(grad, [0, *range(2, grad.dim())], False)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.mean.dim: mean_dim,
    aten.mean.default: mean,
    aten.linalg_vector_norm.default: vector_norm,
    aten.nll_loss_forward.default: _loss_forward(aten.nll_loss_forward.default),
    aten.nll_loss_backward.default: _loss_backward(aten.nll_loss_backward.default),
    aten.nll_loss2d_forward.default: _loss_forward(aten.nll_loss2d_forward.default),
    aten.nll_loss2d_backward.default: _loss_backward(aten.nll_loss2d_backward.default),
    aten.mse_loss.default: mse_loss,
    aten.mse_loss_backward.default: mse_loss_backward,
    aten.convolution_backward.default: convolution_backward,
}


def _channel(x: Tensor, like: Tensor) -> Tensor:
    """A value of each channel, shaped to meet a batch."""
    return aten.view.default(x, [1, -1] + [1] * (like.dim() - 2)) if x.dim() == 1 else x


def batch_norm_train(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, training: bool, momentum: float, eps: float
) -> Any:
    """Batch norm from sums over the batch: out, mean, 1/deviation, new running statistics."""
    if not training:
        return NotImplemented
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    mean_ = aten.mul.Scalar(aten.sum.dim_IntList(x, dims, False), 1.0 / count)
    centred = aten.sub.Tensor(x, _channel(mean_, x))
    var = aten.mul.Scalar(aten.sum.dim_IntList(aten.mul.Tensor(centred, centred), dims, False), 1.0 / count)
    rstd = aten.rsqrt.default(aten.add.Scalar(var, eps))
    out = aten.mul.Tensor(centred, _channel(rstd, x))
    if weight is not None:
        out = aten.mul.Tensor(out, _channel(weight, x))
    if bias is not None:
        out = aten.add.Tensor(out, _channel(bias, x))
    new_mean = aten.add.Tensor(aten.mul.Scalar(running_mean, 1 - momentum), aten.mul.Scalar(mean_, momentum))
    unbiased = momentum * count / (count - 1) if count > 1 else math.nan
    new_var = aten.add.Tensor(aten.mul.Scalar(running_var, 1 - momentum), aten.mul.Scalar(var, unbiased))
    return out, mean_, rstd, new_mean, new_var


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Any, running_var: Any, save_mean: Tensor, save_invstd: Tensor,
    train: bool, eps: float, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Backward of batch norm from sums over the batch."""
    if not train:
        return NotImplemented
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    normal = aten.mul.Tensor(aten.sub.Tensor(x, _channel(save_mean, x)), _channel(save_invstd, x))
    d_bias = aten.sum.dim_IntList(grad, dims, False)
    d_weight = aten.sum.dim_IntList(aten.mul.Tensor(grad, normal), dims, False)
    scale = save_invstd if weight is None else aten.mul.Tensor(save_invstd, weight)
    mean_part = _channel(aten.mul.Scalar(d_bias, 1.0 / count), x)
    slope_part = aten.mul.Tensor(normal, _channel(aten.mul.Scalar(d_weight, 1.0 / count), x))
    dx = aten.mul.Tensor(aten.sub.Tensor(aten.sub.Tensor(grad, mean_part), slope_part), _channel(scale, x))
    return dx, d_weight if output_mask[1] else None, d_bias if output_mask[2] else None


BATCH_NORM: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: batch_norm_train,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
