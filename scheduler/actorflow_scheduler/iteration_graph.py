"""A plan and the time of each actor enter; the firings of one iteration as a graph leave, and the orders it can take.

A firing needs those that make what it reads.  Registers without initial tokens hold it back nowhere:
how many slots they get is decided when the order is (``slots.py``).  Members of a collective are one
firing.  Whatever order is asked for (a published one, a limit on the pieces that are in flight) is
more edges of the graph; a list scheduler finds when each firing starts, and the order in which they
start is one topological order of the whole iteration.  Each queue gets its part of it: no two queues
can then wait for each other, on whatever ranks, and all members of a group issue their collectives
in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.plan.plan import Order, Plan, Register
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.events import Wait, deadlock
from actorflow_scheduler.wait_graph import shortest_cycle

Dependency = tuple[int, int]  # a firing, one that needs it
DistantDependency = tuple[int, int, int]  # the same, and how many iterations earlier the first one is


@dataclass(frozen=True, slots=True)
class IterationOrder:
    """One way through an iteration."""

    orders: tuple[Order, ...]
    nodes: tuple[int, ...]  # in the order they start
    starts: tuple[int, ...]  # node → nanoseconds


class IterationGraph:
    """The firings of one iteration.

    Firing n of actor a is node ``first[a] + n``; members of a collective share their nodes.
    """

    def __init__(self, plan: Plan, times: Durations) -> None:
        self.plan = plan
        self.times = times
        self.first: dict[int, int] = {}
        self.members: list[tuple[int, ...]] = []  # node → the actors that fire
        self.firing: list[int] = []  # node → number of the firing
        self.lasts: list[int] = []  # node → nanoseconds
        self.way: list[int] = []  # node → nanoseconds from its end until what it sends is there
        self.queues: list[tuple[int, ...]] = []  # node → the queues it takes
        self.is_comm: list[bool] = []  # node → whether it communicates
        self.names = sorted({(a.rank, a.queue) for a in plan.actors})  # of the queues
        number = {queue: i for i, queue in enumerate(self.names)}
        together: dict[int, list[int]] = {}
        for a in plan.actors:
            if a.comm is not None and a.comm.kind != "send":
                together.setdefault(a.comm.id, []).append(a.id)
        for a in plan.actors:
            if a.id in self.first:
                continue
            alone = a.comm is None or a.comm.kind == "send"
            members = (a.id,) if alone or a.comm is None else tuple(together[a.comm.id])
            self.first |= dict.fromkeys(members, len(self.members))
            actors = [plan.actor(m) for m in members]
            self.members += [members] * a.rate
            self.firing += range(a.rate)
            self.lasts += [max(times.firing[m] for m in members)] * a.rate
            self.way += [times.way.get(a.id, 0)] * a.rate
            self.is_comm += [a.comm is not None] * a.rate
            self.queues += [tuple(number[m.rank, m.queue] for m in actors)] * a.rate
        self.needs: list[list[int]] = [[] for _ in self.members]  # node → nodes of this iteration that it waits for
        for a in plan.actors:
            base = self.first[a.id]
            for node in range(base + 1, base + a.rate):
                self.needs[node].append(node - 1)
        for register in plan.registers:
            for u, v, distance in self.edges(register):
                if not distance:
                    self.needs[v].append(u)
            if register.initial:
                for u, v, distance in self.credits(register, register.slots):
                    if not distance:
                        self.needs[v].append(u)
        self.needs = [list(dict.fromkeys(needs)) for needs in self.needs]
        self.missing = [len(needs) for needs in self.needs]
        self.feeds: list[list[int]] = [[] for _ in self.members]  # node → nodes of this iteration that wait for it …
        self.fetch: list[list[int]] = [[] for _ in self.members]  # … and those that wait for what it sends
        for node, needs in enumerate(self.needs):
            for need in needs:
                sent = self.way[need] and self.members[need] != self.members[node]
                (self.fetch if sent else self.feeds)[need].append(node)

    def edges(self, register: Register) -> Iterable[DistantDependency]:
        """The firings that complete a register's tokens, and those that wait for them."""
        made, fill = self.first[register.producer], register.fill
        rate = self.plan.actor(register.producer).rate
        for read in register.readers:
            base = self.first[read.actor]
            for token in range(rate // fill):
                ago, last = divmod((token - register.initial + 1) * fill - 1, rate)
                yield made + last, base + token * read.firings, -ago

    def credits(self, register: Register, slots: int) -> Iterable[DistantDependency]:
        """The firings that let a register's tokens go, and those that need their slots."""
        made, fill = self.first[register.producer], register.fill
        tokens = self.plan.actor(register.producer).rate // fill
        for read in register.readers:
            base, rate = self.first[read.actor], tokens * read.firings
            for token in range(tokens):
                ago, last = divmod((token + register.initial - slots + 1) * read.firings - 1, rate)
                yield base + last, made + token * fill, -ago

    def run(
        self, keys: Sequence[int], edges: Iterable[Dependency] = (), patience: float = 0.0
    ) -> IterationOrder | None:
        """Fire what is ready, on each queue the one with the least key, the one that was ready first of equals.

        With ``patience`` a queue waits for one with a lesser key if that is to come within this
        part of the time that what is ready takes.  None if the edges go in a circle; raises
        DeadlockError if the plan's own registers do.
        """
        run = _ListScheduler(self, keys, edges, patience)
        found = run.run()
        if found is None and not edges:
            raise self.circle(run.starts)
        return found

    def ready(self, node: int, starts: Sequence[int]) -> int:
        """When all is there that a firing needs of other actors."""
        return max((starts[n] + self.lasts[n] + self.way[n] for n in self.needs[node]), default=0)

    def orders(self, nodes: Iterable[int]) -> tuple[Order, ...]:
        """Each queue's part of an order of all firings."""
        queues: list[list[int]] = [[] for _ in self.names]
        for node in nodes:
            for actor, queue in zip(self.members[node], self.queues[node], strict=True):
                queues[queue].append(actor)
        return tuple(Order(*name, tuple(ids)) for name, ids in zip(self.names, queues, strict=True))

    def circle(self, starts: Sequence[int]) -> DeadlockError:
        """The error for firings that never start; those that only their queue or such as them hold up are left out."""
        waits: dict[int, tuple[int, Wait]] = {}  # node → one that it waits for, and why
        for r in self.plan.registers:
            readers = tuple(read.actor for read in r.readers)
            for u, v, ago in self.edges(r):
                if starts[u] < 0 and starts[v] < 0 and not ago:
                    reader = next(a for a in readers if a in self.members[v])
                    waits.setdefault(v, (u, Wait(reader, "empty", r.id, (r.producer,))))
            for u, v, ago in self.credits(r, r.slots) if r.initial else ():
                if starts[u] < 0 and starts[v] < 0 and not ago:
                    waits.setdefault(v, (u, Wait(r.producer, "full", r.id, readers)))
        node = next(iter(waits), -1)
        path: dict[int, int] = {}  # node → the next one that waits for more than its queue, if it does
        while node in waits and node not in path:
            then = waits[node][0]
            while then not in waits and self.firing[then]:
                then -= 1  # it waits for the firing before it
            path[node] = then
            node = then
        cycle = shortest_cycle({node: (then,) for node, then in path.items()})
        return deadlock(self.plan, [waits[node][1] for node in cycle or path], bool(cycle))


class _ListScheduler:
    def __init__(
        self, graph: IterationGraph, keys: Sequence[int], edges: Iterable[Dependency], patience: float
    ) -> None:
        self.graph, self.keys, self.patience = graph, keys, patience
        self.missing = graph.missing.copy()
        self.feeds = graph.feeds
        extra: dict[int, list[int]] = {}
        for u, v in edges:
            extra.setdefault(u, []).append(v)
            self.missing[v] += 1
        if extra:
            self.feeds = graph.feeds.copy()
            for u, after in extra.items():
                self.feeds[u] = graph.feeds[u] + after
        self.now = 0
        self.count = 0
        self.idle = [True] * len(graph.names)
        self.ready: list[list[tuple[int, int, int]]] = [[] for _ in graph.names]  # key, count, node
        self.starts = [-1] * len(graph.members)
        self.nodes: list[int] = []
        # when, count, the node that ends; nodes + node: what it sent arrives; -1 - queue: look at a queue again
        self.events: list[tuple[int, int, int]] = []
        self.touched: dict[int, None] = {}
        self.unknown = self.missing.copy() if patience else []  # node → needs of which it is not known when they end
        self.expected = [0] * len(graph.members) if patience else []  # node → when it is ready, as far as is known
        self.told: set[int] = set()  # nodes of which it is known when they end
        self.coming: list[list[tuple[int, int]]] = [[] for _ in graph.names]  # key, node: it is known when it is ready

    def run(self) -> IterationOrder | None:
        graph, missing, ready, touched, idle = self.graph, self.missing, self.ready, self.touched, self.idle
        queues, feeds, keys, lasts, starts = graph.queues, self.feeds, self.keys, graph.lasts, self.starts
        patience, events, nodes, size = self.patience, self.events, self.nodes, len(self.missing)
        count = 0
        for node, needed in enumerate(missing):
            if not needed:
                count += 1
                for queue in queues[node]:
                    heappush(ready[queue], (keys[node], count, node))
                    touched[queue] = None
        while True:
            for queue in touched:
                if not idle[queue]:
                    continue
                offers = ready[queue]
                blocked: list[tuple[int, int, int]] = []  # collectives that another of their queues is busy for
                while offers:
                    key, _, node = offers[0]
                    if starts[node] >= 0:
                        heappop(offers)
                    elif len(queues[node]) > 1 and not all(idle[q] for q in queues[node]):
                        blocked.append(heappop(offers))
                    else:
                        if patience and (again := self.better(queue, key, node)):
                            count += 1
                            heappush(events, (again, count, -1 - queue))
                            break
                        heappop(offers)
                        count += 1
                        starts[node] = self.now
                        nodes.append(node)
                        heappush(events, (self.now + lasts[node], count, node))
                        for q in queues[node]:
                            idle[q] = False
                        if patience and node not in self.told:
                            self.expect(node, self.now + lasts[node])
                        break
                for entry in blocked:
                    heappush(offers, entry)
            touched.clear()
            if not events:
                break
            self.now = events[0][0]
            while events and events[0][0] == self.now:
                node = heappop(events)[2]
                if node < 0:
                    touched[-1 - node] = None
                    continue
                if node >= size:
                    fed = graph.fetch[node - size]
                else:
                    fed = feeds[node]
                    for queue in queues[node]:
                        idle[queue] = True
                        touched[queue] = None
                    if graph.fetch[node]:
                        count += 1
                        heappush(events, (self.now + graph.way[node], count, size + node))
                for after in fed:
                    missing[after] -= 1
                    if not missing[after]:
                        count += 1
                        for queue in queues[after]:
                            heappush(ready[queue], (keys[after], count, after))
                            touched[queue] = None
        if len(nodes) < len(missing):
            return None
        return IterationOrder(graph.orders(nodes), tuple(nodes), tuple(starts))

    def expect(self, node: int, end: int) -> None:
        """Tell those that need a firing when it ends; communication then starts at once, as far as anybody knows."""
        graph = self.graph
        self.told.add(node)
        for after in (*self.feeds[node], *graph.fetch[node]):
            self.unknown[after] -= 1
            there = end + (graph.way[node] if graph.members[after] != graph.members[node] else 0)
            self.expected[after] = max(self.expected[after], there)
            if not self.unknown[after]:
                if graph.is_comm[after]:
                    self.expect(after, self.expected[after] + graph.lasts[after])
                else:
                    for queue in graph.queues[after]:
                        heappush(self.coming[queue], (self.keys[after], after))

    def better(self, queue: int, key: int, node: int) -> int:
        """When something with a lesser key is about to come; 0 if nothing is."""
        coming = self.coming[queue]
        limit = self.now + self.patience * self.graph.lasts[node]
        while coming and self.starts[coming[0][1]] >= 0:
            heappop(coming)
        for other, node in coming:
            if other < key and self.now < self.expected[node] < limit and self.starts[node] < 0:
                return self.expected[node]
        return 0
