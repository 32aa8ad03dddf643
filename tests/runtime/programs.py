"""Make runnable plans by hand, from actors with bodies in the order in which they fire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actorflow_compiler.core.ops import Ref
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp
from actorflow_compiler.plan.plan import (
    Actor,
    Body,
    Collective,
    CollectiveKind,
    Comm,
    Constant,
    FromRegister,
    Operand,
    Order,
    Plan,
    Read,
    Register,
    Result,
    Send,
    Step,
    Target,
    TensorSpec,
    ToResult,
    Variable,
    parse_combine,
)

V0, V1, V2, V3, V4, V5, V6 = (Ref(i) for i in range(7))


def step(op: str, *args: Any, outs: Sequence[int], **kwargs: Any) -> Step:
    """One instruction."""
    return Step(op, args, tuple(kwargs.items()), tuple(outs))


def body(inputs: int, *steps: Step, outputs: Sequence[int]) -> Body:
    """What an actor computes."""
    return Body(inputs, steps, tuple(outputs))


def spec(*shape: int, dtype: str = "float32", combine: str = "") -> TensorSpec:
    """A tensor of a register."""
    return TensorSpec(shape, dtype, "B", parse_combine(combine))


MM = body(2, step("aten.mm.default", V0, V1, outs=[2]), outputs=[2])
ADD = body(2, step("aten.add.Tensor", V0, V1, outs=[2]), outputs=[2])


class Program:
    """Collects actors; each writes at most one register of tensors."""

    def __init__(self, pieces: int = 1, name: str = "program", world: int = 1) -> None:
        self.name = name
        self.world = world  # at least; all ranks that are named belong to it
        self.pieces = pieces
        self.actors: list[Actor] = []
        self.bodies: list[Body] = []
        self.registers: list[dict[str, Any]] = []
        self.results: list[Result] = []
        self.variables: list[Variable] = []
        self.constants: list[Constant] = []

    def actor(
        self,
        name: str,
        *operands: Operand,
        body: Body | None = None,
        out: Sequence[TensorSpec] = (),
        into: Sequence[Target] = (),
        kind: str = "forward",
        rank: int = 0,
        queue: str = "compute",
        rate: int = 1,
        slots: int = 1,
        fill: int = 1,
        initial: int = 0,
        firings: int = 1,
        comm: Comm | None = None,
    ) -> tuple[FromRegister, ...]:
        """Add an actor that reads the registers of its operands and fills a new one with ``out``, then ``into``.

        ``firings`` is how long it holds each token.
        """
        id = len(self.actors)
        for register in dict.fromkeys(o.register for o in operands if isinstance(o, FromRegister)):
            self.registers[register]["readers"] += (Read(id, firings),)
        made: tuple[FromRegister, ...] = ()
        if out:
            number = self._register(id, tuple(out), slots, initial, fill)
            made = tuple(FromRegister(number, i) for i in range(len(out)))
        if body is not None and body not in self.bodies:
            self.bodies.append(body)
        which = None if body is None else self.bodies.index(body)
        self.actors.append(Actor(id, name, rank, queue, kind, rate, which, operands, (*made, *into), comm))
        return made

    def order(self, before: str, after: str, firings: int = 1, initial: int = 0, fill: int = 1, slots: int = 1) -> None:
        """Let one actor wait for another through a register without tensors."""
        names = [a.name for a in self.actors]
        register = self._register(names.index(before), (), slots, initial, fill)
        self.registers[register]["readers"] += (Read(names.index(after), firings),)

    def send(
        self, *operands: FromRegister, to: int, rate: int = 1, slots: int = 1, plane: str = "memory"
    ) -> tuple[FromRegister, ...]:
        """Carry a token to another rank."""
        register = self.registers[operands[0].register]
        made = self.actors[register["producer"]]
        comm = Send(self._comm(), made.rank, to, plane=plane)
        out = [register["tensors"][o.index] for o in operands]
        queue = f"send:{to}"
        return self.actor(
            f"send {made.name}",
            *operands,
            out=out,
            kind="send",
            rank=made.rank,
            queue=queue,
            rate=rate,
            slots=slots,
            comm=comm,
        )

    def collective(self, kind: str, ranks: Sequence[int], **options: Any) -> Collective:
        """A new logical communication on the data plane in memory."""
        return Collective(CollectiveKind(kind), self._comm(), tuple(ranks), plane="memory", **options)

    def result(
        self,
        operand: Operand,
        place: Placement,
        sbp: NdSbp,
        shape: Sequence[int],
        dtype: str = "float32",
        rank: int = 0,
    ) -> None:
        """A sink that gives a result; call it for each rank, with the same result for those of one placement."""
        index = len(self.results) - (rank != place.ranks[0])
        self.actor(f"sink {index}", operand, into=[ToResult(index)], kind="sink", queue="sink", rank=rank)
        if index == len(self.results):
            self.results.append(Result(index, tuple(shape), dtype, place, sbp))

    def plan(self, orders: Mapping[tuple[int, str], Sequence[str]] | None = None) -> Plan:
        """The plan.  A queue without an order fires its actors as they were added, each ``rate`` times."""
        frozen: dict[tuple[int, str], tuple[int, ...]] = {}
        names = {a.name: a.id for a in self.actors}
        for actor in self.actors:
            queue = (actor.rank, actor.queue)
            frozen[queue] = frozen.get(queue, ()) + (actor.id,) * actor.rate
        for queue, order in (orders or {}).items():
            frozen[queue] = tuple(names[name] for name in order)
        return Plan(
            name=self.name,
            world=max(self.world, *(1 + rank for rank in self._ranks())),
            pieces=self.pieces,
            bodies=tuple(self.bodies),
            actors=tuple(self.actors),
            registers=tuple(Register(**r) for r in self.registers),
            variables=tuple(self.variables),
            results=tuple(self.results),
            orders=tuple(Order(rank, queue, ids) for (rank, queue), ids in sorted(frozen.items())),
            constants=tuple(self.constants),
        )

    def _ranks(self) -> Iterator[int]:
        """The ranks that are named."""
        for actor in self.actors:
            yield from (actor.rank, *(() if actor.comm is None else actor.comm.ranks))
        for variable in self.variables:
            yield from variable.placement.ranks

    def _register(self, producer: int, tensors: tuple[TensorSpec, ...], slots: int, initial: int, fill: int) -> int:
        id = len(self.registers)
        self.registers.append(
            {
                "id": id,
                "producer": producer,
                "readers": (),
                "tensors": tensors,
                "slots": slots,
                "initial": initial,
                "fill": fill,
            }
        )
        return id

    def _comm(self) -> int:
        return sum(a.comm is not None for a in self.actors)


def on(*ranks: int) -> Placement:
    """A placement on some ranks."""
    return Placement("cpu", ranks, (len(ranks),))
