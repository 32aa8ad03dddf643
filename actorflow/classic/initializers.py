"""Initializers of variables, with OneFlow's names; each fills a tensor with numbers from a generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import init

from actorflow_compiler.core.errors import StateError

__all__ = [
    "Initializer",
    "constant_initializer",
    "glorot_normal_initializer",
    "glorot_uniform_initializer",
    "kaiming_initializer",
    "ones_initializer",
    "random_normal_initializer",
    "random_uniform_initializer",
    "truncated_normal",
    "truncated_normal_initializer",
    "variance_scaling_initializer",
    "xavier_normal_initializer",
    "xavier_uniform_initializer",
    "zeros_initializer",
]

CUT = 2.0  # in standard deviations: where a truncated normal distribution is cut off
CUT_STD = 0.87962566103423978  # standard deviation of a standard normal distribution that is cut off there
MODES = ("fan_in", "fan_out", "fan_avg")
DISTRIBUTIONS = ("truncated_normal", "random_normal", "random_uniform")


@dataclass(frozen=True, slots=True)
class Initializer:
    """Fills a whole tensor in place, with random numbers from a generator: ``initializer(tensor, generator)``."""

    name: str  # the call that makes it, as the user writes it
    fill: Callable[[Tensor, torch.Generator], object] = field(repr=False)

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill ``tensor``."""
        self.fill(tensor, generator)


def constant_initializer(value: float = 0, dtype: torch.dtype | None = None) -> Initializer:
    """Sets all elements to ``value``.  ``dtype`` has no effect: the variable has its own."""
    return Initializer(f"constant_initializer({value})", lambda t, _: t.fill_(value))


def zeros_initializer(dtype: torch.dtype | None = None) -> Initializer:
    """Sets all elements to 0.  ``dtype`` has no effect."""
    return constant_initializer(0)


def ones_initializer(dtype: torch.dtype | None = None) -> Initializer:
    """Sets all elements to 1.  ``dtype`` has no effect."""
    return constant_initializer(1)


def random_uniform_initializer(minval: float = 0, maxval: float = 1, dtype: torch.dtype | None = None) -> Initializer:
    """Uniform in [minval, maxval); integers for a variable of integers.

    ``dtype`` has no effect.  Raises StateError if ``minval`` is larger than ``maxval``.
    """
    if minval > maxval:
        raise StateError(f"random_uniform_initializer({minval}, {maxval}) was found; minval <= maxval was expected")

    def fill(tensor: Tensor, generator: torch.Generator) -> object:
        if tensor.is_floating_point():
            return init.uniform_(tensor, minval, maxval, generator=generator)
        return tensor.random_(int(minval), int(maxval), generator=generator)

    return Initializer(f"random_uniform_initializer({minval}, {maxval})", fill)


def random_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal, with this mean and standard deviation."""
    name = f"random_normal_initializer({mean}, {stddev})"
    return Initializer(name, lambda t, g: init.normal_(t, mean, stddev, generator=g))


def truncated_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal, but numbers that are 2 ``stddev`` or more from ``mean`` are drawn again."""
    low, high = mean - CUT * stddev, mean + CUT * stddev
    name = f"truncated_normal_initializer({mean}, {stddev})"
    return Initializer(name, lambda t, g: init.trunc_normal_(t, mean, stddev, low, high, generator=g))


def truncated_normal(stddev: float = 1.0) -> Initializer:
    """``truncated_normal_initializer`` with mean 0."""
    return truncated_normal_initializer(0.0, stddev)


def xavier_uniform_initializer(data_format: str = "") -> Initializer:
    """Uniform, like torch's ``xavier_uniform_``.

    With a ``data_format`` of the form "N…C" the variable's last dim is the input channels; otherwise dim 1 is.
    """
    last = _channels_last(data_format)
    name = f"xavier_uniform_initializer({data_format!r})"
    return Initializer(name, lambda t, g: init.xavier_uniform_(_torchs(t, last), generator=g))


def xavier_normal_initializer(data_format: str = "") -> Initializer:
    """Normal, like torch's ``xavier_normal_``; ``data_format`` is as for ``xavier_uniform_initializer``."""
    last = _channels_last(data_format)
    name = f"xavier_normal_initializer({data_format!r})"
    return Initializer(name, lambda t, g: init.xavier_normal_(_torchs(t, last), generator=g))


glorot_uniform_initializer = xavier_uniform_initializer
glorot_normal_initializer = xavier_normal_initializer


def variance_scaling_initializer(
    scale: float = 1.0, mode: str = "fan_in", distribution: str = "truncated_normal", data_format: str = ""
) -> Initializer:
    """Random numbers of variance ``scale / n``, where n is the fan that ``mode`` names.

    ``mode`` is "fan_in", "fan_out" or "fan_avg"; ``distribution`` is "truncated_normal", "random_normal" or
    "random_uniform".  Raises StateError for other values.
    """
    _one_of("variance_scaling_initializer", "mode", mode, MODES)
    _one_of("variance_scaling_initializer", "distribution", distribution, DISTRIBUTIONS)
    last = _channels_last(data_format)

    def fill(tensor: Tensor, generator: torch.Generator) -> object:
        std = math.sqrt(scale / _fan(tensor.shape, mode, last))
        return _draw(distribution, std)(tensor, generator)

    name = f"variance_scaling_initializer({scale}, {mode!r}, {distribution!r}, {data_format!r})"
    return Initializer(name, fill)


def kaiming_initializer(
    shape: Sequence[int],
    distribution: str = "random_normal",
    mode: str = "fan_in",
    nonlinearity: str | None = "leaky_relu",
    negative_slope: float = 0.0,
    data_format: str = "NCHW",
) -> Initializer:
    """He's initializer for rectifiers: standard deviation gain / √n, where n is the fan that ``mode`` names.

    The fan is that of a weight of this ``shape``.  ``nonlinearity`` and ``negative_slope`` give the gain, as
    ``torch.nn.init.calculate_gain`` does; without a ``nonlinearity`` (None) it is 1.  Raises StateError for a shape of
    fewer than two dims, for a ``distribution`` other than "random_normal" or "random_uniform", and for a ``mode`` other
    than "fan_in", "fan_out" or "fan_avg".
    """
    if len(shape) < 2 or 0 in shape:
        raise StateError(
            f"kaiming_initializer(shape={list(shape)}) was found; the shape of a weight, of two dims or more, and "
            f"none of them 0, was expected"
        )
    _one_of("kaiming_initializer", "mode", mode, MODES)
    _one_of("kaiming_initializer", "distribution", distribution, DISTRIBUTIONS[1:])
    gain = 1.0 if nonlinearity is None else init.calculate_gain(nonlinearity, negative_slope)  # type: ignore[arg-type]
    std = gain / math.sqrt(_fan(shape, mode, _channels_last(data_format)))
    return Initializer(f"kaiming_initializer({list(shape)})", _draw(distribution, std).fill)


def _draw(distribution: str, std: float) -> Initializer:
    """An initializer with mean 0 and this standard deviation."""
    if distribution == "truncated_normal":
        return truncated_normal(std / CUT_STD)
    if distribution == "random_normal":
        return random_normal_initializer(0.0, std)
    return random_uniform_initializer(-math.sqrt(3) * std, math.sqrt(3) * std)


def _fan(shape: Sequence[int], mode: str, last: bool) -> float:
    """The fan of a weight whose dim 0 is the output channels: "fan_in", "fan_out", or their average."""
    window = math.prod(shape[1:-1] if last else shape[2:])
    fans = {"fan_in": math.prod(shape[1:]), "fan_out": shape[0] * window}
    return sum(fans.values()) / 2 if mode == "fan_avg" else float(fans[mode])


def _torchs(tensor: Tensor, last: bool) -> Tensor:
    """A view of a weight with the input channels in dim 1, where torch expects them."""
    return tensor.movedim(-1, 1) if last and tensor.dim() > 2 else tensor


def _channels_last(data_format: str) -> bool:
    if data_format and not (data_format.startswith("NC") or (data_format.startswith("N") and data_format[-1] == "C")):
        raise StateError(f'data_format={data_format!r} was found; "NC…", "N…C" or "" was expected')
    return bool(data_format) and not data_format.startswith("NC")


def _one_of(where: str, key: str, found: str, expected: Sequence[str]) -> None:
    if found not in expected:
        raise StateError(f"{where}({key}={found!r}) was found; one of {', '.join(map(repr, expected))} was expected")
