"""A plan of representative ranks: of ranks that do the same work at the same times, one is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from actorflow_compiler.plan.plan import Plan, Plane
from actorflow_compiler.plan.rank_differences import OfClass


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
    plane: Plane = Plane.GLOO  # by which communications take their time; on GPUs of a cluster it is NCCL
    partners: tuple[Partners, ...] = ()  # of all ranks; () where they are not known
    # actor → what other ranks of its class do otherwise; of a forecast it is not known
    of_class: Mapping[int, OfClass] = field(default_factory=dict)

    @property
    def on_plane(self) -> Plan:
        """The plan with its communications on the plane, whose calls have no order: for the cost model alone."""
        if self.plane is Plane.GLOO:
            return self.plan
        comms = (a.comm and replace(a.comm, plane=self.plane) for a in self.plan.actors)
        return replace(
            self.plan, actors=tuple(replace(a, comm=c) for a, c in zip(self.plan.actors, comms, strict=True))
        )


def listed(plan: Plan | FoldedPlan) -> Plan:
    """What a plan lists: all ranks, or one of each class."""
    return plan.plan if isinstance(plan, FoldedPlan) else plan
