"""A plan of representative ranks: of ranks that do the same work at the same times, one is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actorflow_compiler.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class FoldedPlan:
    """A plan that lists the actors of one rank of each class (``plan.ranks``); it is scheduled and forecast, never run.

    Sends go to listed ranks; the groups of collectives name all their ranks, listed or not.
    """

    plan: Plan
    rank_classes: Mapping[int, Sequence[int]]  # listed rank → all ranks of its class, itself included
