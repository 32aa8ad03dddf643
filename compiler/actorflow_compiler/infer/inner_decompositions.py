"""Decompositions of ops that reduce inside (softmax, maxima, norms), so that only a small value is exchanged.

``BODIES`` has one function for each op that ``signatures/inner.py`` has a line for.  It takes ``cuts`` (for
each split dim, the number of devices on each mesh axis), then the arguments of the op.  Sums
are sums, so parts of a split dim give terms of them; maxima are taken of each part first.  Tensors of
16 bits come as float32, as the fused kernels compute; the caller casts the outputs back to their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from actorflow_compiler.core.sbp import Parts
from actorflow_compiler.core.torch_internals import OpOverload
from actorflow_compiler.custom_ops.split_classes import TRACED, listed

aten = torch.ops.aten
Cuts = tuple[tuple[int, tuple[Parts, ...]], ...]  # (dim, devices of each axis that splits it)
Body = TypeVar("Body", bound=Callable[..., Any])

BODIES: dict[str, Callable[..., Any]] = {}


def _for(op: OpOverload) -> Callable[[Body], Body]:
    def register(function: Body) -> Body:
        BODIES[str(op)] = function
        return function

    return register


def _max(x: Tensor, dims: Sequence[int], cuts: Cuts) -> Tensor:
    """The maxima, with the reduced dims kept at size 1; taken of each part first."""
    for dim, parts in cuts:
        x = TRACED.amax_blocks(x, dim, list(listed(parts)))
    return x.amax(list(dims), True)


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.sum(list(dims), True)


def _kept(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return x if keepdim else x.squeeze(list(dims))


def _all_dims(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [d % x.dim() for d in dims] or list(range(x.dim()))


# softmax


@_for(aten._log_softmax.default)
def _log_softmax(cuts: Cuts, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    away = x - _max(x, [dim], cuts)
    return away - _sum(away.exp(), [dim]).log()


@_for(aten._softmax.default)
def _softmax(cuts: Cuts, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    raised = (x - _max(x, [dim], cuts)).exp()
    return raised / _sum(raised, [dim])


@_for(aten._safe_softmax.default)
def _safe_softmax(cuts: Cuts, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A softmax that is 0 in rows where every element is masked (-inf)."""
    largest = _max(x, [dim], cuts)
    raised = (x - largest).exp()
    return torch.where(largest == -math.inf, 0.0, raised / _sum(raised, [dim]))


@_for(aten._log_softmax_backward_data.default)
def _log_softmax_backward(cuts: Cuts, grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return grad - output.exp() * _sum(grad, [dim])


@_for(aten._softmax_backward_data.default)
def _softmax_backward(cuts: Cuts, grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    weighted = grad * output
    return weighted - output * _sum(weighted, [dim])


@_for(aten.logsumexp.default)
def _logsumexp(cuts: Cuts, x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    dims = _all_dims(x, dims)
    largest = _max(x, dims, cuts)
    largest = torch.where(largest.abs() == math.inf, 0.0, largest)
    return _kept(_sum((x - largest).exp(), dims).log() + largest, dims, keepdim)


# maxima


@_for(aten.amax.default)
def _amax(cuts: Cuts, x: Tensor, dims: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    dims = _all_dims(x, dims)
    return _kept(_max(x, dims, cuts), dims, keepdim)


@_for(aten.amin.default)
def _amin(cuts: Cuts, x: Tensor, dims: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    return -_amax(cuts, -x, dims, keepdim)


@_for(aten.max.dim)
def _max_dim(cuts: Cuts, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The maxima, and the first index of each; NaN counts as larger than any number."""
    largest = _max(x, [dim], cuts)
    place = torch.arange(x.shape[dim], device=x.device).view([-1] + [1] * (x.dim() - 1 - dim % x.dim()))
    first = -_max(torch.where((x == largest) | x.isnan(), -place, -x.shape[dim]), [dim], cuts)
    return _kept(largest, [dim], keepdim), _kept(first, [dim], keepdim)


@_for(aten.min.dim)
def _min_dim(cuts: Cuts, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = _max_dim(cuts, -x, dim, keepdim)
    return -values, places


@_for(aten.argmax.default)
def _argmax(cuts: Cuts, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return _max_dim(cuts, x, dim, keepdim)[1]


@_for(aten.argmin.default)
def _argmin(cuts: Cuts, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return _max_dim(cuts, -x, dim, keepdim)[1]


# norms over the last dims


def _last(x: Tensor, shape: Sequence[int]) -> tuple[list[int], list[int], int]:
    """The dims that are normalised over, the dims before these, and the number of elements in the former."""
    first = x.dim() - len(shape)
    return list(range(first, x.dim())), list(range(first)), math.prod(shape)


def _over(x: Tensor, before: Sequence[int]) -> Tensor:
    """The sum over the dims that are not normalised over: the gradient of a weight."""
    return x.sum(list(before)) if before else x.clone()


@_for(aten.native_layer_norm.default)
def _layer_norm(
    cuts: Cuts, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """In two passes, as torch: first the mean, then the squared differences from it."""
    dims, _, n = _last(x, shape)
    mean = _sum(x, dims) / n
    away = x - mean
    inverse = (_sum(away * away, dims) / n + eps).rsqrt()
    out = away * inverse
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, inverse


@_for(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    cuts: Cuts, grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, inverse: Tensor, weight: Tensor | None,
    bias: Tensor | None, output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dims, before, n = _last(x, shape)
    normal = (x - mean) * inverse
    upstream = grad if weight is None else grad * weight
    away = upstream - _sum(upstream, dims) / n - normal * (_sum(upstream * normal, dims) / n)
    return (
        away * inverse if output_mask[0] else None,
        _over(grad * normal, before) if output_mask[1] else None,
        _over(grad, before) if output_mask[2] else None,
    )


@_for(aten._fused_rms_norm.default)
def _rms_norm(
    cuts: Cuts, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims, _, n = _last(x, shape)
    inverse = (_sum(x * x, dims) / n + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return x * inverse if weight is None else x * inverse * weight, inverse


@_for(aten._fused_rms_norm_backward.default)
def _rms_norm_backward(
    cuts: Cuts, grad: Tensor, x: Tensor, shape: Sequence[int], inverse: Tensor, weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dims, before, n = _last(x, shape)
    normal = x * inverse
    upstream = grad if weight is None else grad * weight
    away = upstream - normal * (_sum(upstream * normal, dims) / n)
    return (
        away * inverse if output_mask[0] else None,
        _over(grad * normal, before) if output_mask[1] else None,
    )
