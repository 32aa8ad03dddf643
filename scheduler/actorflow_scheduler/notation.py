"""Write the order of firings in the usual notation of pipeline schedules, ``0F0 0F1 1B0``, as text or as CSV.

A word is stage, letter, micro-batch.  The letters are those of ``torch.distributed.pipelining``: F is forward, B a
whole backward; if backward is cut into gradients of inputs and of weights, these are I and W.  O, the optimizer, is
added here.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

from actorflow_compiler.plan.plan import Actor, ActorKind, Plan

LETTERS = {
    ActorKind.SOURCE: "L",
    ActorKind.FORWARD: "F",
    ActorKind.BACKWARD: "B",
    ActorKind.WEIGHT: "W",
    ActorKind.OPTIMIZER: "O",
    ActorKind.BOXING: "C",
    ActorKind.SEND: "S",
    ActorKind.SINK: "R",
}
COMPUTING = "compute"  # the queue whose order is shown


class Notation:
    """Writes the firings of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.halved = {
            (a.rank, a.stage) for a in plan.actors if a.kind == ActorKind.WEIGHT
        }  # (rank, stage) whose backward is cut into I and W

    def letter(self, actor: Actor) -> str:
        """The letter of an actor: F, B, I, W, O, or another of ``LETTERS``."""
        return (
            "I"
            if actor.kind == ActorKind.BACKWARD and (actor.rank, actor.stage) in self.halved
            else LETTERS[actor.kind]
        )

    def word(self, actor: Actor, firing: int) -> str:
        """The word of one firing, such as 2F0."""
        return f"{actor.stage}{self.letter(actor)}{firing % actor.rate}"

    def words(self, actors: Iterable[int]) -> Iterator[str]:
        """The words of actors that fire in this order, beginning with the first firing of each."""
        fired: dict[int, int] = {}
        for id in actors:
            actor = self.plan.actor(id)
            n = fired[id] = fired.get(id, -1) + 1
            yield self.word(actor, n)

    def line(self, rank: int, actors: Iterable[int]) -> str:
        """The words of a rank as a line, such as ``rank 0: 0F0 0F1 0B0``."""
        return f"rank {rank}: {' '.join(self.words(actors))}"


def frozen(plan: Plan, queue: str = COMPUTING) -> dict[int, tuple[int, ...]]:
    """Rank → the actors of one queue, in the order in which they fire in an iteration."""
    return {o.rank: o.actors for o in plan.orders if o.queue == queue}


def text(plan: Plan, queue: str = COMPUTING) -> str:
    """The frozen orders of one queue of every rank, one line for each rank."""
    notation = Notation(plan)
    return "\n".join(notation.line(rank, actors) for rank, actors in frozen(plan, queue).items())


def observed(plan: Plan, rank: int, actors: Sequence[int]) -> list[str]:
    """The actors that fired, in this order, on one rank's queue, as one line for each iteration."""
    size = sum(plan.actor(id).rate for id in set(actors))
    notation = Notation(plan)
    return [notation.line(rank, actors[at : at + size]) for at in range(0, len(actors), size or 1)]


def to_csv(plan: Plan, orders: Mapping[int, Sequence[int]] | None = None) -> str:
    """The CSV that torch's pipeline schedules load: a row for each rank, a cell for each F, B, I or W of a micro-batch.

    Data-parallel replicas, which run the same stages, share one row, which is the first replica's order: in torch, each
    replica is a pipeline of its own.  If a stage consists of several actors, its cell stands at the position of the
    last of them.  ``orders`` are observed orders by rank; by default the frozen orders are written.
    """
    notation = Notation(plan)
    rows: dict[tuple[int, ...], list[str]] = {}
    for _, actors in sorted((frozen(plan) if orders is None else orders).items()):
        cells = _cells(notation, actors)
        rows.setdefault(tuple(sorted({int(cell[: _digits(cell)]) for cell in cells})), cells)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(cells for stages, cells in rows.items() if stages)
    return out.getvalue()


def _cells(notation: Notation, actors: Sequence[int]) -> list[str]:
    """The words of one iteration, each once, at the position of its last actor; no W comes before its I."""
    plan = notation.plan
    computing = {
        a.id
        for a in plan.actors
        if a.kind in (ActorKind.FORWARD, ActorKind.BACKWARD, ActorKind.WEIGHT) and a.rate == plan.pieces
    }
    last: dict[str, int] = {}
    for at, (id, word) in enumerate(zip(actors, notation.words(actors), strict=True)):
        if id in computing:
            last[word] = at
    for word, at in last.items():
        if "W" in word:
            last[word] = max(at, last[word.replace("W", "I")])
    return sorted(last, key=lambda word: (last[word], "W" in word))


def _digits(cell: str) -> int:
    return next(i for i, c in enumerate(cell) if not c.isdigit())
