"""A graph whose ops have placements goes in; an SBP for every value and a signature for every op come out."""

from __future__ import annotations

from actorflow_compiler.infer.axes import Fixed, Layouts, infer
from actorflow_compiler.infer.goal import DATA, Goal, goal_of
from actorflow_compiler.infer.prices import BANDWIDTH, FREE_KINDS, LATENCY
from actorflow_compiler.infer.tell import explained, tell

__all__ = [
    "BANDWIDTH", "DATA", "FREE_KINDS", "LATENCY", "Fixed", "Goal", "Layouts", "explained", "goal_of", "infer", "tell",
]  # fmt: skip
