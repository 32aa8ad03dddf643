"""``flow.nn`` as OneFlow's first generation spells it, over torch's functions.

All of them take the ``name`` of an op, which has no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actorflow.functions.conv_pool import (
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    conv1d,
    conv2d,
    conv3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from actorflow_compiler.core.errors import StateError

__all__ = [
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_normalization",
    "bias_add",
    "conv1d",
    "conv2d",
    "conv3d",
    "dropout",
    "elu",
    "gelu",
    "hardswish",
    "layer_norm",
    "leaky_relu",
    "logsoftmax",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "moments",
    "relu",
    "selu",
    "sigmoid",
    "sigmoid_cross_entropy_with_logits",
    "softmax",
    "softmax_cross_entropy_with_logits",
    "sparse_softmax_cross_entropy_with_logits",
    "swish",
    "tanh",
]

# -- activations -----------------------------------------------------------------------------------


def relu(x: Tensor, name: str | None = None) -> Tensor:
    """``max(x, 0)``."""
    return torch.relu(x)


def gelu(x: Tensor, name: str | None = None) -> Tensor:
    """``x · Φ(x)``, exactly."""
    return F.gelu(x)


def elu(x: Tensor, alpha: float = 1.0, name: str | None = None) -> Tensor:
    """``x``, or ``alpha · (eˣ - 1)`` below 0."""
    return F.elu(x, alpha)


def selu(x: Tensor, name: str | None = None) -> Tensor:
    """Torch's ``selu``."""
    return F.selu(x)


def leaky_relu(x: Tensor, alpha: float = 0.2, name: str | None = None) -> Tensor:
    """``x``, or ``alpha · x`` below 0."""
    return F.leaky_relu(x, alpha)


def swish(x: Tensor, beta: float = 1.0, name: str | None = None) -> Tensor:
    """``x · sigmoid(beta · x)``."""
    return F.silu(x) if beta == 1.0 else x * torch.sigmoid(beta * x)


def hardswish(x: Tensor, name: str | None = None) -> Tensor:
    """Torch's ``hardswish``."""
    return F.hardswish(x)


def sigmoid(x: Tensor, name: str | None = None) -> Tensor:
    """``1 / (1 + e⁻ˣ)``."""
    return torch.sigmoid(x)


def tanh(x: Tensor, name: str | None = None) -> Tensor:
    """The hyperbolic tangent."""
    return torch.tanh(x)


def softmax(logits: Tensor, axis: int | None = None, name: str | None = None) -> Tensor:
    """Over ``axis``, the last one by default."""
    return torch.softmax(logits, -1 if axis is None else axis)


def logsoftmax(logits: Tensor, axis: int | None = None, name: str | None = None) -> Tensor:
    """The logarithm of ``softmax``."""
    return torch.log_softmax(logits, -1 if axis is None else axis)


# -- losses, one for each sample ------------------------------------------------------------------


def sparse_softmax_cross_entropy_with_logits(labels: Tensor, logits: Tensor, name: str | None = None) -> Tensor:
    """The loss of each sample: ``labels`` are classes, of any whole dtype, shaped as ``logits`` without the last dim.

    A last dim of 1 of ``labels`` is dropped.  Raises StateError for other shapes.
    """
    if labels.dim() == logits.dim() and labels.shape[-1] == 1:
        labels = labels.squeeze(-1)
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise StateError(
            f"sparse_softmax_cross_entropy_with_logits: labels {_spoken(labels)} and logits {_spoken(logits)} were "
            f"found; whole numbers of shape {list(logits.shape[:-1])} were expected as labels"
        )
    return F.cross_entropy(_classes_second(logits), labels.long(), reduction="none")


def softmax_cross_entropy_with_logits(labels: Tensor, logits: Tensor, name: str | None = None) -> Tensor:
    """The loss of each sample: ``labels`` are probabilities, shaped as ``logits``.  Raises StateError for others."""
    if labels.shape != logits.shape:
        raise StateError(
            f"softmax_cross_entropy_with_logits: labels {_spoken(labels)} and logits {_spoken(logits)} were found; "
            f"equal shapes were expected"
        )
    return F.cross_entropy(_classes_second(logits), _classes_second(labels.to(logits.dtype)), reduction="none")


def sigmoid_cross_entropy_with_logits(labels: Tensor, logits: Tensor, name: str | None = None) -> Tensor:
    """The loss of each element; shapes are equal.  Raises StateError for others."""
    if labels.shape != logits.shape:
        raise StateError(
            f"sigmoid_cross_entropy_with_logits: labels {_spoken(labels)} and logits {_spoken(logits)} were found; "
            f"equal shapes were expected"
        )
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def _classes_second(logits: Tensor) -> Tensor:
    """Where torch has the classes."""
    return logits.movedim(-1, 1) if logits.dim() > 2 else logits


def _spoken(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# -- the rest --------------------------------------------------------------------------------------


def bias_add(value: Tensor, bias: Tensor, data_format: str | None = None, name: str | None = None) -> Tensor:
    """``bias`` along the channels of ``value``: dim 1, or the last one for a ``data_format`` "N…C".

    Raises StateError for a bias of another size.
    """
    last = data_format is not None and not data_format.upper().startswith("NC")
    axis = value.dim() - 1 if last else 1
    if bias.dim() != 1 or axis >= value.dim() or bias.shape[0] != value.shape[axis]:
        raise StateError(
            f"bias_add: a bias {_spoken(bias)} was found for {_spoken(value)}; one dim, of the size of dim {axis}, "
            f"was expected"
        )
    return value + bias.reshape([-1 if d == axis else 1 for d in range(value.dim())])


def dropout(
    x: Tensor, rate: float, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> Tensor:
    """Each element 0 with probability ``rate``, else divided by ``1 - rate``; nothing in a job that makes predictions.

    The random numbers are those of the job's calls (``flow.manual_seed``), whatever ``seed`` is.  Raises StateError
    for a rate outside of [0, 1) and for a ``noise_shape``.
    """
    if not 0 <= rate < 1 or noise_shape is not None:
        raise StateError(
            f"dropout(rate={rate!r}, noise_shape={noise_shape!r}) was found; a rate from 0 to below 1, and no "
            f"noise_shape, was expected"
        )
    return F.dropout(x, rate, training=torch.is_grad_enabled())


def moments(x: Tensor, axes: Sequence[int], keepdims: bool = False, name: str | None = None) -> tuple[Tensor, Tensor]:
    """Mean and variance (that of all elements, not the estimate from a sample) over some dims."""
    dims = tuple(axes)
    return torch.mean(x, dims, keepdims), torch.var(x, dims, correction=0, keepdim=keepdims)


def batch_normalization(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    offset: Tensor | None = None,
    scale: Tensor | None = None,
    variance_epsilon: float = 1e-5,
    axis: int = 1,
    name: str | None = None,
) -> Tensor:
    """``(x - mean) / √(variance + variance_epsilon) · scale + offset``, the four of them along ``axis`` of ``x``."""
    shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]

    def along(tensor: Tensor) -> Tensor:
        return tensor.reshape(shape) if tensor.dim() == 1 else tensor

    found = (x - along(mean)) * torch.rsqrt(along(variance) + variance_epsilon)
    found = found if scale is None else found * along(scale)
    return found if offset is None else found + along(offset)


def layer_norm(
    inputs: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    begin_norm_axis: int = 1,
    begin_params_axis: int = -1,
    epsilon: float = 1e-5,
    name: str | None = None,
) -> Tensor:
    """Normalised over the dims from ``begin_norm_axis``; times ``gamma`` plus ``beta`` along those from the other."""
    shape = list(inputs.shape[begin_norm_axis:])
    if begin_params_axis % inputs.dim() == begin_norm_axis % inputs.dim():
        return F.layer_norm(inputs, shape, gamma, beta, epsilon)
    found = F.layer_norm(inputs, shape, None, None, epsilon)
    found = found if gamma is None else found * gamma
    return found if beta is None else found + beta
