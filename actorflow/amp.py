"""The names of ``torch.amp`` that ``flow.amp`` has."""

from __future__ import annotations

from torch.amp import (
    GradScaler,
    autocast,
)

from actorflow.support.nearest_names import answer_with_nearest

__all__ = [
    "GradScaler", "autocast",
]  # fmt: skip

answer_with_nearest(__name__)
