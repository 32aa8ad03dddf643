"""Ops whose result is no plain sum, norm or product in; the same in sums, so that a split batch gives partial sums.

``TABLE`` is a ``decomposition_table`` for ``make_fx``; it is applied to every captured step.
``BATCH_NORM`` is apart, because batch norm is fused unless its batch is split.  An entry returns
NotImplemented where it does not apply, which leaves the op as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.class_ops import TRACED
from actorflow_compiler.graph import Graph, Node, prune
from actorflow_compiler.ops import Ref

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reductions
NARROW = (torch.float16, torch.bfloat16)  # sums of these are made in float32
Decomposition = Callable[..., Any]

TABLE: dict[torch._ops.OpOverload, Decomposition] = {}
BATCH_NORM: dict[torch._ops.OpOverload, Decomposition] = {}


def _for(
    *ops: torch._ops.OpOverload, table: dict[torch._ops.OpOverload, Decomposition] = TABLE
) -> Callable[[Decomposition], Decomposition]:
    def register(function: Decomposition) -> Decomposition:
        table.update(dict.fromkeys(ops, function))
        return function

    return register


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """Dims as a list; none given means all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(x.dim()))
    return [d % max(1, x.dim()) for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


def _wide(x: Tensor) -> Tensor:
    """In the dtype that sums are made in."""
    return x.to(torch.float32) if x.dtype in NARROW else x


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
    total = _sum(_wide(x if dtype is None else x.to(dtype)), dims, keepdim)
    return (total / _count(x, dims)).to(dtype or x.dtype)


@_for(aten.sum.default, aten.sum.dim_IntList)
def _count_true(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Truth values counted in floating point, where the counts of parts may be added up; exact below 2**53."""
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
    """The root of the sum of squares, the sum of absolute values, or the largest of them."""
    if ord not in (1, 2, math.inf) or x.is_complex():
        return NotImplemented
    wide = _wide(x if dtype is None else x.to(dtype))
    dims = _dims(x, dim)
    if ord == math.inf:
        return aten.amax.default(wide.abs(), dims, keepdim).to(dtype or x.dtype)
    total = _sum(wide * wide, dims, keepdim).sqrt() if ord == 2 else _sum(wide.abs(), dims, keepdim)
    return total.to(dtype or x.dtype)


def _var_and_mean(
    x: Tensor, dim: int | Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """In two passes, as torch: first the mean, then the squares of what differs from it."""
    dims = _dims(x, dim)
    n = _count(x, dims)
    wide = _wide(x)
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


# losses


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    """The losses of the elements as ``reduction`` says; the mean over a constant number of them."""
    if reduction == NONE:
        return loss
    total: Tensor = aten.sum.default(_wide(loss))
    return (total / loss.numel() if reduction == MEAN else total).to(loss.dtype)


def _spread(grad: Tensor, reduction: int, count: int) -> Tensor:
    """The gradient of each element's loss."""
    return grad / count if reduction == MEAN else grad


@_for(aten.mse_loss.default)
def _mse(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    away = x - target
    return _reduced(away * away, reduction)


@_for(aten.mse_loss_backward.default)
def _mse_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    away = x - target
    return away * 2.0 * _spread(grad, reduction, away.numel())


@_for(aten.huber_loss.default)
def _huber(x: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    away = (x - target).abs()
    return _reduced(torch.where(away < delta, 0.5 * away * away, delta * (away - 0.5 * delta)), reduction)


@_for(aten.huber_loss_backward.default)
def _huber_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    away = x - target
    return away.clamp(-delta, delta) * _spread(grad, reduction, away.numel())


@_for(aten.smooth_l1_loss.default)
def _smooth_l1(x: Tensor, target: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    away = (x - target).abs()
    return _reduced(torch.where(away < beta, 0.5 * away * away / beta, away - 0.5 * beta) if beta else away, reduction)


@_for(aten.smooth_l1_loss_backward.default)
def _smooth_l1_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    away = x - target
    slope = (away / beta).clamp(-1.0, 1.0) if beta else away.sign()
    return slope * _spread(grad, reduction, away.numel())


@_for(aten.binary_cross_entropy.default)
def _bce(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    loss = (target - 1.0) * (1.0 - x).log().clamp(min=-100.0) - target * x.log().clamp(min=-100.0)
    return _reduced(loss if weight is None else loss * weight, reduction)


@_for(aten.binary_cross_entropy_backward.default)
def _bce_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    slope = (x - target) / ((1.0 - x) * x).clamp(min=1e-12)
    return (slope if weight is None else slope * weight) * _spread(grad, reduction, x.numel())


@_for(aten.binary_cross_entropy_with_logits.default)
def _bce_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    scale: Tensor | float = 1.0 if pos_weight is None else (pos_weight - 1.0) * target + 1.0
    loss = (1.0 - target) * x - scale * torch.nn.functional.logsigmoid(x)
    return _reduced(loss if weight is None else loss * weight, reduction)


@_for(aten.soft_margin_loss.default)
def _soft_margin(x: Tensor, target: Tensor, reduction: int = MEAN) -> Any:
    return aten.soft_margin_loss(x, target, SUM) / x.numel() if reduction == MEAN else NotImplemented


@_for(aten.soft_margin_loss_backward.default)
def _soft_margin_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Any:
    if reduction != MEAN:
        return NotImplemented
    return aten.soft_margin_loss_backward(grad / x.numel(), x, target, SUM)


@_for(aten.multi_margin_loss.default)
def _multi_margin(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = MEAN
) -> Any:
    if reduction != MEAN or x.dim() != 2:
        return NotImplemented
    return aten.multi_margin_loss(x, target, p, margin, weight, SUM) / len(x)


@_for(aten.multi_margin_loss_backward.default)
def _multi_margin_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    p: float,
    margin: float,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Any:
    if reduction != MEAN or x.dim() != 2:
        return NotImplemented
    return aten.multi_margin_loss_backward(grad / len(x), x, target, p, margin, weight, SUM)


@_for(aten.multilabel_margin_loss_forward.default)
def _multilabel_margin(x: Tensor, target: Tensor, reduction: int) -> Any:
    if reduction != MEAN or x.dim() != 2:
        return NotImplemented
    total, is_target = aten.multilabel_margin_loss_forward(x, target, SUM)
    return total / len(x), is_target


@_for(aten.multilabel_margin_loss_backward.default)
def _multilabel_margin_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor) -> Any:
    if reduction != MEAN or x.dim() != 2:
        return NotImplemented
    return aten.multilabel_margin_loss_backward(grad / len(x), x, target, SUM, is_target)


def _class_weights(target: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """The weight of each target's class; 0 for targets that do not count."""
    counts = target != ignore_index
    each = aten.index.Tensor(_wide(weight), [torch.where(counts, target, 0).long()])
    return torch.where(counts, each, 0.0)


def _total_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What a mean of class losses is divided by; from the targets alone, so that it need not wait for the model."""
    if weight is not None:
        return aten.sum.default(_class_weights(target, weight, ignore_index))  # type: ignore[no-any-return]
    counts = target != ignore_index
    return aten.sum.default(counts.to(torch.float32 if dtype in NARROW else dtype))  # type: ignore[no-any-return]


@_for(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    """What each sample's class has, weighted; the sum of that; or the sum over the total weight."""
    dim = min(1, x.dim() - 1)
    if target.dim() != x.dim() - 1:
        return NotImplemented
    loss = -TRACED.pick(x, target, dim, ignore_index, 0, x.shape[dim])
    if weight is not None:
        loss = loss * _class_weights(target, weight, ignore_index).to(x.dtype)
    if reduction == NONE:
        return loss, torch.zeros((), dtype=x.dtype, device=x.device)
    total = _total_weight(target, weight, ignore_index, x.dtype)
    summed = aten.sum.default(_wide(loss))
    return (summed / total if reduction == MEAN else summed).to(x.dtype), total.to(x.dtype)


@_for(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Any:
    """A number for the class of each sample; the total weight is made anew, as in the forward pass."""
    dim = min(1, x.dim() - 1)
    if target.dim() != x.dim() - 1:
        return NotImplemented
    each = -_wide(grad)
    if reduction == MEAN:
        each = each / _total_weight(target, weight, ignore_index, x.dtype)
    if weight is not None:
        each = each * _class_weights(target, weight, ignore_index)
    each = each.to(x.dtype).expand(target.shape)
    return TRACED.pick_backward(each, target, x.shape[dim], dim, ignore_index, 0, x.shape[dim])


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
    """The bias's gradient apart: it does not look at the input."""
    if not output_mask[2]:
        return NotImplemented
    bias = _sum(_wide(grad), [0, *range(2, grad.dim())], False).to(grad.dtype)
    if not output_mask[0] and not output_mask[1]:
        return None, None, bias
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    gx, gw, _ = aten.convolution_backward(grad, x, weight, None, *settings, [output_mask[0], output_mask[1], False])
    return gx, gw, bias


# batch norm, for a batch that is split


def _channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dims that are normalised over, and the shape of something that has one number for each channel."""
    return [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, shape: list[int]
) -> Tensor:
    y = (_wide(x) - mean.view(shape)) * inverse.view(shape)
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
    """Output, saved mean and inverse deviation, new statistics; in two passes over the input."""
    dims, shape = _channels(x)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        out = _normalised(x, weight, bias, running_mean, (running_var + eps).rsqrt(), shape)
        return out, x.new_empty(0), x.new_empty(0), running_mean, running_var
    n = _count(x, dims)
    wide = _wide(x)
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


@_for(aten._native_batch_norm_legit_functional.default, table=BATCH_NORM)
def _batch_norm_functional(*args: Any) -> Any:
    return _batch_norm(*args)


@_for(aten._native_batch_norm_legit.no_stats, table=BATCH_NORM)
def _batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Any:
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@_for(aten.native_batch_norm.default, table=BATCH_NORM)
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
    """Only where it updates nothing: an update in place is written out when the step is captured."""
    if training and running_mean is not None:
        return NotImplemented
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@_for(aten.native_batch_norm_backward.default, table=BATCH_NORM)
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
    wide, upstream = _wide(x), _wide(grad)
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
    """Replace the squares of stacked roots by what the roots were taken of.

    A norm over many tensors is the norm of their norms.  Written out it squares what it has just
    taken the root of; without that, the sums of squares of split tensors stay sums of terms, and
    are added up over the devices once instead of one by one.
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
