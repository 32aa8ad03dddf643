"""Decompose losses and their gradients into sums, so that a split batch gives partial sums.

``LOSSES`` is a part of the table in ``decompositions.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actorflow_compiler.custom_ops.split_classes import TRACED
from actorflow_compiler.substitutes.decomposition_table import NARROW, Table, registering_into, widened

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reductions
LOSSES: Table = {}

_for = registering_into(LOSSES)


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    """Reduce the losses of the elements; a mean divides by their number, which is a constant."""
    if reduction == NONE:
        return loss
    total: Tensor = aten.sum.default(widened(loss))
    return (total / loss.numel() if reduction == MEAN else total).to(loss.dtype)


def _spread(grad: Tensor, reduction: int, count: int) -> Tensor:
    """The gradient of each element's loss, given the gradient of the reduced loss."""
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
    loss = (target - 1.0) * torch.log1p(-x).clamp(min=-100.0) - target * x.log().clamp(min=-100.0)
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
    """The weight of each target's class; 0 for ignored targets."""
    counts = target != ignore_index
    each = aten.index.Tensor(widened(weight), [torch.where(counts, target, 0).long()])
    return torch.where(counts, each, 0.0)


def _total_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The divisor of a mean of class losses.  It depends on the targets alone, so it need not wait for the model."""
    if weight is not None:
        return aten.sum.default(_class_weights(target, weight, ignore_index))  # type: ignore[no-any-return]
    counts = target != ignore_index
    return aten.sum.default(counts.to(torch.float32 if dtype in NARROW else dtype))  # type: ignore[no-any-return]


@_for(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    """The weighted losses of the samples, their sum or their sum over the total weight; and that total weight."""
    dim = min(1, x.dim() - 1)
    if target.dim() != x.dim() - 1:
        return NotImplemented
    loss = -TRACED.pick(x, target, dim, ignore_index, 0, x.shape[dim])
    if weight is not None:
        loss = loss * _class_weights(target, weight, ignore_index).to(x.dtype)
    if reduction == NONE:
        return loss, torch.zeros((), dtype=x.dtype, device=x.device)
    total = _total_weight(target, weight, ignore_index, x.dtype)
    summed = aten.sum.default(widened(loss))
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
    """The gradient of ``x``: a number at each sample's class, else 0.  Recomputes the total weight of the forward."""
    dim = min(1, x.dim() - 1)
    if target.dim() != x.dim() - 1:
        return NotImplemented
    each = -widened(grad)
    if reduction == MEAN:
        each = each / _total_weight(target, weight, ignore_index, x.dtype)
    if weight is not None:
        each = each * _class_weights(target, weight, ignore_index)
    each = each.to(x.dtype).expand(target.shape)
    return TRACED.pick_backward(each, target, x.shape[dim], dim, ignore_index, 0, x.shape[dim])
