"""Flatten tensors and read them as bytes, without a copy where their memory is contiguous."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_bytes", "contents", "flat", "memory_of"]


def flat(tensor: Tensor) -> Tensor:
    """A 1-dim tensor of all elements in row-major order: a view if the tensor is contiguous, else a copy.

    The stride of the result is 1 even for one element or none, where torch calls any strides contiguous and ``view``
    keeps them.
    """
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,))


def as_bytes(tensor: Tensor) -> Tensor:
    """``flat(tensor)`` reinterpreted as bytes (uint8)."""
    return flat(tensor).view(torch.uint8)


def contents(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of any device, for reading: its own memory if it is a contiguous CPU tensor, else a copy.

    It does not use ``tensor.numpy()``, after which the script could no longer resize its tensor.
    """
    return np.from_dlpack(as_bytes(tensor.detach().cpu())).data


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, to write to; the caller keeps the tensor for as long as it writes."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")
