"""Find the chunks of parameters (ZeRO) that a plan gathers, and how early they may be there.

A plan may delay the gather of a chunk until the readers of an earlier one are done; a register without tensors says so.
How many chunks are in memory at a time then depends on how fast gathers and readers are, which forecasts do not know
exactly.  So a choice has to fit the memory also if gathers take no time, and chunks come as early as they may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.plan.plan import Actor, Collective, CollectiveKind, OfVariable, Plan
from actorflow_scheduler.cost import Durations

Chain = tuple[int, int, int]  # rank, stage, firings in an iteration: the chunks whose gathers may wait for each other


@dataclass(frozen=True, slots=True)
class GatheredChunks:
    """The chunks of gathered variables in a plan."""

    sizes: Mapping[Chain, tuple[int, ...]]  # bytes of each chunk
    delayed: frozenset[Chain]  # those in which gathers wait for readers of earlier chunks

    @property
    def most(self) -> int:
        """The largest number of chunks of a chain whose gathers wait; 0 if none do."""
        return max((len(self.sizes[chain]) for chain in self.delayed), default=0)

    def text(self, ahead: int | None) -> str:
        """How many chunks may be in memory, for people."""
        many = f"all {self.most}" if ahead is None else f"at most {ahead} of {self.most}"
        piece = " and micro-batch" if any(rate > 1 for _, _, rate in self.delayed) else ""
        return f"gathers of parameters run ahead: {many} chunks of a stage{piece} are in memory at a time"


def gathered_chunks(plan: Plan) -> GatheredChunks:
    """The chunks of a plan."""
    chain = {a.id: (a.rank, a.stage, a.rate) for a in plan.actors if _gathers(a)}
    sizes: dict[Chain, tuple[int, ...]] = {}
    for gather, key in chain.items():
        sizes[key] = (*sizes.get(key, ()), sum(r.nbytes for r in plan.outputs_of[gather]))
    delayed = {
        chain[read.actor]
        for register in plan.registers
        if not register.tensors and not register.initial
        for read in register.readers
        if read.actor in chain
    }
    return GatheredChunks(sizes, frozenset(delayed))


def with_gathers_at_once(plan: Plan, times: Durations) -> Durations:
    """The durations if gathers of variables took no time."""
    return replace(times, firing={**times.firing, **{a.id: 1 for a in plan.actors if _gathers(a)}})


def _gathers(actor: Actor) -> bool:
    """Whether an actor gathers variables."""
    return (
        isinstance(actor.comm, Collective)
        and actor.comm.kind == CollectiveKind.ALL_GATHER
        and all(isinstance(operand, OfVariable) for operand in actor.operands)
    )
