"""Make the tensors that samples of ops take: by shape, the same numbers each time."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

DIRECT = torch.Generator()


def seed(name: str) -> None:
    """The numbers that follow are those of this name, whatever was made before them."""
    DIRECT.manual_seed(zlib.crc32(name.encode()))


def f(*shape: int, low: float = -1.5, high: float = 1.5) -> Tensor:
    """Numbers without special values."""
    return torch.rand(shape, generator=DIRECT, dtype=torch.float64) * (high - low) + low


def n(*shape: int, below: int) -> Tensor:
    """Whole numbers."""
    return torch.randint(0, below, shape, generator=DIRECT)


def b(*shape: int) -> Tensor:
    """Truth values."""
    return n(*shape, below=2).bool()
