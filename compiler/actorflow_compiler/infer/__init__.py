"""A graph whose ops have placements goes in; an SBP for every value and a signature for every op come out."""

from __future__ import annotations

from actorflow_compiler.infer.axes import Fixed, Layouts, infer
from actorflow_compiler.infer.prices import FREE_KINDS
from actorflow_compiler.infer.tell import explained, tell

__all__ = ["FREE_KINDS", "Fixed", "Layouts", "explained", "infer", "tell"]
