"""The names of ``torch.amp`` that ``flow.amp`` has."""

from __future__ import annotations

from torch.amp import (
    GradScaler,
    autocast,
)

__all__ = [
    "GradScaler", "autocast",
]  # fmt: skip
