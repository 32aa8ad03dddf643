"""Scopes for ops inside a job: ``with scope.placement("cpu", [0, 1]): …``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from actorflow_compiler.placement import Placement
from actorflow_compiler.placement import placement as make
from actorflow_compiler.tags import placed

__all__ = ["placement"]


def placement(
    type: str | Placement, ranks: Sequence[int] | Sequence[Sequence[int]] | range | None = None
) -> AbstractContextManager[None]:
    """Place the ops inside on devices: ``placement(p)`` or ``placement("cuda", [0, 1])``.

    Outside of a job it does nothing.  Raises LayoutError for ranks that make no placement.
    """
    if isinstance(type, Placement):
        return placed(type)
    return placed(make(type, () if ranks is None else ranks))
