"""Make the plan of a 1F1B pipeline from its sizes alone, to forecast models without capturing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import (
    LAST,
    SUM,
    Actor,
    ActorKind,
    Collective,
    CollectiveKind,
    FromRegister,
    Order,
    Plan,
    Plane,
    Read,
    Register,
    Send,
    TensorSpec,
    Variable,
    VariableKind,
)
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler.rank_classes import FoldedPlan


def outline(
    stages: int,
    micro_batches: int,
    replicas: int = 1,
    *,
    flops: float | Sequence[float],
    sent: int,
    saved: int,
    parameters: int,
    dtype: str = "bfloat16",
    optimizer: int = 6,
    ahead: int = 0,
) -> FoldedPlan:
    """The plan of a 1F1B pipeline over ``stages`` × ``replicas`` ranks, made from its sizes alone.

    ``flops`` are the floating-point operations of a stage's forward for one micro-batch (one number for all stages, or
    one for each); backward takes twice as many.  In elements: ``sent`` is sent from stage to stage, ``saved`` is kept
    by forward for backward, ``parameters`` are those of a stage, and ``optimizer`` is the state for each parameter.  A
    stage has ``ahead`` more micro-batches in flight than 1F1B, which is enough only if sending takes no time.  Stage k
    lies on ranks k·replicas … (k+1)·replicas-1, which all-reduce their gradients; only the first of them is listed.
    """
    each = list(flops) if isinstance(flops, Sequence) else [flops] * stages
    made = _OutlineBuilder(dtype)
    for k in range(stages):
        ranks = tuple(range(k * replicas, (k + 1) * replicas))
        made.stage(
            k, ranks, micro_batches, each[k], saved, parameters, optimizer, min(micro_batches, stages - k + ahead)
        )
    for k in range(stages - 1):
        made.send(k, k + 1, sent)
        made.send(k + 1, k, sent)
    classes = {k * replicas: range(k * replicas, (k + 1) * replicas) for k in range(stages)}
    plan = Plan(
        name=f"{stages} stages × {replicas} replicas",
        world=stages * replicas,
        pieces=micro_batches,
        bodies=(),
        actors=tuple(made.actors),
        registers=tuple(made.registers),
        variables=tuple(made.variables),
        orders=tuple(made.orders),
        ranks=tuple(classes),
    )
    return FoldedPlan(_by_nccl(verify(plan)), classes)


def _by_nccl(plan: Plan) -> Plan:
    """The plan with NCCL as the plane of all communication, without an order of calls, as it is never run."""
    return replace(
        plan,
        actors=tuple(a if a.comm is None else replace(a, comm=replace(a.comm, plane=Plane.NCCL)) for a in plan.actors),
    )


class _OutlineBuilder:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.actors: list[Actor] = []
        self.registers: list[Register] = []
        self.variables: list[Variable] = []
        self.orders: list[Order] = []
        self.forward: list[Actor] = []  # the forward actor of each stage
        self.backward: list[Actor] = []
        self.under_way: list[int] = []

    def actor(self, name: str, kind: ActorKind, like: tuple[int, int, int], queue: str, **more: object) -> Actor:
        rank, stage, rate = like
        made = Actor(len(self.actors), name, rank, queue, kind, rate=rate, stage=stage, **more)  # type: ignore[arg-type]
        self.actors.append(made)
        return made

    def join(
        self, producer: Actor, reader: Actor, elements: int, slots: int = 1, initial: int = 0, fill: int = 1
    ) -> Register:
        tokens = producer.rate // fill
        tensors = (TensorSpec((elements,), self.dtype, "B", combine=SUM if fill > 1 else LAST),) if elements else ()
        read = Read(reader.id, reader.rate // tokens)
        made = Register(len(self.registers), producer.id, (read,), tensors, slots, initial, fill)
        self.registers.append(made)
        return made

    def stage(
        self,
        k: int,
        ranks: tuple[int, ...],
        pieces: int,
        flops: float,
        saved: int,
        parameters: int,
        optimizer: int,
        under_way: int,
    ) -> None:
        """Add the actors and registers of a stage's first rank, and the order of its queues."""
        each, once = (ranks[0], k, pieces), (ranks[0], k, 1)
        forward = self.actor(f"F{k}", ActorKind.FORWARD, each, "compute", flops=flops)
        backward = self.actor(f"B{k}", ActorKind.BACKWARD, each, "compute", flops=2 * flops)
        update = self.actor(f"O{k}", ActorKind.OPTIMIZER, once, "compute")
        self.join(forward, backward, saved, slots=under_way)
        last = backward
        if len(ranks) > 1:
            register = len(self.registers)
            last = self.actor(
                f"gradients{k}", ActorKind.BOXING, once, "comm", comm=Collective(CollectiveKind.ALL_REDUCE, k, ranks),
                operands=(FromRegister(register, 0),), targets=(FromRegister(register + 1, 0),),
            )  # fmt: skip
            self.join(backward, last, parameters, fill=pieces)
            self.orders.append(Order(ranks[0], "comm", (last.id,)))
        self.join(last, update, parameters, fill=last.rate)
        self.join(update, forward, 0, initial=1)
        place = Placement("cuda", ranks, (len(ranks),))
        for kind, count in ((VariableKind.PARAMETER, parameters), (VariableKind.OPTIMIZER, optimizer * parameters)):
            self.variables.append(Variable(f"{kind}s{k}", (count,), self.dtype, place, (B,), kind))
        steady = [backward.id, forward.id] * (pieces - under_way)
        order = [forward.id] * under_way + steady + [backward.id] * under_way
        self.orders.append(Order(ranks[0], "compute", (*order, update.id)))
        self.forward.append(forward)
        self.backward.append(backward)
        self.under_way.append(under_way)

    def send(self, source: int, to: int, elements: int) -> None:
        """Add the sends of a stage to its neighbour: activations to the next stage, or gradients to the one before."""
        ends = self.forward if to > source else self.backward
        made, reader = ends[source], ends[to]
        register = len(self.registers)
        send = self.actor(
            f"send {made.name}", ActorKind.SEND, (made.rank, source, made.rate), f"send:{reader.rank}",
            comm=Send(len(self.actors), made.rank, reader.rank),
            operands=(FromRegister(register, 0),), targets=(FromRegister(register + 1, 0),),
        )  # fmt: skip
        self.join(made, send, elements, slots=2)
        self.join(send, reader, elements, slots=2)
        self.orders.append(Order(made.rank, send.queue, (send.id,) * made.rate))
