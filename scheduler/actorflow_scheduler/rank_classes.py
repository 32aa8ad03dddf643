"""A plan and the time of each actor enter; the plan of one rank of each class of alike ranks leaves.

Ranks are alike if their actors, registers and orders are, one by one, and so are the ranks at the
other ends of their sends and collectives (colour refinement).  With frozen orders alike ranks then do
the same at the same times, so that one stands for all, whatever their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow_compiler.plan.plan import Actor, Comm, Order, Plan
from actorflow_scheduler.cost import Durations, variable_bytes


@dataclass(frozen=True, slots=True)
class FoldedPlan:
    """A plan that lists the actors of one rank of each class (``plan.ranks``).

    Sends go to listed ranks; the groups of collectives name all their ranks, listed or not.
    """

    plan: Plan
    alike: Mapping[int, Sequence[int]]  # listed rank → the ranks that it stands for, with itself


def fold(plan: Plan | FoldedPlan, times: Durations) -> FoldedPlan:
    """List only one rank, the lowest, of each class; ``times`` says how long each actor's firing lasts."""
    given = plan if isinstance(plan, FoldedPlan) else FoldedPlan(plan, {a.rank: (a.rank,) for a in plan.actors})
    ranks = _Ranks(given.plan, times)
    classes: dict[int, list[int]] = {}
    for rank, colour in sorted(ranks.refined().items()):
        classes.setdefault(colour, []).append(rank)
    if len(classes) == len(ranks.actors):
        return given
    return FoldedPlan(
        ranks.only({members[0]: members for members in classes.values()}),
        {members[0]: sorted(r for m in members for r in given.alike[m]) for members in classes.values()},
    )


def unfold(plan: Plan, folded: FoldedPlan) -> Plan:
    """The whole plan with the slots and orders that were found for one rank of each class.

    An order of the listed ranks that is part of one topological order of all their firings is, for all
    ranks, part of one too: whatever waits in the whole plan waits in the folded one.
    """
    first = {rank: listed for listed, ranks in folded.alike.items() for rank in ranks}
    actors = _by_rank((a.rank, a.id) for a in plan.actors)
    registers = _by_rank((plan.home(r), r.id) for r in plan.registers)
    slots: dict[int, int] = {}
    orders: list[Order] = []
    found = {rank: [o for o in folded.plan.orders if o.rank == rank] for rank in folded.alike}
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


class _Ranks:
    """What of each rank is compared, and the colours that the ranks have."""

    def __init__(self, plan: Plan, times: Durations) -> None:
        self.plan = plan
        self.actors: dict[int, list[Actor]] = {}
        self.place: dict[int, int] = {}  # actor → its place among its rank's actors
        self.members: dict[int, list[Actor]] = {}  # collective → its actors
        self.filled: dict[int, list[tuple[int, int]]] = {}  # rank → (sender, register) of the registers filled remotely
        self.at: dict[int, int] = {}  # register → its place among the registers of its home
        for a in plan.actors:
            mine = self.actors.setdefault(a.rank, [])
            self.place[a.id] = len(mine)
            mine.append(a)
            if a.comm is not None and a.comm.kind != "send":
                self.members.setdefault(a.comm.id, []).append(a)
        looks: dict[int, list[Hashable]] = {rank: [] for rank in self.actors}
        self.home = {r.id: plan.home(r) for r in plan.registers}
        for rank, nbytes in variable_bytes(plan).items():
            looks[rank].append(nbytes)
        for rank, actors in self.actors.items():
            queue = {name: i for i, name in enumerate(dict.fromkeys(a.queue for a in actors))}
            looks[rank] += [
                (
                    (a.kind, a.stage, a.rate, queue[a.queue], a.momentary, a.comm and a.comm.kind),
                    (times.firing[a.id], times.way.get(a.id, 0)),
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
            looks[rank] += sorted(of_queues)  # the names of queues, which name other ranks, do not matter
        self.colours = _numbered({rank: tuple(look) for rank, look in looks.items()})

    def refined(self) -> dict[int, int]:
        """Rank → its class: alike ranks have alike peers."""
        count = 0
        while count < (now := len(set(self.colours.values()))):
            count = now
            meetings = self.meetings()
            self.colours = _numbered({rank: self.with_peers(rank, meetings) for rank in self.actors})
        return self.colours

    def meetings(self) -> dict[int, Hashable]:
        """Collective → the classes and places of its members."""
        colours, place = self.colours, self.place
        return {
            id: tuple(sorted(Counter((colours[a.rank], place[a.id]) for a in members).items()))
            for id, members in self.members.items()
        }

    def with_peers(self, rank: int, meetings: Mapping[int, Hashable]) -> Hashable:
        colours = self.colours
        sent: list[Hashable] = []
        for a in self.actors[rank]:
            if a.comm is not None:
                if a.comm.kind != "send":
                    sent.append(meetings[a.comm.id])
                else:
                    sent += [(colours[self.home[r.id]], self.at[r.id]) for r in self.plan.outputs_of[a.id]]
        came = [(colours[self.plan.actor(s).rank], self.place[s]) for s, _ in self.filled.get(rank, ())]
        return colours[rank], tuple(sent), tuple(came)

    def only(self, alike: Mapping[int, Sequence[int]]) -> Plan:
        """The plan of these ranks, one of each class, joined as all ranks of their classes are."""
        first = {rank: members[0] for members in alike.values() for rank in members}
        meetings = self.meetings()
        number = {meeting: i for i, meeting in enumerate(dict.fromkeys(meetings.values()))}

        def comm(comm: Comm) -> Comm:
            if comm.kind == "send":
                return replace(comm, group=(comm.group[0], first[comm.group[1]]))
            return replace(comm, id=number[meetings[comm.id]])

        def producer(register: int, sender: Actor) -> int:
            if self.home[register] == sender.rank:
                return sender.id
            return self.actors[first[sender.rank]][self.place[sender.id]].id

        plan = self.plan
        return replace(
            plan,
            actors=tuple(
                a if a.comm is None else replace(a, comm=comm(a.comm)) for a in plan.actors if a.rank in alike
            ),
            registers=tuple(
                replace(r, producer=producer(r.id, plan.actor(r.producer)))
                for r in plan.registers
                if self.home[r.id] in alike
            ),
            orders=tuple(o for o in plan.orders if o.rank in alike),
            ranks=tuple(sorted(alike)),
        )


def _numbered(looks: Mapping[int, Hashable]) -> dict[int, int]:
    """A number for each different look."""
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(look, len(numbers)) for rank, look in looks.items()}
