"""A plan of representative ranks: of ranks that do the same work at the same times, one is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.rank_differences import OfClass
from actorflow_compiler.plan.rank_location import RankLocation, with_planes


@dataclass(frozen=True, slots=True)
class Partners:
    """The ranks, listed or not, that communicate with each other in the communications of one kind."""

    label: str  # the kind: of a collective, or "send"
    groups: frozenset[tuple[int, ...]]  # of the ranks of a collective; (from, to) for each send


@dataclass(frozen=True, slots=True)
class FoldedPlan:
    """A plan that lists the actors of one rank of each class (``plan.ranks``); it is scheduled and forecast.

    It is never run; ``unfold.py`` makes the plan of all ranks of it.

    Sends go to listed ranks; the groups of collectives name all their ranks, listed or not.
    """

    plan: Plan
    rank_classes: Mapping[int, Sequence[int]]  # listed rank → all ranks of its class, itself included
    # where all ranks are, and so by which planes communications take their time; (): by those of the plan
    spots: tuple[RankLocation, ...] = ()
    partners: tuple[Partners, ...] = ()  # of all ranks; () where they are not known
    # actor → what other ranks of its class do otherwise; of a forecast it is not known
    of_class: Mapping[int, OfClass] = field(default_factory=dict)

    @property
    def on_planes(self) -> Plan:
        """The plan with the planes of its communications, whose calls have no order: for the cost model alone."""
        return with_planes(self.plan, self.spots) if self.spots else self.plan


def listed(plan: Plan | FoldedPlan) -> Plan:
    """What a plan lists: all ranks, or one of each class."""
    return plan.plan if isinstance(plan, FoldedPlan) else plan
