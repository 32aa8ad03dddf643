"""Layers of OneFlow's first generation (``flow.layers``), to be called inside job functions.

A layer makes its variables with ``get_variable``: ``{name}-weight``, ``{name}-bias`` and so on.  Layers of one name
share variables, also across jobs; layers without a name are numbered in each job (``Dense``, ``Dense_1``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actorflow.classic.initializers import (
    Initializer,
    ones_initializer,
    xavier_uniform_initializer,
    zeros_initializer,
)
from actorflow.classic.variables import current_run, get_variable
from actorflow.functions import elementary as nn
from actorflow.functions.conv_pool import Window
from actorflow.functions.padding import Padding, channels_last, per_dim, same_format
from actorflow.regularizers import Regularizer
from actorflow.script_state.user_code import user_line
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.sbp import Broadcast, Split

__all__ = [
    "batch_normalization",
    "batch_normalization_add_relu",
    "batch_normalization_relu",
    "conv1d",
    "conv2d",
    "conv3d",
    "dense",
    "layer_norm",
]

Activation = Callable[..., Tensor]


def dense(
    inputs: Tensor,
    units: int,
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Initializer | None = None,
    bias_initializer: Initializer | None = None,
    kernel_regularizer: Regularizer | None = None,
    bias_regularizer: Regularizer | None = None,
    trainable: bool = True,
    name: str = "Dense",
    model_distribute: Split | Broadcast | None = None,
) -> Tensor:
    """``activation(inputs @ weightᵀ + bias)`` over the last dim: [..., in] → [..., units].

    Variables: ``{name}-weight`` of shape [units, in] and ``{name}-bias`` of shape [units]; both start as zeros, as in
    OneFlow, unless an initializer is given.  ``model_distribute`` says how both lie: ``flow.distribute.split(axis=0)``
    cuts them by output column.  Raises StateError for an input of less than two dims.
    """
    prefix = _name("dense", name, "Dense")
    if inputs.dim() < 2:
        raise StateError(
            f"{user_line()}\n  layers.dense: an input of shape {list(inputs.shape)} was found; two dims or more were "
            f"expected"
        )
    shape, kind = (units, int(inputs.shape[-1])), inputs.dtype
    kernel = kernel_initializer or zeros_initializer()
    weight = get_variable(
        f"{prefix}-weight", shape, kind, kernel, kernel_regularizer, trainable, distribute=model_distribute
    )
    bias = None
    if use_bias:
        start = bias_initializer or zeros_initializer()
        bias = get_variable(
            f"{prefix}-bias", (units,), kind, start, bias_regularizer, trainable, distribute=model_distribute
        )
    return _activated(activation, F.linear(inputs, weight, bias))


@dataclass(frozen=True, slots=True)
class ConvolutionLayer:
    """``conv1d``, ``conv2d`` or ``conv3d``: a convolution over ``spatial`` dims, with bias and activation."""

    spatial: int

    @property
    def __name__(self) -> str:
        """The name of the function, such as ``conv2d``."""
        return f"conv{self.spatial}d"

    def __call__(
        self,
        inputs: Tensor,
        filters: int,
        kernel_size: Window = 1,
        strides: Window = 1,
        padding: Padding = "VALID",
        data_format: str | None = None,
        dilation_rate: Window | None = None,
        groups: int = 1,
        activation: Activation | None = None,
        use_bias: bool = True,
        kernel_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        kernel_regularizer: Regularizer | None = None,
        bias_regularizer: Regularizer | None = None,
        trainable: bool = True,
        name: str = "",
        weight_name: str | None = None,
        bias_name: str | None = None,
    ) -> Tensor:
        """``activation(convolution + bias)`` with ``filters`` output channels.

        Variables: ``{name}-weight`` (or ``weight_name``), Xavier-uniform, of the shape that ``flow.nn.conv2d`` takes,
        and ``{name}-bias`` (or ``bias_name``), zeros, of shape [filters].  ``padding`` and ``data_format`` are as for
        ``flow.nn.conv2d``; the default name is "Conv2d".  Raises StateError if the input, the groups or the padding do
        not fit.
        """
        what, default = f"layers.{self.__name__}", f"Conv{self.spatial}d"
        prefix = _name(self.__name__, name or default, default)
        data_format = same_format(data_format, self.spatial)
        last = channels_last(what, data_format, inputs, self.spatial)
        kernel = per_dim(what, "kernel_size", kernel_size, self.spatial)
        channels = int(inputs.shape[-1 if last else 1])
        if groups < 1 or filters % groups or channels % groups:
            raise StateError(
                f"{user_line()}\n  {what}: groups={groups} was found for {channels} channels and filters={filters}; a "
                f"number that divides both was expected"
            )
        inner = channels // groups
        weight = get_variable(
            weight_name or f"{prefix}-weight",
            (filters, *kernel, inner) if last else (filters, inner, *kernel),
            inputs.dtype,
            kernel_initializer or xavier_uniform_initializer(data_format),
            kernel_regularizer,
            trainable,
        )
        run = (nn.conv1d, nn.conv2d, nn.conv3d)[self.spatial - 1]
        out = run(inputs, weight, strides, padding, data_format, dilation_rate, groups)
        if use_bias:
            start = bias_initializer or zeros_initializer()
            named = bias_name or f"{prefix}-bias"
            bias = get_variable(named, (filters,), inputs.dtype, start, bias_regularizer, trainable)
            out = nn.bias_add(out, bias, data_format)
        return _activated(activation, out)


conv1d, conv2d, conv3d = (ConvolutionLayer(spatial) for spatial in (1, 2, 3))


def layer_norm(
    inputs: Tensor,
    center: bool = True,
    scale: bool = True,
    trainable: bool = True,
    begin_norm_axis: int = 1,
    begin_params_axis: int = -1,
    epsilon: float = 1e-5,
    name: str = "LayerNorm",
) -> Tensor:
    """Normalise over the dims from ``begin_norm_axis`` on, then multiply by ``{name}-gamma`` and add ``{name}-beta``.

    Both variables have the shape of the input from ``begin_params_axis`` on.  ``scale`` says whether there is a gamma,
    ``center`` whether there is a beta.
    """
    prefix, shape = _name("layer_norm", name, "LayerNorm"), tuple(inputs.shape[begin_params_axis:])
    beta = gamma = None
    if center:
        beta = get_variable(f"{prefix}-beta", shape, inputs.dtype, zeros_initializer(), None, trainable)
    if scale:
        gamma = get_variable(f"{prefix}-gamma", shape, inputs.dtype, ones_initializer(), None, trainable)
    return nn.layer_norm(inputs, gamma, beta, begin_norm_axis, begin_params_axis, epsilon)


def batch_normalization(
    inputs: Tensor,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 0.001,
    center: bool = True,
    scale: bool = True,
    beta_initializer: Initializer | None = None,
    gamma_initializer: Initializer | None = None,
    beta_regularizer: Regularizer | None = None,
    gamma_regularizer: Regularizer | None = None,
    moving_mean_initializer: Initializer | None = None,
    moving_variance_initializer: Initializer | None = None,
    trainable: bool = True,
    training: bool = True,
    name: str = "BatchNorm",
) -> Tensor:
    """Normalise by the batch's mean and variance along ``axis``, then multiply by ``{name}-gamma`` and add the beta.

    The beta is ``{name}-beta``.  ``{name}-moving_mean`` and ``{name}-moving_variance`` are running averages: a call
    keeps ``momentum`` of the old value and takes the rest from the batch (torch's momentum is ``1 - momentum``).  If
    the layer does not train (``training=False``, ``trainable=False``, or a predict job), the running averages are used
    instead of the batch's and do not change.  Raises StateError for an axis that the input does not have.
    """
    prefix = _name("batch_normalization", name, "BatchNorm")
    if not -inputs.dim() <= axis < inputs.dim():
        raise StateError(
            f"{user_line()}\n  layers.batch_normalization: axis={axis} was found for an input of shape "
            f"{list(inputs.shape)}; one of its dims was expected"
        )
    shape = (int(inputs.shape[axis]),)
    kind = torch.float32 if inputs.dtype == torch.float16 else inputs.dtype

    def variable(key: str, start: Initializer, regularizer: Regularizer | None, trained: bool) -> Tensor:
        return get_variable(f"{prefix}-{key}", shape, kind, start, regularizer, trained)

    zeros, ones = zeros_initializer(), ones_initializer()
    beta = variable("beta", beta_initializer or zeros, beta_regularizer, trainable) if center else None
    gamma = variable("gamma", gamma_initializer or ones, gamma_regularizer, trainable) if scale else None
    mean = variable("moving_mean", moving_mean_initializer or zeros, None, False)
    variance = variable("moving_variance", moving_variance_initializer or ones, None, False)
    train = training and trainable and torch.is_grad_enabled()
    out = F.batch_norm(inputs.movedim(axis, 1), mean, variance, gamma, beta, train, 1 - momentum, epsilon)
    return out.movedim(1, axis)


def batch_normalization_relu(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``max(0, batch_normalization(…))``."""
    return torch.relu(batch_normalization(inputs, *args, **kwargs))


def batch_normalization_add_relu(inputs: Tensor, addend: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """``max(0, batch_normalization(inputs, …) + addend)``."""
    out = batch_normalization(inputs, *args, **kwargs)
    return torch.relu(out if addend is None else out + addend)


def _name(what: str, given: str, default: str) -> str:
    """The name that was given to a layer, or the default name with a number that is unique in the job."""
    run = current_run(f"layers.{what}")
    return run.unique(default) if given == default else given


def _activated(activation: Activation | None, out: Tensor) -> Tensor:
    """Apply an activation, if there is one; a function that requires a ``name``, as OneFlow passes one, gets it."""
    if activation is None:
        return out
    try:
        wanted = inspect.signature(activation).parameters.get("name")
    except ValueError:  # torch's own functions have no signature, and take no name
        wanted = None
    if wanted is not None and wanted.default is inspect.Parameter.empty:
        return activation(out, name="activation")
    return activation(out)
