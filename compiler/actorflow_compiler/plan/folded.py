"""A plan of representative ranks: of ranks that do the same work at the same times, one is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.plan.plan import Plan, Plane


@dataclass(frozen=True, slots=True)
class Partners:
    """The ranks, listed or not, that communicate with each other in the communications of one kind."""

    label: str  # the kind: of a collective, or "send"
    groups: frozenset[tuple[int, ...]]  # of the ranks of a collective; (from, to) for each send


@dataclass(frozen=True, slots=True)
class FoldedPlan:
    """A plan that lists the actors of one rank of each class (``plan.ranks``); it is scheduled and forecast, never run.

    Sends go to listed ranks; the groups of collectives name all their ranks, listed or not.
    """

    plan: Plan
    rank_classes: Mapping[int, Sequence[int]]  # listed rank → all ranks of its class, itself included
    plane: Plane = Plane.GLOO  # by which communications take their time; on GPUs of a cluster it is NCCL
    partners: tuple[Partners, ...] = ()  # of all ranks; () where they are not known

    @property
    def on_plane(self) -> Plan:
        """The plan with its communications on the plane, whose calls have no order: for the cost model alone."""
        if self.plane is Plane.GLOO:
            return self.plan
        comms = (a.comm and replace(a.comm, plane=self.plane) for a in self.plan.actors)
        return replace(
            self.plan, actors=tuple(replace(a, comm=c) for a, c in zip(self.plan.actors, comms, strict=True))
        )
