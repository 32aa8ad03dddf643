"""Encode small tensors as bytes that fit in a control message, and decode them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actorflow.transport.redistribution import dtype_of
from actorflow_compiler.core.tensor_bytes import contents
from actorflow_compiler.plan.plan import TensorSpec

_CPU = torch.device("cpu")


def encode(tensors: Sequence[Tensor]) -> tuple[bytes, ...]:
    """The bytes of each tensor's elements, in row-major order."""
    return tuple(contents(t).tobytes() for t in tensors)


def decode(payload: Sequence[bytes], specs: Sequence[TensorSpec], device: torch.device = _CPU) -> list[Tensor]:
    """Make tensors with memory of their own from the bytes of ``encode``.  The caller has checked the sizes."""
    found = []
    for data, spec in zip(payload, specs, strict=True):
        dtype = dtype_of(spec.dtype)
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        found.append(flat.view(spec.shape).to(device))
    return found
