"""Find which ranks compute which stages of a plan, and which published schedules fit.

Ranks that compute the same stages are replicas of each other and use the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.plan.plan import Actor, ActorKind, Plan
from actorflow_scheduler.published_orders import (
    B,
    F,
    PublishedOrder,
    StageTask,
    W,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)

SCHEDULES = tuple(ScheduleName)
STRAIGHT: dict[ScheduleName, Callable[[int, int], PublishedOrder]] = {
    ScheduleName.GPIPE: gpipe,
    ScheduleName.ONE_F_ONE_B: one_f_one_b,
    ScheduleName.ZB_H1: zb_h1,
    ScheduleName.ZB_H2: zb_h2,
}  # the schedules for one stage on each rank
TASKS = {ActorKind.FORWARD: F, ActorKind.BACKWARD: B, ActorKind.WEIGHT: W}  # kind of actor → kind of task


class StageShape(StrEnum):
    """How the stages of a pipeline lie on its ranks."""

    STRAIGHT = "straight"  # one stage on each rank
    ROUNDS = "rounds"  # several on each rank, assigned round-robin: for interleaved schedules
    V = "v"  # two on each of n ranks, stages k and 2n-1-k on the same rank
    OTHER = "none"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Which ranks compute which stages.

    A position is a rank of one replica of the pipeline.
    """

    pieces: int  # micro-batches in an iteration
    world: int  # ranks
    stages: tuple[tuple[int, ...], ...]  # position → its stages, ascending
    position: dict[int, int]  # rank → position

    @property
    def length(self) -> int:
        """Number of positions: ranks of one replica."""
        return len(self.stages)

    @property
    def count(self) -> int:
        """Number of stages."""
        return len({s for stages in self.stages for s in stages})

    @property
    def shape(self) -> StageShape:
        """How the stages lie on the ranks."""
        number = {s: i for i, s in enumerate(sorted({s for stages in self.stages for s in stages}))}
        found = sorted(tuple(number[s] for s in stages) for stages in self.stages)
        size, most = len(found), max((len(s) for s in found), default=0)
        if found == [(k,) for k in range(size)]:
            return StageShape.STRAIGHT
        if found == [tuple(range(k, most * size, size)) for k in range(size)]:
            return StageShape.ROUNDS
        if found == [(k, 2 * size - 1 - k) for k in range(size)]:
            return StageShape.V
        return StageShape.OTHER

    def misfit(self, name: ScheduleName) -> str | None:
        """What a schedule needs of the stages but does not find, as text for an error; None if it fits."""
        shape = self.shape
        if name is ScheduleName.AUTO or (name in STRAIGHT and shape is StageShape.STRAIGHT):
            return None
        if self.length == 1 and name in (ScheduleName.INTERLEAVED, ScheduleName.ZB_V):
            shape = StageShape.STRAIGHT
        if name is ScheduleName.INTERLEAVED and shape is not StageShape.ROUNDS:
            return (
                "needs several stages on each rank, which go round the ranks: "
                f"flow.place(model, stages={2 * self.world}) makes two on each of {self.world}"
            )
        if name is ScheduleName.ZB_V and shape is not StageShape.V:
            return (
                "needs two stages on each rank, on the way down and on the way up a V: "
                f"flow.place(model, stages={2 * self.world}) makes them in a job of schedule 'zb-v'"
            )
        if name in STRAIGHT and shape is not StageShape.STRAIGHT:
            return f"needs one stage on each rank: flow.place(model, stages={self.length}) makes that"
        return None

    def published(self, name: ScheduleName) -> PublishedOrder:
        """The published order of a schedule, in the plan's stage numbers; raises PlanError if it does not fit."""
        if (why := self.misfit(name)) is not None:
            found = "; ".join(f"{list(s)}" for s in self.stages)
            raise PlanError(f"schedule {str(name)!r} {why}. Stages on each rank were found as {found}")
        if name is ScheduleName.INTERLEAVED:
            order = interleaved(self.length, self.pieces, len(self.stages[0]))
        elif name is ScheduleName.ZB_V:
            order = zb_v(self.length, self.pieces)
        else:
            order = STRAIGHT[name](self.length, self.pieces)
        number = sorted({s for stages in self.stages for s in stages})
        return tuple(tuple(t._replace(stage=number[t.stage]) for t in tasks) for tasks in order)


def find_pipeline(plan: Plan) -> Pipeline:
    """Which ranks compute which stages for each micro-batch."""
    found: dict[int, set[int]] = {}
    for a in plan.actors:
        if task_of(plan, a, 0) is not None:
            found.setdefault(a.rank, set()).add(a.stage)
    stages = sorted({tuple(sorted(s)) for s in found.values()})
    return Pipeline(
        plan.pieces, plan.world, tuple(stages), {rank: stages.index(tuple(sorted(s))) for rank, s in found.items()}
    )


def task_of(plan: Plan, actor: Actor, firing: int) -> StageTask | None:
    """The task of an actor's stage that one firing computes; None unless it computes once for each micro-batch."""
    if actor.queue != "compute" or actor.kind not in TASKS or actor.rate != plan.pieces:
        return None
    return StageTask(actor.stage, TASKS[actor.kind], firing % actor.rate)
