"""Decompose means, norms, variances and batch norm into sums, so that a split batch gives partial sums.

``TABLE`` is a ``decomposition_table`` for ``make_fx``; it is applied to every captured step.
``BATCH_NORM`` is a table of its own, because batch norm stays fused unless its batch is split.  An
entry returns NotImplemented where it does not apply, which leaves the op as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.core.ops import Ref
from actorflow_compiler.graph.graph import Graph, Node, prune
from actorflow_compiler.substitutes.decomposition_table import Table, registering_into, widened
from actorflow_compiler.substitutes.losses import LOSSES

aten = torch.ops.aten
TABLE: Table = {**LOSSES}
BATCH_NORM: Table = {}

_for = registering_into(TABLE)
_for_split_batch = registering_into(BATCH_NORM)


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Dims as a list of non-negative numbers; None or no dims means all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(x.dim()))
    return [d % max(1, x.dim()) for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


def _sum(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    result: Tensor = aten.sum.dim_IntList(x, list(dims), keepdim) if x.dim() else aten.sum.default(x)
    return result


# means, norms and variances


@_for(aten.mean.dim, aten.mean.default)
def _mean(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum divided by a constant."""
    dims = _dims(x, dim)
    total = _sum(widened(x if dtype is None else x.to(dtype)), dims, keepdim)
    return (total / _count(x, dims)).to(dtype or x.dtype)


@_for(aten.sum.default, aten.sum.dim_IntList)
def _count_true(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Count truth values in float64, so that counts of parts may be partial sums; exact below 2**53."""
    if x.dtype != torch.bool:
        return NotImplemented
    return _sum(x.to(torch.float64), _dims(x, dim), keepdim).to(dtype or torch.int64)


@_for(aten.linalg_vector_norm.default)
def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Norms of order 2, 1 and inf: root of the sum of squares, sum of absolute values, largest absolute value."""
    if ord not in (1, 2, math.inf) or x.is_complex():
        return NotImplemented
    wide = widened(x if dtype is None else x.to(dtype))
    dims = _dims(x, dim)
    if ord == math.inf:
        return aten.amax.default(wide.abs(), dims, keepdim).to(dtype or x.dtype)
    total = _sum(wide * wide, dims, keepdim).sqrt() if ord == 2 else _sum(wide.abs(), dims, keepdim)
    return total.to(dtype or x.dtype)


def _var_and_mean(
    x: Tensor, dim: int | Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Variance and mean in two passes, as in torch: first the mean, then the squared deviations from it."""
    dims = _dims(x, dim)
    n = _count(x, dims)
    wide = widened(x)
    mean = _sum(wide, dims, True) / n
    away = wide - mean
    left = max(0.0, n - (1 if correction is None else correction))
    total = _sum(away * away, dims, keepdim)
    variance = total / left if left else total / torch.zeros_like(total)
    return variance.to(x.dtype), (mean if keepdim or not x.dim() else aten.squeeze.dims(mean, dims)).to(x.dtype)


@_for(aten.var.correction)
def _var(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return NotImplemented if x.is_complex() else _var_and_mean(x, dim, correction, keepdim)[0]


@_for(aten.std.correction)
def _std(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return NotImplemented if x.is_complex() else _var_and_mean(x, dim, correction, keepdim)[0].sqrt()


@_for(aten.var_mean.correction)
def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return NotImplemented if x.is_complex() else _var_and_mean(x, dim, correction, keepdim)


@_for(aten.std_mean.correction)
def _std_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    if x.is_complex():
        return NotImplemented
    variance, mean = _var_and_mean(x, dim, correction, keepdim)
    return variance.sqrt(), mean


# layers


@_for(aten.convolution_backward.default)
def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Compute the bias's gradient separately, as it does not depend on the input."""
    if not output_mask[2]:
        return NotImplemented
    bias = _sum(widened(grad), [0, *range(2, grad.dim())], False).to(grad.dtype)
    if not output_mask[0] and not output_mask[1]:
        return None, None, bias
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    gx, gw, _ = aten.convolution_backward(grad, x, weight, None, *settings, [output_mask[0], output_mask[1], False])
    return gx, gw, bias


# batch norm, for a batch that is split


def _channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dims that batch norm reduces over, and the shape that broadcasts one number for each channel."""
    return [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, shape: list[int]
) -> Tensor:
    y = (widened(x) - mean.view(shape)) * inverse.view(shape)
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The output, saved mean and inverse standard deviation, and new running statistics; in two passes over x."""
    dims, shape = _channels(x)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        out = _normalised(x, weight, bias, running_mean, (running_var + eps).rsqrt(), shape)
        return out, x.new_empty(0), x.new_empty(0), running_mean, running_var
    n = _count(x, dims)
    wide = widened(x)
    mean = _sum(wide, dims, False) / n
    away = wide - mean.view(shape)
    squares = _sum(away * away, dims, False)
    inverse = (squares / n + eps).rsqrt()
    out = _normalised(x, weight, bias, mean, inverse, shape)
    if running_mean is None or running_var is None:
        return out, mean, inverse, None, None
    new_mean = (momentum * mean + (1 - momentum) * running_mean).to(running_mean.dtype)
    new_var = (momentum * (squares / max(1, n - 1)) + (1 - momentum) * running_var).to(running_var.dtype)
    return out, mean, inverse, new_mean, new_var


@_for_split_batch(aten._native_batch_norm_legit_functional.default)
def _batch_norm_functional(*args: Any) -> Any:
    return _batch_norm(*args)


@_for_split_batch(aten._native_batch_norm_legit.no_stats)
def _batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Any:
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@_for_split_batch(aten.native_batch_norm.default)
def _batch_norm_that_updates(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Applies only where no statistics are updated: capture has already written out updates in place."""
    if training and running_mean is not None:
        return NotImplemented
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@_for_split_batch(aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    dims, shape = _channels(x)
    wide, upstream = widened(x), widened(grad)
    if train:
        mean, inverse = save_mean, save_invstd
    else:
        assert running_var is not None
        mean, inverse = running_mean, (running_var + eps).rsqrt()
    assert mean is not None
    assert inverse is not None
    normal = (wide - mean.view(shape)) * inverse.view(shape)
    grad_bias = _sum(upstream, dims, False)
    grad_weight = _sum(upstream * normal, dims, False)
    scale = inverse if weight is None else inverse * weight
    if train:
        n = _count(x, dims)
        upstream = upstream - (grad_bias / n).view(shape) - normal * (grad_weight / n).view(shape)
    out_dtype = x.dtype if weight is None else weight.dtype
    return (
        (upstream * scale.view(shape)).to(x.dtype) if output_mask[0] else None,
        grad_weight.to(out_dtype) if output_mask[1] else None,
        grad_bias.to(out_dtype) if output_mask[2] else None,
    )


# gradient clipping


def join_norms(graph: Graph) -> Graph:
    """Replace the squares of stacked square roots by the values under the roots.

    A norm over many tensors is computed as the norm of their norms.  Decomposed, it takes roots and
    then squares them again.  Without these, the sums of squares of split tensors stay partial sums,
    and one all-reduce adds them up instead of one for each tensor.
    """
    made = {out: n for n in graph.nodes for out in n.outs}
    nodes = []
    for n in graph.nodes:
        roots = _stacked_roots(n, made)
        if roots is None:
            nodes.append(n)
        else:
            stack = made[n.args[0].index]
            nodes.append(replace(n, op=stack.op, args=(roots, *stack.args[1:]), kwargs=stack.kwargs))
    return prune(replace(graph, nodes=tuple(nodes)))


def _stacked_roots(square: Node, made: Mapping[int, Node]) -> tuple[Ref, ...] | None:
    """The values x of ``s * s`` where ``s = stack([sqrt(x), ...])``."""
    if square.op != "aten.mul.Tensor" or square.args[0] != square.args[1] or square.kwargs:
        return None
    stack = made.get(square.args[0].index)
    if stack is None or stack.op != "aten.stack.default":
        return None
    roots = [made.get(r.index) for r in stack.args[0]]
    found = [r.args[0] for r in roots if r is not None and r.op == "aten.sqrt.default"]
    return tuple(found) if len(found) == len(roots) else None
