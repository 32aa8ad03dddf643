"""PyTorch's ``amp`` by a stated list."""

from __future__ import annotations

from torch.amp import (
    GradScaler,
    autocast,
)

__all__ = [
    "GradScaler", "autocast",
]  # fmt: skip
