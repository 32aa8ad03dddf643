"""Make legal plans by hand, from short sketches, for tests of what comes after the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actorflow_compiler.plan.plan import (
    Actor,
    Collective,
    CollectiveKind,
    Comm,
    FromRegister,
    Operand,
    Order,
    Plan,
    Read,
    Register,
    Send,
    Target,
    TensorSpec,
)


class Sketch:
    """Collects actors and registers; ``plan()`` gives the plan, without orders unless they are named.

    >>> s = Sketch(pieces=4)
    >>> f = s.actor("F", "forward", rate=4)
    >>> b = s.actor("B", "backward", rate=4)
    >>> s.join(f, b, slots=2)
    """

    def __init__(self, pieces: int = 1) -> None:
        self.pieces = pieces
        self.actors: list[Actor] = []
        self.registers: list[Register] = []

    def actor(
        self,
        name: str,
        kind: str = "forward",
        rank: int = 0,
        queue: str = "compute",
        rate: int = 1,
        stage: int = 0,
        flops: float = 1.0,
        comm: Comm | None = None,
        operands: tuple[Operand, ...] = (),
        targets: tuple[Target, ...] = (),
    ) -> int:
        """Add an actor; returns its number."""
        id = len(self.actors)
        self.actors.append(
            Actor(
                id=id,
                name=name,
                rank=rank,
                queue=queue,
                kind=kind,
                rate=rate,
                stage=stage,
                flops=flops,
                comm=comm,
                operands=operands,
                targets=targets,
            )
        )
        return id

    def join(
        self,
        producer: int,
        *readers: int | tuple[int, int],
        slots: int = 1,
        initial: int = 0,
        fill: int = 1,
        nbytes: int = 4,
    ) -> int:
        """Add a register from an actor to others, each a number or (number, firings that hold a token)."""
        id = len(self.registers)
        reads = tuple(Read(*r) if isinstance(r, tuple) else Read(r) for r in readers)
        tensors = (TensorSpec((nbytes // 4,), "float32", "B"),) if nbytes else ()
        self.registers.append(
            Register(id=id, producer=producer, readers=reads, tensors=tensors, slots=slots, initial=initial, fill=fill)
        )
        return id

    def collective(self, ranks: Sequence[int], name: str = "grad", **actor: object) -> list[int]:
        """Add an all-reduce: one actor on the comm queue of every rank; returns their numbers."""
        comm = Collective(CollectiveKind.ALL_REDUCE, self._comm(), tuple(ranks))
        return [
            self.actor(name, "boxing", rank=rank, queue="comm", flops=0.0, comm=comm, **actor)  # type: ignore[arg-type]
            for rank in ranks
        ]

    def send(
        self,
        producer: int,
        *readers: int | tuple[int, int],
        to: int,
        slots: int = 1,
        nbytes: int = 4,
        plane: str = "inline",
    ) -> tuple[int, int, int]:
        """Carry what an actor makes to readers on another rank; returns (register out, send actor, register in)."""
        made = self.actors[producer]
        out, into = len(self.registers), len(self.registers) + 1
        send = self.actor(
            f"send {made.name}",
            "send",
            rank=made.rank,
            queue=f"send:{to}",
            rate=made.rate,
            stage=made.stage,
            flops=0.0,
            comm=Send(self._comm(), made.rank, to, plane=plane),
            operands=(FromRegister(out, 0),),
            targets=(FromRegister(into, 0),),
        )
        self.join(producer, send, slots=slots, nbytes=nbytes)
        self.join(send, *readers, slots=slots, nbytes=nbytes)
        return out, send, into

    def _comm(self) -> int:
        return 1 + max((a.comm.id for a in self.actors if a.comm is not None), default=-1)

    def plan(self, orders: Mapping[tuple[int, str], Sequence[int]] | None = None, name: str = "sketch") -> Plan:
        """The plan, with frozen orders for these queues; queues of one actor get theirs by themselves."""
        frozen: dict[tuple[int, str], tuple[int, ...]] = {}
        if orders is not None:
            for actor in self.actors:
                queue = (actor.rank, actor.queue)
                if queue not in orders:
                    assert queue not in frozen, f"queue {queue} of several actors needs an order"
                    frozen[queue] = (actor.id,) * actor.rate
            frozen |= {queue: tuple(ids) for queue, ids in orders.items()}
        return Plan(
            name=name,
            world=1 + max(a.rank for a in self.actors),
            pieces=self.pieces,
            bodies=(),
            actors=tuple(self.actors),
            registers=tuple(self.registers),
            orders=tuple(Order(rank, queue, ids) for (rank, queue), ids in sorted(frozen.items())),
        )


def pipeline(
    stages: int,
    pieces: int,
    replicas: int = 1,
    weights: bool = False,
    statistics: Sequence[int] = (),
    nbytes: int = 4,
    flops: float = 1.0,
    backward: float | None = None,
    on: Sequence[int] | None = None,
) -> Plan:
    """A training step over ``stages`` × ``replicas`` ranks, unsized and without orders.

    Every rank has a source on stage 0, forward and backward for each piece, weight gradients apart
    with ``weights``, gradients summed over the pieces and over the replicas, and an optimizer whose
    register starts with a token and is read by forward.  Stages in ``statistics`` all-reduce among
    their replicas in the middle of forward.  Stage k, replica d is rank k·replicas + d, or
    on[k]·replicas + d.  A backward firing takes ``backward`` operations, all others ``flops``.
    """
    s = Sketch(pieces)
    on = range(stages) if on is None else on
    grid = [[on[k] * replicas + d for d in range(replicas)] for k in range(stages)]
    first: dict[tuple[int, int], int] = {}  # (stage, rank) → the actor that starts forward
    last: dict[tuple[int, int], int] = {}  # (stage, rank) → the actor that ends forward
    back: dict[tuple[int, int], int] = {}
    for k, ranks in enumerate(grid):
        for rank in ranks:
            first[k, rank] = last[k, rank] = s.actor(f"F{k}", "forward", rank, rate=pieces, stage=k, flops=flops)
        if k in statistics:
            moments = s.collective(ranks, f"moments{k}", rate=pieces, stage=k)
            for rank, moment in zip(ranks, moments, strict=True):
                last[k, rank] = s.actor(f"F{k}'", "forward", rank, rate=pieces, stage=k, flops=flops)
                s.join(first[k, rank], moment)
                s.join(moment, last[k, rank])
                s.join(first[k, rank], last[k, rank], nbytes=nbytes)
    for k, ranks in reversed(list(enumerate(grid))):
        gradients = []
        for rank in ranks:
            cost = flops if backward is None else backward
            made = back[k, rank] = s.actor(f"B{k}", "backward", rank, rate=pieces, stage=k, flops=cost)
            s.join(last[k, rank], made, nbytes=nbytes)
            if weights:
                made = s.actor(f"W{k}", "weight", rank, rate=pieces, stage=k, flops=flops)
                s.join(back[k, rank], made, nbytes=nbytes)
                s.join(last[k, rank], made, nbytes=nbytes)
            gradients.append(made)
        reduced = s.collective(ranks, f"gradient{k}", stage=k) if replicas > 1 else []
        for d, rank in enumerate(ranks):
            optimizer = s.actor(f"O{k}", "optimizer", rank, stage=k, flops=flops)
            s.join(gradients[d], reduced[d] if reduced else optimizer, fill=pieces, nbytes=nbytes)
            if reduced:
                s.join(reduced[d], optimizer, nbytes=nbytes)
            s.join(optimizer, (first[k, rank], pieces), initial=1, nbytes=0)
    for rank in grid[0]:
        source = s.actor("batch", "source", rank, "source", rate=pieces, flops=0.0)
        s.join(source, first[0, rank], nbytes=nbytes)
    for k in range(stages - 1):
        for here, there in zip(grid[k], grid[k + 1], strict=True):
            forth, back_ = (last[k, here], first[k + 1, there]), (back[k + 1, there], back[k, here])
            for (maker, reader), to in ((forth, there), (back_, here)):
                if here == there:
                    s.join(maker, reader, nbytes=nbytes)
                else:
                    s.send(maker, reader, to=to, nbytes=nbytes)
    for rank in grid[-1]:
        sink = s.actor("loss", "sink", rank, "sink", rate=pieces, stage=stages - 1, flops=0.0)
        s.join(last[stages - 1, rank], sink)
    return s.plan(name=f"{stages} stages, {pieces} pieces, {replicas} replicas")
