"""A plan that people look at, and that is not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.folded import FoldedPlan, Partners
from actorflow_compiler.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan to be looked at, with those that it was chosen among."""

    plan: Plan
    others: tuple[Plan | None, ...] = ()  # those after the first of ``plan.considered``; None: it was not made
    # listed rank → the ranks of its class, where the plan lists one of each, as for a forecast; None: it lists all
    rank_classes: Mapping[int, Sequence[int]] | None = None
    partners: tuple[Partners, ...] = ()  # of such a plan: which ranks communicate
    hardware: Hardware | None = None  # that it was made for, as measured; None: it is not known

    @property
    def forecast_of(self) -> Plan | FoldedPlan:
        """What is to be forecast: the plan, or if it lists only one rank of each class all that it stands for."""
        return self.plan if self.rank_classes is None else self.folded

    @property
    def folded(self) -> FoldedPlan:
        """The plan with the ranks that each listed one stands for: itself alone, where all are listed."""
        classes = self.rank_classes
        if classes is None:
            classes = {rank: (rank,) for rank in range(self.plan.world)}
        return FoldedPlan(self.plan, classes, partners=self.partners)
