"""Find the chunks of parameters (ZeRO) that a plan gathers, and how early they may be there.

A plan may delay the gather of a chunk until the readers of an earlier one are done; a register without tensors says so.
How many chunks are in memory at a time then depends on how fast gathers and readers are, which forecasts do not know
exactly.  So a choice has to fit the memory also if gathers take no time, and chunks come as early as they may.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.plan.plan import Actor, ActorKind, Collective, CollectiveKind, OfVariable, Plan
from actorflow_scheduler.cost import Durations

Chain = tuple[int, int, int]  # rank, stage, firings in an iteration: the chunks whose gathers may wait for each other

PASSES = (ActorKind.FORWARD, ActorKind.BACKWARD, ActorKind.WEIGHT)
SPARE = 0.005  # of the period, for which a plan that gathers in micro-batches may be longer to need less memory


@dataclass(frozen=True, slots=True)
class GatheredChunks:
    """The chunks of gathered variables in a plan."""

    sizes: Mapping[Chain, tuple[int, ...]]  # bytes of each chunk
    delayed: frozenset[Chain]  # those in which gathers wait for readers of earlier chunks
    in_turn: bool  # whether gathers of a micro-batch wait for readers of the one before

    @property
    def most(self) -> int:
        """The largest number of chunks of a chain whose gathers wait; 0 if none do."""
        return max((len(self.sizes[chain]) for chain in self.delayed), default=0)

    def text(self, ahead: int | None, shared: bool = False) -> str:
        """How many chunks may be in memory, for people."""
        many = f"all {self.most}" if ahead is None else f"at most {ahead} of {self.most}"
        each = " and pass" if any(rate > 1 for _, _, rate in self.delayed) and not shared else ""
        return f"gathers of parameters run ahead: {many} chunks of a stage{each} are in memory at a time"


def gathered_chunks(plan: Plan) -> GatheredChunks:
    """The chunks of a plan."""
    chain = {a.id: (a.rank, a.stage, a.rate) for a in plan.actors if _gathers(a)}
    chunks: dict[Chain, Counter[int]] = {}  # → bytes of a chunk, by the first actor that reads it
    for gather, key in chain.items():
        made = plan.outputs_of[gather]
        first = min((read.actor for r in made for read in r.readers), default=-1)
        chunks.setdefault(key, Counter())[first] += sum(r.nbytes for r in made)
    sizes = {key: tuple(of_chain.values()) for key, of_chain in chunks.items()}
    delayed = {
        chain[read.actor]
        for register in plan.registers
        if not register.tensors and not register.initial
        for read in register.readers
        if read.actor in chain
    }
    in_turn = any(
        not register.tensors and register.initial and plan.actor(register.producer).kind in PASSES
        for gather in chain
        for register in plan.inputs_of[gather]
    )
    return GatheredChunks(sizes, frozenset(delayed), in_turn)


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
