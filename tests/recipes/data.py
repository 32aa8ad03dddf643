"""Batches of a few rows, the same in every process."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["classes", "numbers", "pairs", "pictures", "tokens"]

STEPS, ROWS = 3, 8


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, steps: int = STEPS, rows: int = ROWS, seed: int = 1) -> list[tuple[Tensor]]:
    """Batches of one tensor [rows, *shape]."""
    g = _generator(seed)
    return [(torch.randn(rows, *shape, generator=g),) for _ in range(steps)]


def pairs(inside: int, out: int, steps: int = STEPS, rows: int = ROWS, seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Batches of inputs [rows, inside] and targets [rows, out]."""
    g = _generator(seed)
    return [(torch.randn(rows, inside, generator=g), torch.randn(rows, out, generator=g)) for _ in range(steps)]


def classes(inside: int, count: int, steps: int = STEPS, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    """Batches of inputs [rows, inside] and labels int64[rows]."""
    g = _generator(3)
    return [(torch.randn(rows, inside, generator=g), torch.randint(count, (rows,), generator=g)) for _ in range(steps)]


def pictures(channels: int = 3, size: int = 8, count: int = 4, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Batches of images [rows, channels, size, size] and labels int64[rows]."""
    g = _generator(4)
    return [
        (torch.randn(ROWS, channels, size, size, generator=g), torch.randint(count, (ROWS,), generator=g))
        for _ in range(steps)
    ]


def tokens(length: int, count: int, steps: int = STEPS, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    """Batches of tokens int64[rows, length] and of the token behind each."""
    g = _generator(5)
    drawn = [torch.randint(count, (rows, length + 1), generator=g) for _ in range(steps)]
    return [(t[:, :-1].clone(), t[:, 1:].clone()) for t in drawn]
