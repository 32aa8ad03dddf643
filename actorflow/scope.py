"""``flow.scope``: scopes for ops inside a job, such as ``with flow.scope.placement("cpu", [0, 1]): …``."""

from __future__ import annotations

from actorflow.classic.scope import PlacementScope as Placed
from actorflow.classic.scope import consistent_view, mirrored_view, placement
from actorflow.support.nearest_names import answer_with_nearest

__all__ = ["Placed", "consistent_view", "mirrored_view", "placement"]

answer_with_nearest(__name__)
