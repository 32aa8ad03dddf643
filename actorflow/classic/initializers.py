"""Initializers of variables, by OneFlow's names; each fills a tensor from a generator."""

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

CUT = 2.0  # standard deviations at which a truncated normal ends
CUT_STD = 0.87962566103423978  # standard deviation of a unit normal that is cut there
MODES = ("fan_in", "fan_out", "fan_avg")
DISTRIBUTIONS = ("truncated_normal", "random_normal", "random_uniform")


@dataclass(frozen=True, slots=True)
class Initializer:
    """Fills a whole tensor, in place, from a generator: ``initializer(tensor, generator)``."""

    name: str  # as the user calls it
    fill: Callable[[Tensor, torch.Generator], object] = field(repr=False)

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill ``tensor``."""
        self.fill(tensor, generator)


def constant_initializer(value: float = 0, dtype: torch.dtype | None = None) -> Initializer:
    """All elements are ``value``; ``dtype`` is the variable's own, whatever is given."""
    return Initializer(f"constant_initializer({value})", lambda t, _: t.fill_(value))


def zeros_initializer(dtype: torch.dtype | None = None) -> Initializer:
    """All elements are 0."""
    return constant_initializer(0)


def ones_initializer(dtype: torch.dtype | None = None) -> Initializer:
    """All elements are 1."""
    return constant_initializer(1)


def random_uniform_initializer(minval: float = 0, maxval: float = 1, dtype: torch.dtype | None = None) -> Initializer:
    """Uniform in [minval, maxval); whole numbers for a variable of whole numbers.  Raises StateError if it is empty."""
    if minval > maxval:
        raise StateError(f"random_uniform_initializer({minval}, {maxval}) was found; minval <= maxval was expected")

    def fill(tensor: Tensor, generator: torch.Generator) -> object:
        if tensor.is_floating_point():
            return init.uniform_(tensor, minval, maxval, generator=generator)
        return tensor.random_(int(minval), int(maxval), generator=generator)

    return Initializer(f"random_uniform_initializer({minval}, {maxval})", fill)


def random_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal."""
    name = f"random_normal_initializer({mean}, {stddev})"
    return Initializer(name, lambda t, g: init.normal_(t, mean, stddev, generator=g))


def truncated_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal, and drawn again where it is 2 ``stddev`` or more from ``mean``."""
    low, high = mean - CUT * stddev, mean + CUT * stddev
    name = f"truncated_normal_initializer({mean}, {stddev})"
    return Initializer(name, lambda t, g: init.trunc_normal_(t, mean, stddev, low, high, generator=g))


def truncated_normal(stddev: float = 1.0) -> Initializer:
    """``truncated_normal_initializer`` around 0."""
    return truncated_normal_initializer(0.0, stddev)


def xavier_uniform_initializer(data_format: str = "") -> Initializer:
    """Uniform, as torch's ``xavier_uniform_``.

    ``data_format`` "N…C" says that the input channels are the last dim of the variable; else they are dim 1.
    """
    last = _channels_last(data_format)
    name = f"xavier_uniform_initializer({data_format!r})"
    return Initializer(name, lambda t, g: init.xavier_uniform_(_torchs(t, last), generator=g))


def xavier_normal_initializer(data_format: str = "") -> Initializer:
    """Normal, as torch's ``xavier_normal_``; ``data_format`` as for ``xavier_uniform_initializer``."""
    last = _channels_last(data_format)
    name = f"xavier_normal_initializer({data_format!r})"
    return Initializer(name, lambda t, g: init.xavier_normal_(_torchs(t, last), generator=g))


glorot_uniform_initializer = xavier_uniform_initializer
glorot_normal_initializer = xavier_normal_initializer


def variance_scaling_initializer(
    scale: float = 1.0, mode: str = "fan_in", distribution: str = "truncated_normal", data_format: str = ""
) -> Initializer:
    """Of variance ``scale / n``, where n is the fan that ``mode`` names: "fan_in", "fan_out" or "fan_avg".

    ``distribution`` is "truncated_normal", "random_normal" or "random_uniform".  Raises StateError for others.
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
    """For rectifiers (He and others): of standard deviation gain / √n, n the fan of ``shape`` that ``mode`` names.

    ``nonlinearity`` (None: 1) and ``negative_slope`` give the gain, as ``torch.nn.init.calculate_gain`` does.
    Raises StateError for a shape of less than two dims and for other words than "random_normal" or "random_uniform",
    "fan_in", "fan_out" or "fan_avg".
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
    """Around 0, of a standard deviation."""
    if distribution == "truncated_normal":
        return truncated_normal(std / CUT_STD)
    if distribution == "random_normal":
        return random_normal_initializer(0.0, std)
    return random_uniform_initializer(-math.sqrt(3) * std, math.sqrt(3) * std)


def _fan(shape: Sequence[int], mode: str, last: bool) -> float:
    """Inputs or outputs of each element of a weight (output channels first), or their average."""
    window = math.prod(shape[1:-1] if last else shape[2:])
    fans = {"fan_in": math.prod(shape[1:]), "fan_out": shape[0] * window}
    return sum(fans.values()) / 2 if mode == "fan_avg" else float(fans[mode])


def _torchs(tensor: Tensor, last: bool) -> Tensor:
    """A weight's view with the input channels where torch has them."""
    return tensor.movedim(-1, 1) if last and tensor.dim() > 2 else tensor


def _channels_last(data_format: str) -> bool:
    if data_format and not (data_format.startswith("NC") or (data_format.startswith("N") and data_format[-1] == "C")):
        raise StateError(f'data_format={data_format!r} was found; "NC…", "N…C" or "" was expected')
    return bool(data_format) and not data_format.startswith("NC")


def _one_of(where: str, key: str, found: str, expected: Sequence[str]) -> None:
    if found not in expected:
        raise StateError(f"{where}({key}={found!r}) was found; one of {', '.join(map(repr, expected))} was expected")
