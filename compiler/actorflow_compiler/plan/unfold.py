"""Make the plan of all ranks of a plan that lists one rank of each class.

What a rank does is what the listed rank of its class does, with other numbers of actors, registers and ranks, and with
what was recorded as different (``rank_differences.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.origins import Origins, StepsOf
from actorflow_compiler.plan.plan import (
    Actor,
    Body,
    Collective,
    Comm,
    Exchange,
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


def unfold_ranks(folded: FoldedPlan) -> Plan:
    """The plan of all ranks.  Its actors are numbered in the order of the listed ones, then by rank.

    Raises UnlikeError where ranks of a class do not send to, or receive from, as many of another class one to one: then
    they are not alike, and there is no such plan.
    """
    if all(len(ranks) == 1 for ranks in folded.rank_classes.values()):
        return folded.plan
    return _Unfolding(folded).run()


class _Unfolding:
    """The copies of an actor or a register have consecutive numbers, one for each rank of its class.

    What makes a copy is written out, without ``dataclasses.replace``: there are dozens of them for each rank.
    """

    def __init__(self, folded: FoldedPlan) -> None:
        plan = folded.plan
        self.plan, self.classes, self.of_class = plan, folded.rank_classes, folded.of_class
        self.place = {rank: k for ranks in self.classes.values() for k, rank in enumerate(ranks)}  # in its class
        self.home = {r.id: plan.home(r) for r in plan.registers}
        self.actors = self.first_numbers({actor.id: actor.rank for actor in plan.actors})
        self.registers = self.first_numbers(self.home)
        self.senders: dict[int, dict[int, int]] = {}  # actor that sends → rank that receives → rank that sends
        self.sent_to: dict[int, dict[int, int]] = {}  # actor that sends → rank that sends → rank that receives
        for actor in plan.actors:
            if isinstance(actor.comm, Send):
                self.find_partners(actor, actor.comm)
        self.collectives: dict[tuple[int, int], int] = {}  # id of the listed one, id() of its group → id
        self.bodies: dict[Body, int] = {body: index for index, body in enumerate(plan.bodies)}
        self.groups: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for equal ones

    def first_numbers(self, ranks: Mapping[int, int]) -> dict[int, int]:
        """For what these listed ranks have: the number of the first copy."""
        counts = (len(self.classes[rank]) for rank in ranks.values())
        return dict(zip(ranks, itertools.accumulate(counts, initial=0), strict=False))  # the last one is of no copy

    def find_partners(self, actor: Actor, comm: Send) -> None:
        """Who sends to whom."""
        of_class = self.of_class.get(actor.id)
        if not isinstance(of_class, CommOfClass):
            raise UnlikeError
        partners = {rank: of_class.ranks(rank)[1] for rank in self.classes[actor.rank]}
        if sorted(partners.values()) != sorted(self.classes[comm.to_rank]):
            raise UnlikeError
        self.sent_to[actor.id] = partners
        self.senders[actor.id] = {to: rank for rank, to in partners.items()}

    def run(self) -> Plan:
        plan = self.plan
        actors = tuple([copy for actor in plan.actors for copy in self.copies(actor)])
        return replace(
            plan,
            bodies=tuple(self.bodies),
            actors=actors,
            registers=tuple([copy for register in plan.registers for copy in self.registers_like(register)]),
            orders=self.orders(plan.orders, actors),
            ranks=(),
            origins=self.origins(plan.origins),
        )

    def copies(self, actor: Actor) -> Iterator[Actor]:
        """The copies of an actor on all ranks of its class."""
        number, homes = self.actors[actor.id], self.sent_to.get(actor.id)
        operands, targets = self.from_copies(actor.operands), self.from_copies(actor.targets)
        for k, rank in enumerate(self.classes[actor.rank]):
            home = k if homes is None else self.place[homes[rank]]
            comm = self.comm(actor, rank)
            if rank == actor.rank:
                name, queue, body = actor.name, actor.queue, actor.body
            else:
                (name, queue), body = self.named(actor, rank), self.body(actor, rank)
            yield Actor(
                number + k, name, rank, queue, actor.kind, actor.rate, body,
                tuple([FromRegister(o[0] + k, o[1]) if type(o) is tuple else o for o in operands]),
                tuple([FromRegister(t[0] + home, t[1]) if type(t) is tuple else t for t in targets]),
                comm, actor.flops, actor.stage, actor.workspace, actor.flops_dtype, actor.traffic,
                actor.fused_traffic,
            )  # fmt: skip

    def from_copies(self, places: Sequence[Operand | Target]) -> list[Any]:
        """Operands or targets; for a tensor of a register the number of the first copy of that, and the index."""
        return [(self.registers[p.register], p.index) if isinstance(p, FromRegister) else p for p in places]

    def named(self, actor: Actor, rank: int) -> tuple[str, str]:
        """Name and queue of an actor's copy; of the listed one they end in ranks, as ``cut.py`` makes them."""
        if isinstance(actor.comm, Send):
            to = self.sent_to[actor.id][rank]
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
        comm = actor.comm
        if comm is None:
            return None
        if rank == actor.rank:
            return self.numbered(comm, comm.ranks, comm.exchanges if isinstance(comm, Collective) else ())
        of_class = self.of_class.get(actor.id)
        if not isinstance(of_class, CommOfClass):
            raise UnlikeError
        ranks = of_class.ranks(rank)
        if isinstance(comm, Collective) and (len(ranks) != len(comm.ranks) or rank not in ranks):
            raise UnlikeError
        return self.numbered(comm, ranks, of_class.exchanges(rank))

    def numbered(self, comm: Comm, ranks: tuple[int, ...], exchanges: tuple[Exchange, ...]) -> Comm:
        """A communication of these ranks, with a number of its own, which the members of a collective share."""
        ranks = self.groups.setdefault(ranks, ranks)
        number = self.collectives.setdefault((comm.id, id(ranks)), len(self.collectives))
        if isinstance(comm, Send):
            return Send(number, ranks[0], ranks[1], comm.plane)
        return Collective(comm.kind, number, ranks, exchanges, comm.plane)

    def registers_like(self, register: Register) -> Iterator[Register]:
        """The copies of a register, whose slots are on the ranks of a class."""
        number, producer = self.registers[register.id], self.actors[register.producer]
        makers = self.senders.get(register.producer)
        readers = [(self.actors[read.actor], read.firings) for read in register.readers]
        for k, rank in enumerate(self.classes[self.home[register.id]]):
            yield Register(
                number + k,
                producer + (k if makers is None else self.place[makers[rank]]),
                tuple([Read(first + k, firings) for first, firings in readers]),
                register.tensors,
                register.slots,
                register.initial,
                register.fill,
            )

    def orders(self, orders: Sequence[Order], actors: Sequence[Actor]) -> tuple[Order, ...]:
        """The orders of all ranks."""
        found = []
        for order in orders:
            first = [self.actors[actor] for actor in order.actors]
            for k, rank in enumerate(self.classes[order.rank]):
                mine = tuple([number + k for number in first])
                found.append(Order(rank, actors[mine[0]].queue if mine else order.queue, mine))
        return tuple(sorted(found, key=lambda o: (o.rank, o.queue)))

    def origins(self, origins: Origins) -> Origins:
        """The origins, with the steps of all actors."""
        copies = {a.id: len(self.classes[a.rank]) for a in self.plan.actors}
        steps = [
            StepsOf(self.actors[one.actor] + k, one.places) for one in origins.steps for k in range(copies[one.actor])
        ]
        return replace(origins, steps=tuple(steps))
