"""A step that is lowered goes in; a plan for each variant that somebody asks for comes out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from actorflow_compiler.cutting.cut import PlanHeader, cut
from actorflow_compiler.cutting.lower import Program
from actorflow_compiler.cutting.recompute import tell_recomputed
from actorflow_compiler.cutting.segment import segment
from actorflow_compiler.cutting.stores import put_stores
from actorflow_compiler.cutting.verify import verify_segments
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import PLAIN, Variant


@dataclass(frozen=True, slots=True)
class LoweredStep:
    """A step of which all is decided but what its actors are."""

    header: PlanHeader  # its origins are those of the graph
    program: Program
    checkpoints: bool = False  # the backward pass computes forward values again, as the user's checkpoints say

    def cut(self, variant: Variant = PLAIN) -> Plan:
        """The plan of all ranks, without slot counts and orders."""
        header = self.header
        if header.pieces > 1 or self.checkpoints:  # joined, what is computed again would be taken for what was kept
            variant = replace(variant, joined=False)
        segmented = verify_segments(put_stores(segment(self.program, variant)))
        notes = (*header.notes, *tell_recomputed(segmented.program, header.pieces))
        return cut(replace(header, notes=notes), segmented)
