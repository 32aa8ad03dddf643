"""The firings of one iteration as a dependency graph, and a list scheduler that orders them.

A firing depends on those that make what it reads.  The members of a collective are one node.  Free slots are no
dependency, except for registers with initial tokens: the others get their slot counts after the order is known
(``slots.py``).

Any wish about the order (a published schedule, a limit on the micro-batches in flight) is expressed as additional
edges.  The list scheduler finds when each firing starts; sorted by start, they are one topological order of the whole
iteration, and each queue gets its part of it.  Therefore no two queues, on whatever ranks, can wait for each other,
and all members of a group issue their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.plan.plan import Collective, Order, Plan, Register
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.events import Wait, WaitReason, deadlock
from actorflow_scheduler.wait_graph import shortest_cycle

Dependency = tuple[int, int]  # a firing, one that needs it
DistantDependency = tuple[int, int, int]  # the same, and how many iterations earlier the first one is
NodeWait = tuple[int, Wait]  # a node that another one waits for, and the reason


@dataclass(frozen=True, slots=True)
class IterationOrder:
    """An order of all firings of an iteration, as the list scheduler found it."""

    orders: tuple[Order, ...]  # of the queues
    nodes: tuple[int, ...]  # in the order in which they start
    starts: tuple[int, ...]  # node → nanoseconds


class IterationGraph:
    """The firings of one iteration and what they need of each other.

    Firing n of actor a is node ``first[a] + n``; members of a collective share their nodes.
    """

    def __init__(self, plan: Plan, times: Durations) -> None:
        self.plan = plan
        self.times = times
        self.first: dict[int, int] = {}  # actor → the node of its first firing
        self.members: list[tuple[int, ...]] = []  # node → the actors that fire
        self.firing: list[int] = []  # node → number of the firing in the iteration
        self.durations: list[int] = []  # node → nanoseconds
        self.latency: list[int] = []  # node → nanoseconds from its end until what it sends has arrived
        self.queues: list[tuple[int, ...]] = []  # node → the queues that it occupies
        self.is_comm: list[bool] = []  # node → whether it communicates
        self.names = sorted({(a.rank, a.queue) for a in plan.actors})  # of the queues
        self._add_nodes()
        self.needs = self._dependencies()  # node → the nodes of this iteration that it waits for
        self.missing = [len(needs) for needs in self.needs]  # node → how many these are
        self.feeds: list[list[int]] = [[] for _ in self.members]  # node → the nodes that wait for its end …
        self.fetch: list[list[int]] = [[] for _ in self.members]  # … and those that wait for what it sends to arrive
        for node, needs in enumerate(self.needs):
            for need in needs:
                sent = self.latency[need] and self.members[need] != self.members[node]
                (self.fetch if sent else self.feeds)[need].append(node)

    def _add_nodes(self) -> None:
        plan, times = self.plan, self.times
        number = {queue: i for i, queue in enumerate(self.names)}
        collectives: dict[int, list[int]] = {}
        for a in plan.actors:
            if isinstance(a.comm, Collective):
                collectives.setdefault(a.comm.id, []).append(a.id)
        for a in plan.actors:
            if a.id in self.first:
                continue
            members = tuple(collectives[a.comm.id]) if isinstance(a.comm, Collective) else (a.id,)
            self.first |= dict.fromkeys(members, len(self.members))
            actors = [plan.actor(m) for m in members]
            self.members += [members] * a.rate
            self.firing += range(a.rate)
            self.durations += [max(times.firing[m] for m in members)] * a.rate
            self.latency += [times.latency.get(a.id, 0)] * a.rate
            self.is_comm += [a.comm is not None] * a.rate
            self.queues += [tuple(number[m.rank, m.queue] for m in actors)] * a.rate

    def _dependencies(self) -> list[list[int]]:
        needs: list[list[int]] = [[] for _ in self.members]
        for a in self.plan.actors:
            base = self.first[a.id]
            for node in range(base + 1, base + a.rate):
                needs[node].append(node - 1)
        for register in self.plan.registers:
            for u, v, distance in self.edges(register):
                if not distance:
                    needs[v].append(u)
            if register.initial:
                for u, v, distance in self.credits(register, register.slots):
                    if not distance:
                        needs[v].append(u)
        return [list(dict.fromkeys(of_node)) for of_node in needs]

    def edges(self, register: Register) -> Iterable[DistantDependency]:
        """The firings that complete a register's tokens, and those that read them."""
        made, fill = self.first[register.producer], register.fill
        rate = self.plan.actor(register.producer).rate
        for read in register.readers:
            base = self.first[read.actor]
            for token in range(rate // fill):
                later, last = divmod((token - register.initial + 1) * fill - 1, rate)
                yield made + last, base + token * read.firings, -later

    def credits(self, register: Register, slots: int) -> Iterable[DistantDependency]:
        """The firings that free a register's slots, and those that take them for new tokens."""
        made, fill = self.first[register.producer], register.fill
        tokens = self.plan.actor(register.producer).rate // fill
        for read in register.readers:
            base, rate = self.first[read.actor], tokens * read.firings
            for token in range(tokens):
                later, last = divmod((token + register.initial - slots + 1) * read.firings - 1, rate)
                yield base + last, made + token * fill, -later

    def run(
        self, keys: Sequence[int], edges: Iterable[Dependency] = (), patience: float = 0.0
    ) -> IterationOrder | None:
        """Order the firings by list scheduling: a free queue takes the ready firing with the least key.

        Of several with that key it takes the one that became ready first.  With ``patience`` a queue stays idle for a
        firing with a lesser key that is known to become ready soon: within this fraction of the time that the ready
        one takes.  ``edges`` are further dependencies.  Returns None if they form a cycle; raises DeadlockError if
        the plan's own registers do.
        """
        scheduler = _ListScheduler(self, keys, edges, patience)
        found = scheduler.run()
        if found is None and not edges:
            raise self._deadlock(scheduler.starts)
        return found

    def ready(self, node: int, starts: Sequence[int]) -> int:
        """The instant at which a firing has all it needs of other firings, given their starts."""
        return max((starts[n] + self.durations[n] + self.latency[n] for n in self.needs[node]), default=0)

    def orders(self, nodes: Iterable[int]) -> tuple[Order, ...]:
        """Each queue's part of an order of all firings."""
        queues: list[list[int]] = [[] for _ in self.names]
        for node in nodes:
            for actor, queue in zip(self.members[node], self.queues[node], strict=True):
                queues[queue].append(actor)
        return tuple(Order(*name, tuple(ids)) for name, ids in zip(self.names, queues, strict=True))

    def _deadlock(self, starts: Sequence[int]) -> DeadlockError:
        """The error for firings that never start.

        It lists only those that wait for a register, not those that wait just for an earlier firing of their actor.
        """
        waits = self._register_waits(starts)
        node = next(iter(waits), -1)
        path: dict[int, int] = {}  # node → the node that it waits for, directly or through earlier firings of its actor
        while node in waits and node not in path:
            then = waits[node][0]
            while then not in waits and self.firing[then]:
                then -= 1  # it waits for the firing before it
            path[node] = then
            node = then
        cycle = shortest_cycle({node: (then,) for node, then in path.items()})
        return deadlock(self.plan, [waits[node][1] for node in cycle or path], bool(cycle))

    def _register_waits(self, starts: Sequence[int]) -> dict[int, NodeWait]:
        """Node that never starts → a node that it waits for because of a register."""
        waits: dict[int, NodeWait] = {}
        for r in self.plan.registers:
            readers = tuple(read.actor for read in r.readers)
            for u, v, distance in self.edges(r):
                if starts[u] < 0 and starts[v] < 0 and not distance:
                    reader = next(a for a in readers if a in self.members[v])
                    waits.setdefault(v, (u, Wait(reader, WaitReason.EMPTY, r.id, (r.producer,))))
            for u, v, distance in self.credits(r, r.slots) if r.initial else ():
                if starts[u] < 0 and starts[v] < 0 and not distance:
                    waits.setdefault(v, (u, Wait(r.producer, WaitReason.FULL, r.id, readers)))
        return waits


class _ListScheduler:
    """One run of the list scheduler, an event simulation; see ``IterationGraph.run``."""

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
        self.count = 0  # of heap entries so far: of those with equal keys or instants the earlier comes first
        self.idle = [True] * len(graph.names)  # of the queues
        self.ready: list[list[tuple[int, int, int]]] = [[] for _ in graph.names]  # queue → heap of (key, count, node)
        self.starts = [-1] * len(graph.members)  # node → instant; -1: not started
        self.nodes: list[int] = []  # in the order in which they started
        # heap of (instant, count, what happens): a node ends; len(nodes) + node: what it sent arrives;
        # -1 - queue: a queue stops being patient
        self.events: list[tuple[int, int, int]] = []
        self.touched: dict[int, None] = {}  # queues that may be able to start a firing now
        # only with patience:
        self.unknown = self.missing.copy() if patience else []  # node → its needs whose ends are not known yet
        self.expected = [0] * len(graph.members) if patience else []  # node → when it is ready, as far as is known
        self.end_known: set[int] = set()  # nodes
        self.upcoming: list[list[tuple[int, int]]] = [
            [] for _ in graph.names
        ]  # queue → heap of (key, node to be ready)

    def run(self) -> IterationOrder | None:
        """Start and end all firings; None if some can never start."""
        for node, needed in enumerate(self.missing):
            if not needed:
                self.offer(node)
        touched, idle, ready = self.touched, self.idle, self.ready
        while True:
            for queue in touched:
                if idle[queue] and ready[queue]:
                    self.start_on(queue)
            touched.clear()
            if not self.events:
                break
            self.advance()
        if len(self.nodes) < len(self.missing):
            return None
        return IterationOrder(self.graph.orders(self.nodes), tuple(self.nodes), tuple(self.starts))

    def offer(self, node: int) -> None:
        """A firing is ready: its queues may take it."""
        self.count += 1
        entry = self.keys[node], self.count, node
        for queue in self.graph.queues[node]:
            heappush(self.ready[queue], entry)
            self.touched[queue] = None

    def start_on(self, queue: int) -> None:
        """Start the best ready firing of an idle queue, unless the queue is patient or the firing's queues are busy."""
        offers, queues, starts, idle = self.ready[queue], self.graph.queues, self.starts, self.idle
        blocked: list[tuple[int, int, int]] = []  # collectives of which another queue is busy
        while offers:
            key, _, node = offers[0]
            if starts[node] >= 0:
                heappop(offers)
            elif len(queues[node]) > 1 and not all(idle[q] for q in queues[node]):
                blocked.append(heappop(offers))
            else:
                self.count += 1
                if self.patience and (until := self.worth_waiting(queue, key, node)):
                    heappush(self.events, (until, self.count, -1 - queue))
                    break
                heappop(offers)
                end = self.now + self.graph.durations[node]
                starts[node] = self.now
                self.nodes.append(node)
                heappush(self.events, (end, self.count, node))
                for q in queues[node]:
                    idle[q] = False
                if self.patience and node not in self.end_known:
                    self.expect(node, end)
                break
        for entry in blocked:
            heappush(offers, entry)

    def advance(self) -> None:
        """Go to the next instant at which something happens, and let all of it happen."""
        graph, events, missing, idle, touched = self.graph, self.events, self.missing, self.idle, self.touched
        now, size = events[0][0], len(missing)
        self.now = now
        while events and events[0][0] == now:
            node = heappop(events)[2]
            if node < 0:
                touched[-1 - node] = None
                continue
            if node >= size:
                fed = graph.fetch[node - size]
            else:
                fed = self.feeds[node]
                for queue in graph.queues[node]:
                    idle[queue] = True
                    touched[queue] = None
                if graph.fetch[node]:
                    self.count += 1
                    heappush(events, (now + graph.latency[node], self.count, size + node))
            for after in fed:
                missing[after] -= 1
                if not missing[after]:
                    self.offer(after)

    def expect(self, node: int, end: int) -> None:
        """Note when a node ends, and with it when its dependents become ready.

        Communication among them is taken to start as soon as it is ready.
        """
        graph = self.graph
        self.end_known.add(node)
        for after in (*self.feeds[node], *graph.fetch[node]):
            self.unknown[after] -= 1
            arrival = end + (graph.latency[node] if graph.members[after] != graph.members[node] else 0)
            self.expected[after] = max(self.expected[after], arrival)
            if not self.unknown[after]:
                if graph.is_comm[after]:
                    self.expect(after, self.expected[after] + graph.durations[after])
                else:
                    for queue in graph.queues[after]:
                        heappush(self.upcoming[queue], (self.keys[after], after))

    def worth_waiting(self, queue: int, key: int, node: int) -> int:
        """The instant at which a firing with a lesser key than the ready one's becomes ready soon; 0 for none."""
        upcoming = self.upcoming[queue]
        limit = self.now + self.patience * self.graph.durations[node]
        while upcoming and self.starts[upcoming[0][1]] >= 0:
            heappop(upcoming)
        for other, node in upcoming:
            if other < key and self.now < self.expected[node] < limit and self.starts[node] < 0:
                return self.expected[node]
        return 0
