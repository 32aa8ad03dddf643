"""A step that is lowered goes in; a plan for each variant that somebody asks for comes out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from actorflow_compiler.cutting.cut import cut
from actorflow_compiler.cutting.lower import Program
from actorflow_compiler.cutting.recompute import tell_recomputed
from actorflow_compiler.cutting.segment import segment
from actorflow_compiler.cutting.stores import put_stores
from actorflow_compiler.plan.origins import Origins
from actorflow_compiler.plan.plan import Constant, Plan, Variable
from actorflow_compiler.plan.variant import PLAIN, Variant


@dataclass(frozen=True, slots=True)
class Laid:
    """A step of which all is decided but what its actors are."""

    name: str
    world: int  # ranks
    pieces: int  # micro-batches in an iteration
    program: Program
    variables: tuple[Variable, ...]
    constants: tuple[Constant, ...]
    notes: tuple[str, ...]
    origins: Origins = field(default_factory=Origins)  # of the graph
    checkpoints: bool = False  # the backward pass computes forward values again, as the user's checkpoints say

    def cut(self, variant: Variant = PLAIN) -> Plan:
        """The plan of all ranks, without slot counts and orders."""
        if self.pieces > 1 or self.checkpoints:  # joined, what is computed again would be taken for what was kept
            variant = replace(variant, joined=False)
        segmented = put_stores(segment(self.program, variant))
        notes = (*self.notes, *tell_recomputed(segmented.program, self.pieces))
        return cut(self.name, self.world, self.pieces, segmented, self.variables, self.constants, notes, self.origins)
