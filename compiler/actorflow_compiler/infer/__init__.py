"""Layout inference: choose an SBP for every value and a signature for every op of a graph that has placements."""

from __future__ import annotations

from actorflow_compiler.infer.axes import FixedLayouts, GraphLayouts, infer
from actorflow_compiler.infer.prices import FREE_KINDS

__all__ = ["FREE_KINDS", "FixedLayouts", "GraphLayouts", "infer"]
