"""A plan enters; which stages lie on which ranks leaves, and the published orders that this allows.

Ranks that compute the same stages are replicas of each other and take the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.plan.plan import Actor, Plan
from actorflow_scheduler.published_orders import (
    PublishedOrder,
    StageTask,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)

SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
STRAIGHT: dict[str, Callable[[int, int], PublishedOrder]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}  # those with one stage on each rank
LETTERS = {"forward": "F", "backward": "B", "weight": "W"}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Which ranks compute which stages."""

    pieces: int
    world: int
    stages: tuple[tuple[int, ...], ...]  # for each rank of the pipeline, its stages, ascending
    position: dict[int, int]  # rank → which of the above it, or its replica, is

    @property
    def length(self) -> int:
        """Ranks of one replica."""
        return len(self.stages)

    @property
    def count(self) -> int:
        """Stages."""
        return len({s for stages in self.stages for s in stages})

    @property
    def shape(self) -> str:
        """How stages lie on ranks: "straight" (one on each), "rounds", "v", or "none" of these."""
        number = {s: i for i, s in enumerate(sorted({s for stages in self.stages for s in stages}))}
        found = sorted(tuple(number[s] for s in stages) for stages in self.stages)
        size, most = len(found), max((len(s) for s in found), default=0)
        if found == [(k,) for k in range(size)]:
            return "straight"
        if found == [tuple(range(k, most * size, size)) for k in range(size)]:
            return "rounds"
        if found == [(k, 2 * size - 1 - k) for k in range(size)]:
            return "v"
        return "none"

    def misfit(self, name: str) -> str | None:
        """What a schedule needs that the stages are not; None if it fits."""
        shape = self.shape
        if name == "auto" or (name in STRAIGHT and shape == "straight"):
            return None
        if self.length == 1 and (name == "interleaved" or name == "zb-v"):
            shape = "straight"
        if name == "interleaved" and shape != "rounds":
            return (
                "needs several stages on each rank, which go round the ranks: "
                f"flow.place(model, stages={2 * self.world}) makes two on each of {self.world}"
            )
        if name == "zb-v" and shape != "v":
            return (
                "needs two stages on each rank, on the way down and on the way up a V: "
                f"flow.place(model, stages={2 * self.world}) makes them in a job of schedule 'zb-v'"
            )
        if name in STRAIGHT and shape != "straight":
            return f"needs one stage on each rank: flow.place(model, stages={self.length}) makes that"
        return None

    def guide(self, name: str) -> PublishedOrder:
        """The published order, in the plan's own numbers of stages; raises PlanError if it does not fit."""
        if (why := self.misfit(name)) is not None:
            found = "; ".join(f"{list(s)}" for s in self.stages)
            raise PlanError(f"schedule {name!r} {why}. Stages on each rank were found as {found}")
        if name == "interleaved":
            guide = interleaved(self.length, self.pieces, len(self.stages[0]))
        elif name == "zb-v":
            guide = zb_v(self.length, self.pieces)
        else:
            guide = STRAIGHT[name](self.length, self.pieces)
        number = sorted({s for stages in self.stages for s in stages})
        return tuple(tuple(t._replace(stage=number[t.stage]) for t in tasks) for tasks in guide)


def find_pipeline(plan: Plan) -> Pipeline:
    """Which ranks compute which stages, piece by piece."""
    found: dict[int, set[int]] = {}
    for a in plan.actors:
        if task_of(plan, a, 0) is not None:
            found.setdefault(a.rank, set()).add(a.stage)
    stages = sorted({tuple(sorted(s)) for s in found.values()})
    return Pipeline(
        plan.pieces, plan.world, tuple(stages), {rank: stages.index(tuple(sorted(s))) for rank, s in found.items()}
    )


def task_of(plan: Plan, actor: Actor, firing: int) -> StageTask | None:
    """What an actor does for its stage in one firing; None for what is not done piece by piece."""
    if actor.queue != "compute" or actor.kind not in LETTERS or actor.rate != plan.pieces:
        return None
    return StageTask(actor.stage, LETTERS[actor.kind], firing % actor.rate)
