"""Convolutions and pools of OneFlow's first generation.

Each is one callable for one, two or three spatial dims.  ``data_format`` says where the channels are: "NCHW" (the
default) or "NHWC" for two dims, "NCW" or "NWC" for one, "NCDHW" or "NDHWC" for three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actorflow.functions.padding import (
    Padding,
    channels_first,
    channels_last,
    even_padding,
    pad,
    padding_amounts,
    per_dim,
    same_format,
)
from actorflow_compiler.core.errors import StateError

__all__ = [
    "Window",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "conv1d",
    "conv2d",
    "conv3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
]

Window = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Convolution:
    """``conv1d``, ``conv2d`` or ``conv3d``: a convolution without bias over so many spatial dims."""

    spatial: int

    @property
    def __name__(self) -> str:
        """The name of the function."""
        return f"conv{self.spatial}d"

    def __call__(
        self,
        input: Tensor,
        filters: Tensor,
        strides: Window,
        padding: Padding,
        data_format: str | None = None,
        dilations: Window | None = None,
        groups: int = 1,
        name: str | None = None,
    ) -> Tensor:
        """Move ``filters`` over ``input``.

        ``filters`` are shaped [out, in / groups, height, width] for "NCHW", [out, height, width, in / groups] for
        "NHWC".  ``padding`` is "VALID", "SAME_UPPER", "SAME_LOWER", "SAME" (which is "SAME_LOWER", as in OneFlow), or
        an item for each of the dims: a number, or two (before and after).  Raises StateError for what does not fit.
        """
        what, spatial = self.__name__, self.spatial
        last = channels_last(what, same_format(data_format, spatial), input, spatial)
        x, filters = channels_first(input, last), channels_first(filters, last)
        step, spread = per_dim(what, "strides", strides, spatial), per_dim(what, "dilations", dilations, spatial)
        pairs = padding_amounts(what, padding, x.shape[2:], filters.shape[2:], step, spread, last)
        even = even_padding(pairs)
        run: Any = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
        x, around = (pad(x, pairs), 0) if even is None else (x, even)
        found: Tensor = run(x, filters, None, step, around, spread, groups)
        return found.movedim(1, -1) if last else found


class PoolKind(StrEnum):
    """What a pool makes of each window."""

    MAX = "max"
    AVERAGE = "avg"


@dataclass(frozen=True, slots=True)
class Pool:
    """``max_pool2d``, ``avg_pool2d`` and their like: the largest, or the average, of each window."""

    kind: PoolKind
    spatial: int

    @property
    def __name__(self) -> str:
        """The name of the function."""
        return f"{self.kind}_pool{self.spatial}d"

    def __call__(
        self,
        input: Tensor,
        ksize: Window,
        strides: Window | None,
        padding: Padding,
        data_format: str | None = None,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Pool windows of ``ksize``, ``strides`` (None: ``ksize``) apart; ``padding`` is as for ``conv2d``.

        What is added around the tensor is never the largest, and does not count in an average.  Raises StateError
        for what does not fit, and for as much padding as a window's size.
        """
        what, spatial = self.__name__, self.spatial
        last = channels_last(what, same_format(data_format, spatial), input, spatial)
        x = channels_first(input, last)
        kernel = per_dim(what, "ksize", ksize, spatial)
        step = kernel if strides is None else per_dim(what, "strides", strides, spatial)
        pairs = padding_amounts(what, padding, x.shape[2:], kernel, step, (1,) * spatial, last)
        if any(max(pair) >= k for pair, k in zip(pairs, kernel, strict=True)):
            raise StateError(
                f"{what}: padding={padding!r} and windows of {list(kernel)} were found; less padding than the "
                f"window's size was expected: every window needs something of the tensor inside"
            )
        even = even_padding(pairs)
        inside = even if even is not None and all(2 * p <= k for p, k in zip(even, kernel, strict=True)) else None
        pool = self._largest if self.kind is PoolKind.MAX else self._average
        found = pool(x, kernel, step, pairs, inside, ceil_mode)
        return found.movedim(1, -1) if last else found

    def _largest(self, x: Tensor, kernel: Any, step: Any, pairs: Any, inside: Any, ceil_mode: bool) -> Tensor:
        pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[self.spatial - 1]
        x, around = (pad(x, pairs, -torch.inf), 0) if inside is None else (x, inside)
        found: Tensor = pool(x, kernel, step, around, ceil_mode=ceil_mode)
        return found

    def _average(self, x: Tensor, kernel: Any, step: Any, pairs: Any, inside: Any, ceil_mode: bool) -> Tensor:
        pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[self.spatial - 1]
        found: Tensor
        if inside is not None:
            found = pool(x, kernel, step, inside, ceil_mode=ceil_mode, count_include_pad=False)
        else:  # the average over how much of the window is inside
            parts = pool(pad(torch.ones_like(x[:1, :1]), pairs), kernel, step, 0, ceil_mode=ceil_mode)
            found = pool(pad(x, pairs), kernel, step, 0, ceil_mode=ceil_mode) / parts
        return found


conv1d, conv2d, conv3d = (Convolution(spatial) for spatial in (1, 2, 3))
max_pool1d, max_pool2d, max_pool3d = (Pool(PoolKind.MAX, spatial) for spatial in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (Pool(PoolKind.AVERAGE, spatial) for spatial in (1, 2, 3))
