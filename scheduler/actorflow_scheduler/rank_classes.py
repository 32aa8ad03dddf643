"""Group the ranks of a plan into classes that do the same work, and fold the plan to one rank of each class.

Ranks are of one class if their actors, registers and orders are equal one by one, and the ranks at the other ends of
their sends and collectives are of the same classes (colour refinement).  With frozen orders, the ranks of a class do
the same work at the same times, so that simulating one of them is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import Actor, Collective, Comm, FromRegister, Order, Plan, Send, Target
from actorflow_scheduler.cost import Durations, moved_bytes, variable_bytes

__all__ = ["FoldedPlan", "every_rank", "fold", "with_orders_of"]


def every_rank(plan: Plan) -> FoldedPlan:
    """A plan in which each rank is a class of its own."""
    return FoldedPlan(plan, {a.rank: (a.rank,) for a in plan.actors})


def fold(plan: Plan | FoldedPlan, times: Durations) -> FoldedPlan:
    """Fold a plan to the lowest rank of each class; ranks whose actors differ in ``times`` are in different classes."""
    given = plan if isinstance(plan, FoldedPlan) else every_rank(plan)
    ranks = _Ranks(given, times)
    classes: dict[int, list[int]] = {}
    for rank, colour in sorted(ranks.refined().items()):
        classes.setdefault(colour, []).append(rank)
    if len(classes) == len(ranks.actors):
        return given
    return FoldedPlan(
        ranks.only({members[0]: members for members in classes.values()}),
        {members[0]: sorted(r for m in members for r in given.rank_classes[m]) for members in classes.values()},
        spots=given.spots,
        partners=given.partners,
    )


def with_orders_of(plan: Plan, folded: FoldedPlan) -> Plan:
    """Give a plan the slots and orders that were found for it when it was folded further.

    If the orders of the listed ranks are parts of one topological order of their firings, so are the orders of all
    ranks: every dependency in the whole plan has a counterpart in the folded one.
    """
    actors = _by_rank((a.rank, a.id) for a in plan.actors)
    first = {rank: listed for listed, ranks in folded.rank_classes.items() for rank in ranks if rank in actors}
    registers = _by_rank((plan.home(r), r.id) for r in plan.registers)
    slots: dict[int, int] = {}
    orders: list[Order] = []
    found = {rank: [o for o in folded.plan.orders if o.rank == rank] for rank in folded.rank_classes}
    for rank, listed in sorted(first.items()):
        for r, of in zip(registers.get(rank, ()), registers.get(listed, ()), strict=True):
            slots[r] = folded.plan.register(of).slots
        mine = dict(zip(actors[listed], actors[rank], strict=True))
        queue = {a: plan.actor(mine[a]).queue for a in mine}
        orders += [Order(rank, queue[o.actors[0]], tuple(mine[a] for a in o.actors)) for o in found[listed]]
    orders.sort(key=lambda o: (o.rank, o.queue))
    return replace(
        plan,
        registers=tuple(replace(r, slots=slots[r.id]) for r in plan.registers),
        orders=tuple(orders),
        notes=folded.plan.notes,
    )


def _by_rank(found: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = {}
    for rank, number in found:
        ranks.setdefault(rank, []).append(number)
    return ranks


class _Members:
    """How many ranks of a group each listed rank stands for."""

    def __init__(self, folded: FoldedPlan) -> None:
        self.first = {rank: listed for listed, ranks in folded.rank_classes.items() for rank in ranks}
        self.counts: dict[int, tuple[tuple[int, ...], Counter[int]]] = {}  # id of a group → it, listed rank → ranks
        self.folds = len(self.first) > len(folded.rank_classes)

    def __call__(self, rank: int, group: tuple[int, ...]) -> int:
        if not self.folds:
            return 1
        if id(group) not in self.counts:
            self.counts[id(group)] = group, Counter(self.first.get(r, r) for r in group)
        return self.counts[id(group)][1][rank]


class _Ranks:
    """The colour refinement: compares the ranks of a plan, and keeps the colours (classes) that they have so far."""

    def __init__(self, folded: FoldedPlan, times: Durations) -> None:
        plan = folded.plan
        self.plan = plan
        self.actors: dict[int, list[Actor]] = {}
        self.place: dict[int, int] = {}  # actor → its index among its rank's actors
        self.members: dict[int, list[tuple[Actor, int]]] = {}  # collective → its actors, and how many each stands for
        self.filled: dict[int, list[tuple[int, int]]] = {}  # rank → (sender, register) of the registers filled remotely
        self.at: dict[int, int] = {}  # register → its index in ``looks`` of its home rank
        stands_for = _Members(folded)
        for a in plan.actors:
            mine = self.actors.setdefault(a.rank, [])
            self.place[a.id] = len(mine)
            mine.append(a)
            if isinstance(a.comm, Collective):
                self.members.setdefault(a.comm.id, []).append((a, stands_for(a.rank, a.comm.ranks)))
        looks: dict[int, list[Hashable]] = {rank: [] for rank in self.actors}
        self.home = {r.id: plan.home(r) for r in plan.registers}
        for rank, nbytes in variable_bytes(plan).items():
            looks[rank].append(nbytes)
        for rank, actors in self.actors.items():
            queue = {name: i for i, name in enumerate(dict.fromkeys(a.queue for a in actors))}
            looks[rank] += [
                (
                    (a.kind, a.stage, a.rate, queue[a.queue], a.workspace),
                    (a.comm and a.comm.label, moved_bytes(plan, a)),  # times are rounded, bytes are not
                    (times.firing[a.id], times.latency.get(a.id, 0)),
                )
                for a in actors
            ]
        for r in plan.registers:
            home, producer = self.home[r.id], plan.actor(r.producer)
            self.at[r.id] = len(looks[home])
            local = producer.rank == home
            reads = tuple((self.place[read.actor], read.firings) for read in r.readers)
            looks[home].append((self.place[r.producer] if local else -1, reads, r.slots, r.initial, r.fill, r.nbytes))
            if not local:
                self.filled.setdefault(home, []).append((r.producer, r.id))
        orders: dict[int, list[tuple[int, ...]]] = {}
        for order in plan.orders:
            orders.setdefault(order.rank, []).append(tuple(self.place[a] for a in order.actors))
        for rank, of_queues in orders.items():
            looks[rank] += sorted(of_queues)  # without the queues' names, which contain the numbers of other ranks
        self.colours = _numbered({rank: tuple(look) for rank, look in looks.items()})

    def refined(self) -> dict[int, int]:
        """Split classes until ranks of one class have peers of equal classes; return rank → number of its class."""
        count = 0
        while count < (now := len(set(self.colours.values()))):
            count = now
            collectives = self.collectives()
            self.colours = _numbered({rank: self.with_peers(rank, collectives) for rank in self.actors})
        return self.colours

    def collectives(self) -> dict[int, Hashable]:
        """Collective → how many members it has of each class and place; equal for equal collectives."""
        colours, place = self.colours, self.place
        found: dict[int, Hashable] = {}
        for id, members in self.members.items():
            count: Counter[tuple[int, int]] = Counter()
            for a, ranks in members:
                count[colours[a.rank], place[a.id]] += ranks
            found[id] = tuple(sorted(count.items()))
        return found

    def with_peers(self, rank: int, collectives: Mapping[int, Hashable]) -> Hashable:
        """A rank's colour with the colours of the ranks at the other ends of its sends, receives and collectives."""
        colours = self.colours
        sent: list[Hashable] = []
        for a in self.actors[rank]:
            if a.comm is not None:
                if isinstance(a.comm, Collective):
                    sent.append(collectives[a.comm.id])
                else:
                    sent += [(colours[self.home[r.id]], self.at[r.id]) for r in self.plan.outputs_of[a.id]]
        came = [(colours[self.plan.actor(s).rank], self.place[s]) for s, _ in self.filled.get(rank, ())]
        return colours[rank], tuple(sent), tuple(came)

    def only(self, classes: Mapping[int, Sequence[int]]) -> Plan:
        """The plan of the first rank of each class, with sends and collectives redirected to the first ranks."""
        first = {rank: members[0] for members in classes.values() for rank in members}
        collectives = self.collectives()
        number = {members: i for i, members in enumerate(dict.fromkeys(collectives.values()))}

        def comm(comm: Comm) -> Comm:
            if isinstance(comm, Send):
                return replace(comm, to_rank=first[comm.to_rank])
            return replace(comm, id=number[collectives[comm.id]])

        counterpart = {(self.home[r], at): r for r, at in self.at.items()}

        def target(target: Target) -> Target:  # of a send, whose register is on another rank
            if not isinstance(target, FromRegister):
                return target
            register = target.register
            return replace(target, register=counterpart[first[self.home[register]], self.at[register]])

        def actor(a: Actor) -> Actor:
            targets = tuple(map(target, a.targets)) if isinstance(a.comm, Send) else a.targets
            return a if a.comm is None else replace(a, comm=comm(a.comm), targets=targets)

        def producer(register: int, sender: Actor) -> int:
            if self.home[register] == sender.rank:
                return sender.id
            return self.actors[first[sender.rank]][self.place[sender.id]].id

        plan = self.plan
        return replace(
            plan,
            actors=tuple(actor(a) for a in plan.actors if a.rank in classes),
            registers=tuple(
                replace(r, producer=producer(r.id, plan.actor(r.producer)))
                for r in plan.registers
                if self.home[r.id] in classes
            ),
            orders=tuple(o for o in plan.orders if o.rank in classes),
            ranks=tuple(sorted(classes)),
        )


def _numbered(looks: Mapping[int, Hashable]) -> dict[int, int]:
    """Number the distinct values: rank → a number, equal for equal values."""
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(look, len(numbers)) for rank, look in looks.items()}
