"""Flatten tensors and read them as bytes, without a copy where their memory is contiguous."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_bytes", "contents", "flat"]


def flat(tensor: Tensor) -> Tensor:
    """The elements row by row, with stride 1; in the same memory where they lie so already.

    A tensor of one element or none counts as contiguous whatever its strides are, and ``view`` keeps them.
    """
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of ``flat``, uint8."""
    return flat(tensor).view(torch.uint8)


def contents(tensor: Tensor) -> memoryview:
    """The bytes of ``flat`` of any device's tensor, to read; in the same memory where they lie so already.

    ``tensor.numpy()`` would take from the script's tensor that it can be resized.
    """
    return np.from_dlpack(as_bytes(tensor.detach().cpu())).data
