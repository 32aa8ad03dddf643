"""A lowered step, from which the plan of each variant is cut on demand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from actorflow_compiler.core.garbage_collection import young_only
from actorflow_compiler.cutting.cut import CutPlan, PlanHeader, cut
from actorflow_compiler.cutting.lower import LoweredProgram
from actorflow_compiler.cutting.recompute import recompute_notes
from actorflow_compiler.cutting.segment import segment
from actorflow_compiler.cutting.stores import insert_stores
from actorflow_compiler.cutting.verify import verify_segments
from actorflow_compiler.plan.folded import FoldedPlan, Partners
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import PLAIN, Variant


@dataclass(frozen=True, slots=True)
class LoweredStep:
    """A step after all passes but the cutting into actors, which depends on the variant."""

    header: PlanHeader  # its origins are those of the graph, without the actors'
    program: LoweredProgram
    checkpoints: bool = False  # the backward pass recomputes forward values, because of the user's checkpoints
    cuts: dict[Variant, CutPlan] = field(default_factory=dict, compare=False, repr=False)  # those made so far

    @young_only()
    def cut(self, variant: Variant = PLAIN) -> Plan:
        """The plan of all listed ranks, without slot counts and orders."""
        return self.cut_freely(variant).plan(variant.ahead, variant.shared)

    def cut_freely(self, variant: Variant) -> CutPlan:
        """The plan in which nothing delays gathers; variants that differ only in these delays are cut once."""
        header = self.header
        if header.pieces > 1 or self.checkpoints:  # in a joined actor, recomputed values would be the kept ones
            variant = replace(variant, joined=False)
        free = replace(variant, ahead=None, shared=False)
        if free not in self.cuts:
            segmented = verify_segments(insert_stores(segment(self.program, free)))
            notes = (*header.notes, *recompute_notes(segmented.program, header.pieces))
            self.cuts[free] = cut(replace(header, notes=notes), segmented)
        return self.cuts[free]


@dataclass(frozen=True, slots=True)
class FoldedStep:
    """A step of which only one rank of each class is lowered; the plan of all ranks is made when it is scheduled."""

    lowered: LoweredStep

    def cut(self, variant: Variant = PLAIN) -> FoldedPlan:
        """The plan of the listed ranks, without slot counts and orders."""
        plan, of_class = self.lowered.cut(variant), self.lowered.cut_freely(variant).of_class
        classes = self.lowered.program.listed.classes(plan.world)
        return FoldedPlan(plan, classes, partners=self.partners, of_class=of_class)

    @property
    def partners(self) -> tuple[Partners, ...]:
        """Which ranks communicate, each way once."""
        items = (item for item in self.lowered.program.items if item.groups)
        return tuple(dict.fromkeys(Partners(next(iter(item.comms.values())).label, item.groups) for item in items))
