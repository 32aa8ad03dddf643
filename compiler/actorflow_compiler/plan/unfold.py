"""Make the plan of all ranks of a plan that lists one rank of each class.

What a rank does is what the listed rank of its class does, with other numbers of actors, registers and ranks, and with
what was recorded as different (``rank_differences.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.origins import Origins, StepsOf
from actorflow_compiler.plan.plan import (
    Actor,
    Body,
    Comm,
    FromRegister,
    Operand,
    Order,
    Plan,
    Read,
    Register,
    Send,
    Target,
)
from actorflow_compiler.plan.rank_differences import BodyOfClass, CommOfClass, UnlikeError, on_rank

Copy = tuple[int, int]  # actor or register of the listed rank, and the rank of its class that has the copy


def unfold_ranks(folded: FoldedPlan) -> Plan:
    """The plan of all ranks.  Its actors are numbered in the order of the listed ones, then by rank.

    Raises UnlikeError where ranks of a class do not send to, or receive from, as many of another class one to one: then
    they are not alike, and there is no such plan.
    """
    if all(len(ranks) == 1 for ranks in folded.rank_classes.values()):
        return folded.plan
    return _Unfolding(folded).run()


class _Unfolding:
    def __init__(self, folded: FoldedPlan) -> None:
        plan = folded.plan
        self.plan, self.classes, self.of_class = plan, folded.rank_classes, folded.of_class
        self.home = {r.id: plan.home(r) for r in plan.registers}
        self.actors: dict[Copy, int] = {}
        for actor in plan.actors:
            ranks = self.classes[actor.rank]
            self.actors.update({(actor.id, rank): len(self.actors) + k for k, rank in enumerate(ranks)})
        self.registers: dict[Copy, int] = {}
        for r in plan.registers:
            ranks = self.classes[self.home[r.id]]
            self.registers.update({(r.id, rank): len(self.registers) + k for k, rank in enumerate(ranks)})
        self.senders: dict[Copy, int] = {}  # (actor that sends, rank that receives) → rank that sends
        self.sent_to: dict[Copy, int] = {}  # (actor that sends, rank that sends) → rank that receives
        for actor in plan.actors:
            if isinstance(actor.comm, Send):
                self.find_partners(actor, actor.comm)
        self.collectives: dict[tuple[int, tuple[int, ...]], int] = {}  # id of the listed one, group → id
        self.bodies: dict[Body, int] = {body: index for index, body in enumerate(plan.bodies)}
        self.groups: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for equal ones

    def find_partners(self, actor: Actor, comm: Send) -> None:
        """Who sends to whom."""
        of_class = self.of_class.get(actor.id)
        if not isinstance(of_class, CommOfClass):
            raise UnlikeError
        partners = {rank: of_class.ranks(rank)[1] for rank in self.classes[actor.rank]}
        if sorted(partners.values()) != sorted(self.classes[comm.to_rank]):
            raise UnlikeError
        for rank, to in partners.items():
            self.sent_to[actor.id, rank], self.senders[actor.id, to] = to, rank

    def run(self) -> Plan:
        plan = self.plan
        actors = tuple(self.actor(actor, rank) for actor in plan.actors for rank in self.classes[actor.rank])
        return replace(
            plan,
            bodies=tuple(self.bodies),
            actors=actors,
            registers=tuple(
                self.register(r, rank) for r in plan.registers for rank in self.classes[self.home[r.id]]
            ),
            orders=self.orders(plan.orders, actors),
            ranks=(),
            origins=self.origins(plan.origins),
        )

    def actor(self, actor: Actor, rank: int) -> Actor:
        """The copy of an actor on a rank."""
        number = self.actors[actor.id, rank]
        if rank == actor.rank:
            comm: Comm | None = actor.comm and self.numbered(actor.comm, actor.comm.ranks)
            name, queue, body = actor.name, actor.queue, actor.body
        else:
            comm, body = self.comm(actor, rank), self.body(actor, rank)
            name, queue = self.named(actor, rank)
        home = self.sent_to[actor.id, rank] if isinstance(actor.comm, Send) else rank
        operands = tuple([self.operand(o, rank) for o in actor.operands])
        targets = tuple([self.target(t, home) for t in actor.targets])
        return Actor(  # in a third of the time of dataclasses.replace, as there are dozens for each rank
            number, name, rank, queue, actor.kind, actor.rate, body, operands, targets, comm, actor.flops, actor.stage,
            actor.workspace, actor.flops_dtype,
        )  # fmt: skip

    def named(self, actor: Actor, rank: int) -> tuple[str, str]:
        """Name and queue of an actor's copy; of the listed one they end in ranks, as ``cut.py`` makes them."""
        if isinstance(actor.comm, Send):
            to = self.sent_to[actor.id, rank]
            return f"{actor.name.rpartition(':')[0]}:{rank}>{to}", f"{actor.queue.rpartition(':')[0]}:{to}"
        return f"{actor.name.rpartition('@')[0]}@{rank}", actor.queue

    def body(self, actor: Actor, rank: int) -> int | None:
        """The body of an actor's copy."""
        of_class = self.of_class.get(actor.id)
        if not isinstance(of_class, BodyOfClass):
            return actor.body
        return self.bodies.setdefault(on_rank(of_class.body, rank), len(self.bodies))

    def comm(self, actor: Actor, rank: int) -> Comm | None:
        """The communication of an actor's copy."""
        if actor.comm is None:
            return None
        of_class = self.of_class.get(actor.id)
        if not isinstance(of_class, CommOfClass):
            raise UnlikeError
        ranks = of_class.ranks(rank)
        comm = self.numbered(actor.comm, ranks)
        if isinstance(comm, Send):
            return comm
        if len(ranks) != len(comm.ranks) or rank not in ranks:
            raise UnlikeError
        return replace(comm, ranks=self.groups.setdefault(ranks, ranks), exchanges=of_class.exchanges(rank))

    def numbered(self, comm: Comm, ranks: tuple[int, ...]) -> Comm:
        """A communication of these ranks, with a number of its own, which the members of a collective share."""
        number = self.collectives.setdefault((comm.id, ranks), len(self.collectives))
        if isinstance(comm, Send):
            return replace(comm, id=number, from_rank=ranks[0], to_rank=ranks[1])
        return replace(comm, id=number)

    def operand(self, operand: Operand, rank: int) -> Operand:
        if not isinstance(operand, FromRegister):
            return operand
        return FromRegister(self.registers[operand.register, rank], operand.index)

    def target(self, target: Target, home: int) -> Target:
        if not isinstance(target, FromRegister):
            return target
        return FromRegister(self.registers[target.register, home], target.index)

    def register(self, register: Register, rank: int) -> Register:
        """The copy of a register whose slots are on a rank."""
        sends = self.plan.actor(register.producer).comm
        maker = self.senders[register.producer, rank] if isinstance(sends, Send) else rank
        return Register(  # as for actors
            self.registers[register.id, rank],
            self.actors[register.producer, maker],
            tuple([Read(self.actors[r.actor, rank], r.firings) for r in register.readers]),
            register.tensors,
            register.slots,
            register.initial,
            register.fill,
        )

    def orders(self, orders: Sequence[Order], actors: Sequence[Actor]) -> tuple[Order, ...]:
        """The orders of all ranks."""
        found = []
        for order in orders:
            for rank in self.classes[order.rank]:
                mine = tuple([self.actors[a, rank] for a in order.actors])
                queue = actors[mine[0]].queue if mine else order.queue
                found.append(Order(rank, queue, mine))
        return tuple(sorted(found, key=lambda o: (o.rank, o.queue)))

    def origins(self, origins: Origins) -> Origins:
        """The origins, with the steps of all actors."""
        ranks: Mapping[int, int] = {a.id: a.rank for a in self.plan.actors}
        steps = (
            StepsOf(self.actors[one.actor, rank], one.places)
            for one in origins.steps
            for rank in self.classes[ranks[one.actor]]
        )
        return replace(origins, steps=tuple(steps))
