"""The firings of one iteration as a dependency graph, and a list scheduler that orders them.

A firing depends on the firings that make the tokens it reads.  The members of a collective are one node.  Free slots
are dependencies only for registers with initial tokens: other registers get their slot counts after the order is
known (``slots.py``).

Constraints on the order (a published schedule, a limit on the micro-batches in flight) are additional edges.  The list
scheduler finds when each firing starts.  Sorted by start, the firings are in a topological order of the whole
iteration, and each queue gets its part of it.  Therefore no two queues, on any ranks, can wait for each other, and all
members of a group issue their collectives in the same order.
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

Dependency = tuple[int, int]  # (a firing, a firing that needs it)
DistantDependency = tuple[int, int, int]  # the same, and how many iterations before the second the first one is
NodeWait = tuple[int, Wait]  # (the node that a node waits for, the reason)


@dataclass(frozen=True, slots=True)
class IterationOrder:
    """An order of all firings of an iteration, found by the list scheduler."""

    orders: tuple[Order, ...]  # the order of each queue
    nodes: tuple[int, ...]  # all nodes in the order in which they start
    starts: tuple[int, ...]  # node → when it starts, in nanoseconds


class IterationGraph:
    """The firings of one iteration and their dependencies.

    Firing n of actor a is node ``first[a] + n``; members of a collective share their nodes.
    """

    def __init__(self, plan: Plan, times: Durations) -> None:
        self.plan = plan
        self.times = times
        self.first: dict[int, int] = {}  # actor → the node of its first firing
        self.members: list[tuple[int, ...]] = []  # node → the actors that fire in it
        self.firing: list[int] = []  # node → number of the firing in the iteration
        self.durations: list[int] = []  # node → nanoseconds
        self.latency: list[int] = []  # node → nanoseconds from its end until the token that it sends arrives
        self.queues: list[tuple[int, ...]] = []  # node → the queues that it occupies
        self.is_comm: list[bool] = []  # node → whether it communicates
        self.names = sorted({(a.rank, a.queue) for a in plan.actors})  # the queues: (rank, name)
        self._add_nodes()
        self.needs = self._dependencies()  # node → the nodes of this iteration that it waits for
        self.missing = [len(needs) for needs in self.needs]  # node → how many nodes it waits for
        self.feeds: list[list[int]] = [[] for _ in self.members]  # node → the nodes that wait for its end …
        self.fetch: list[list[int]] = [[] for _ in self.members]  # … and those that wait for the token that it sends
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
        """Dependencies of the firings that read a register's tokens on those that complete the tokens."""
        made, fill = self.first[register.producer], register.fill
        rate = self.plan.actor(register.producer).rate
        for read in register.readers:
            base = self.first[read.actor]
            for token in range(rate // fill):
                later, last = divmod((token - register.initial + 1) * fill - 1, rate)
                yield made + last, base + token * read.firings, -later

    def credits(self, register: Register, slots: int) -> Iterable[DistantDependency]:
        """Dependencies of the firings that take a register's slots on those that free the slots."""
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
        """Order the firings by list scheduling: an idle queue takes the ready firing with the smallest key.

        Of several with that key it takes the firing that became ready first.  With ``patience``, a queue stays idle if
        a firing with a smaller key is known to become ready soon: within this fraction of the duration of the ready
        firing.  ``edges`` are additional dependencies.  Returns None if these form a cycle; raises DeadlockError if the
        plan's own registers do.
        """
        scheduler = _ListScheduler(self, keys, edges, patience)
        found = scheduler.run()
        if found is None and not edges:
            raise self._deadlock(scheduler.starts)
        return found

    def ready(self, node: int, starts: Sequence[int]) -> int:
        """When a firing has all tokens and slots that it needs, in nanoseconds, given the starts of all nodes."""
        return max((starts[n] + self.durations[n] + self.latency[n] for n in self.needs[node]), default=0)

    def orders(self, nodes: Iterable[int]) -> tuple[Order, ...]:
        """The order of each queue, from an order of all firings."""
        queues: list[list[int]] = [[] for _ in self.names]
        for node in nodes:
            for actor, queue in zip(self.members[node], self.queues[node], strict=True):
                queues[queue].append(actor)
        return tuple(Order(*name, tuple(ids)) for name, ids in zip(self.names, queues, strict=True))

    def _deadlock(self, starts: Sequence[int]) -> DeadlockError:
        """The error for firings that never start.

        It lists only firings that wait for a register, not those that wait only for an earlier firing of their actor.
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
        """For each node that never starts because of a register: the node that it waits for, and the reason."""
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
        self.count = 0  # number of heap entries so far, which breaks ties: the earlier entry comes first
        self.idle = [True] * len(graph.names)  # queue → whether it runs nothing
        self.ready: list[list[tuple[int, int, int]]] = [[] for _ in graph.names]  # queue → heap of (key, count, node)
        self.starts = [-1] * len(graph.members)  # node → instant; -1: not started
        self.nodes: list[int] = []  # nodes that have started, in order
        # heap of (instant, count, event); the event is node: it ends; number of nodes + node: the token that it sent
        # arrives; -1 - queue: the queue stops being patient
        self.events: list[tuple[int, int, int]] = []
        self.touched: dict[int, None] = {}  # queues that may be able to start a firing now
        # used only with patience:
        self.unknown = self.missing.copy() if patience else []  # node → number of its needs with unknown ends
        self.expected = [0] * len(graph.members) if patience else []  # node → when it is ready, by the known ends
        self.end_known: set[int] = set()  # nodes whose end is known
        self.upcoming: list[list[tuple[int, int]]] = [
            [] for _ in graph.names
        ]  # queue → heap of (key, node to be ready)

    def run(self) -> IterationOrder | None:
        """Start and end all firings; return None if some can never start."""
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
        """Offer a firing that is ready to its queues."""
        self.count += 1
        entry = self.keys[node], self.count, node
        for queue in self.graph.queues[node]:
            heappush(self.ready[queue], entry)
            self.touched[queue] = None

    def start_on(self, queue: int) -> None:
        """Start the ready firing with the smallest key on an idle queue, unless the queue is patient.

        A collective is skipped while another of its queues is busy.
        """
        offers, queues, starts, idle = self.ready[queue], self.graph.queues, self.starts, self.idle
        blocked: list[tuple[int, int, int]] = []  # collectives that wait for another queue
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
        """Go to the next instant with events, and process all of these."""
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
        """Note when a node ends, and from that when its dependents become ready.

        Dependents that communicate are assumed to start as soon as they are ready.
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
        """When a firing with a smaller key than the ready one's soon becomes ready, in nanoseconds; 0 if none does."""
        upcoming = self.upcoming[queue]
        limit = self.now + self.patience * self.graph.durations[node]
        while upcoming and self.starts[upcoming[0][1]] >= 0:
            heappop(upcoming)
        for other, node in upcoming:
            if other < key and self.now < self.expected[node] < limit and self.starts[node] < 0:
                return self.expected[node]
        return 0
