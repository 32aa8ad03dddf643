"""Trees of tensors made global and local again, and a scope in which new tensors are global."""

from __future__ import annotations

from actorflow.eager.global_mode import current_global_mode, global_mode
from actorflow.eager.modules import to_global, to_local
from actorflow.support.nearest_names import answer_with_nearest as _answer_with_nearest

__all__ = ["current_global_mode", "global_mode", "to_global", "to_local"]

_answer_with_nearest(__name__)
