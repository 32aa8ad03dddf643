"""Search for orders of a plan's queues: make candidates and find the period of each.

The candidates are

- the published schedules that fit the plan's stages;
- list schedules by priorities, with limits on the micro-batches ("pieces") in flight, with and without patience for
  firings that become ready soon;
- the results of a hill climb that moves firings along the critical path of the best candidate.

Each is evaluated over several iterations, with slots for all tokens, so that the overlap of consecutive iterations
counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.plan.plan import ActorKind, Collective, Order, Plan
from actorflow_compiler.plan.variant import AHEAD
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.critical_path import critical_firings
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.gathers_ahead import gathered_chunks
from actorflow_scheduler.iteration_graph import Dependency, IterationGraph, IterationOrder
from actorflow_scheduler.notation import COMPUTING
from actorflow_scheduler.pipeline import SCHEDULES, find_pipeline, task_of
from actorflow_scheduler.published_orders import B, F, PublishedOrder, StageTask, W
from actorflow_scheduler.recomputed_regions import recomputed_late
from actorflow_scheduler.slots import roomy
from actorflow_scheduler.timeline import stuck

STEADY = 6  # most iterations that are evaluated; the period is the mean of the later half of them
# The budget of a search, in firings to simulate: LEAST + EACH for each firing of an iteration, but no more than MOST.
LEAST, EACH, MOST = 200_000, 350, 2_000_000
LISTED = 4  # list scheduling a firing costs as much as evaluating it this many times
SAME = 1e-3  # periods that differ by a smaller fraction count as equal
CLASSES = {
    ActorKind.OPTIMIZER: 0,
    ActorKind.BOXING: 0,
    ActorKind.SEND: 0,
    ActorKind.SINK: 0,
    ActorKind.BACKWARD: 1,
    ActorKind.FORWARD: 2,
    ActorKind.SOURCE: 2,
    ActorKind.WEIGHT: 3,
}
LAST = 1 + max(CLASSES.values())


@dataclass(frozen=True)
class Candidate:
    """Orders for all queues, and the period that they give."""

    name: str  # its origin, such as "zb-h1" or "priorities"
    plan: Plan  # with these orders, and slots for all tokens
    run: IterationOrder
    period: float  # nanoseconds


class Portfolio:
    """The candidates of one plan.

    ``found`` are the candidates with different orders, ``tried`` is how many were made, and ``budget`` is how many
    firings may still be simulated.
    """

    def __init__(self, plan: Plan, times: Durations) -> None:
        self.plan = roomy(plan)
        self.times = times
        self.tried = 0
        self.graph = graph = IterationGraph(plan, times)
        self.budget = min(MOST, LEAST + EACH * len(graph.members))
        self.pipeline = find_pipeline(plan)
        self.nodes: dict[tuple[int, StageTask], list[int]] = {}  # (rank, task) → its nodes in the graph
        self.task: dict[int, tuple[int, StageTask]] = {}  # node → (rank, task)
        for a in plan.actors:
            for n in range(a.rate if task_of(plan, a, 0) is not None else 0):
                task = task_of(plan, a, n)
                assert task is not None
                self.nodes.setdefault((a.rank, task), []).append(graph.first[a.id] + n)
                self.task[graph.first[a.id] + n] = (a.rank, task)
        self.computing = {i for i, (_, name) in enumerate(graph.names) if name == COMPUTING}  # compute queues
        worked = [0] * len(graph.names)
        for node, queues in enumerate(graph.queues):
            for queue in queues:
                worked[queue] += graph.durations[node]
        self.bound = max(worked, default=0)  # nanoseconds of the busiest queue: a lower bound on the period
        self.priorities = self._priorities()
        self.found: list[Candidate] = []
        self.known: set[tuple[Order, ...]] = set()  # the orders of the candidates found
        first = graph.run(self.priorities)
        assert first is not None  # only additional edges can make it None
        self.recomputed = recomputed_late(graph, first)  # edges that keep little of what is computed again
        if self.recomputed:
            first = graph.run(self.priorities, self.recomputed) or first
        position = {n: i for i, n in enumerate(first.nodes)}
        for nodes in self.nodes.values():
            nodes.sort(key=position.__getitem__)

    # ---- keys and edges

    def _priorities(self, eager: bool = False) -> list[int]:
        """Keys that put backward before forward before weight gradients, and older pieces before newer ones.

        Communication, what an optimizer does for each piece, and sinks come before all of these.  What it does once
        comes last or, if ``eager``, first as well: in the middle of a backward pass it delays the gradients that are
        still to leave, but what it sends itself leaves earlier.  Of its parts, the first that is ready comes first.
        """
        wanted = []
        for members, n in zip(self.graph.members, self.graph.firing, strict=True):
            a = self.plan.actor(members[0])
            if a.comm is not None:
                wanted.append((CLASSES[a.kind], int(a.rate == 1), 0, 0))
            elif a.kind == ActorKind.OPTIMIZER and a.rate == 1:
                wanted.append((CLASSES[a.kind] if eager else LAST, 0, 0, 0))
            else:
                wanted.append((CLASSES[a.kind], 0, n, a.id))
        number = {key: i for i, key in enumerate(sorted(set(wanted)))}
        return [number[key] for key in wanted]

    def needed_first(self, run: IterationOrder, edges: Iterable[Dependency] = ()) -> list[int]:
        """The priorities, but for communication: what a run needs first comes first, and not what is ready first.

        Gathers of variables are ready long before they are needed, many at the same time.  ``edges`` are needs, too.
        """
        graph, keys = self.graph, list(self.priorities)
        position = {n: i for i, n in enumerate(run.nodes)}
        more: dict[int, list[int]] = {}
        for node, then in edges:
            more.setdefault(node, []).append(then)
        for node in reversed(run.nodes):  # what waits for communication that others wait for has its key before it
            if graph.is_comm[node]:
                after = [
                    n
                    for n in (*graph.feeds[node], *graph.fetch[node], *more.get(node, ()))
                    if graph.members[n] != graph.members[node]
                ]
                wanted = (keys[n] if graph.is_comm[n] else position[n] for n in after)
                keys[node] = min(wanted, default=len(position))
        return keys

    def keys_of(self, order: PublishedOrder) -> list[int]:
        """Keys by a published order, followed by weight gradients that are not in it, then by optimizers.

        All other firings come before these.
        """
        keys = []
        for node, members in enumerate(self.graph.members):
            actor = self.plan.actor(members[0])
            if actor.comm is not None:
                keys.append(int(actor.rate == 1))
            elif actor.kind == ActorKind.OPTIMIZER:
                keys.append(len(self.nodes) + 1)
            else:
                keys.append(len(self.nodes) if node in self.task else -1)
        for rank, position in self.pipeline.position.items():
            for index, task in enumerate(order[position]):
                for node in self.nodes.get((rank, task), ()):
                    keys[node] = index
        return keys

    def strict_edges(self, order: PublishedOrder) -> Iterator[Dependency]:
        """Edges that make every rank follow a published order exactly."""
        for rank, position in self.pipeline.position.items():
            tasks = [self.nodes[rank, t] for t in order[position] if (rank, t) in self.nodes]
            yield from pairwise(n for nodes in tasks for n in nodes)

    def loose_edges(self, order: PublishedOrder) -> Iterator[Dependency]:
        """Edges that allow each rank one more piece in flight than a published order, as one may be in a collective."""
        for rank, position in self.pipeline.position.items():
            done: list[StageTask] = []
            for task in order[position]:
                if task.kind is B:
                    done.append(task)
                elif task.kind is F and len(done) > 1:
                    yield from self.after(rank, done[-2], task)

    def flight_limits(self, ahead: float, weights_only: bool = False) -> Iterator[Dependency]:
        """Edges that limit the pieces in flight on each stage.

        With ``ahead`` 0, the limits are those of 1F1B and ZB-H1.  With 1 they are those of ZB-H2, which is all that is
        useful as long as communication is shorter than computing.
        """
        stages = sorted({t.stage for _, t in self.nodes})
        left = {s: len(stages) - i for i, s in enumerate(stages)}
        more = len(stages) - 1 + self.hides
        for rank, task in self.nodes:
            if task.kind is F:
                here = left[task.stage]
                limits = {W: len(stages) + int(ahead * more), B: here + int(ahead * (here - 1 + self.hides))}
                for kind in (W,) if weights_only else (W, B):
                    if task.piece >= limits[kind]:
                        yield from self.after(rank, StageTask(task.stage, kind, task.piece - limits[kind]), task)

    def same_flight_limit(self, limit: int) -> Iterator[Dependency]:
        """Edges that limit the pieces in flight on every stage to the same number."""
        for rank, task in self.nodes:
            if task.kind is F and task.piece >= limit:
                for kind in (B, W):
                    yield from self.after(rank, StageTask(task.stage, kind, task.piece - limit), task)

    def after(self, rank: int, first: StageTask, then: StageTask) -> Iterator[Dependency]:
        """Edges that put one task of a rank before another."""
        for u in self.nodes.get((rank, first), ()):
            for v in self.nodes.get((rank, then), ()):
                yield u, v

    @cached_property
    def hides(self) -> int:
        """1 if pieces have collectives, which computing another piece can hide, else 0."""
        return int(any(a.rate > 1 and isinstance(a.comm, Collective) for a in self.plan.actors))

    @cached_property
    def gathers(self) -> bool:
        """Whether so many chunks of variables are gathered that some may wait until others have been used."""
        return max(map(len, gathered_chunks(self.plan).sizes.values()), default=0) > AHEAD

    @cached_property
    def optimizer_sends(self) -> bool:
        """Whether what one of an optimizer's parts makes is communicated, which other work may hide."""
        kind = {a.id: a.kind for a in self.plan.actors}
        comms = {a.id for a in self.plan.actors if a.comm is not None}
        return any(
            kind[r.producer] == ActorKind.OPTIMIZER and any(read.actor in comms for read in r.readers)
            for r in self.plan.registers
        )

    # ---- candidates

    def consider(
        self, name: str, keys: Sequence[int], edges: Iterable[Dependency] = (), patience: float = 0.0
    ) -> Candidate | None:
        """Evaluate a candidate; None if its edges form a cycle, its orders are known, or the budget is spent."""
        if self.budget <= 0 and self.found:
            return None
        self.budget -= len(self.graph.members) * LISTED
        edges = [*edges]
        run = self.graph.run(keys, [*edges, *self.recomputed], patience)
        if run is None and self.recomputed:
            run = self.graph.run(keys, edges, patience)
        if run is None:
            return None
        self.tried += 1
        if run.orders in self.known:
            return None
        self.known.add(run.orders)
        plan = replace(self.plan, orders=run.orders)
        found = Candidate(name, plan, run, period(self.evaluate(plan)))
        self.found.append(found)
        return found

    def evaluate(self, plan: Plan) -> FiringTimes:
        """Evaluate enough iterations of a plan to know its period; raises DeadlockError if it gets stuck."""
        firings = FiringTimes(plan, self.times)
        ends = [0]
        while firings.iterations < STEADY:
            if not firings.run():
                raise stuck(plan, firings.iterations)
            ends.append(iteration_end(firings))
            if firings.is_long or (len(ends) > 3 and ends[-1] - ends[-2] == ends[-2] - ends[-3]):
                break
        self.budget -= len(self.graph.members) * firings.iterations
        return firings

    def follow(self, name: ScheduleName) -> None:
        """Consider a published order strictly; with collectives, or if that fails, also with loose limits."""
        order = self.pipeline.published(name)
        keys = self.keys_of(order)
        self.consider(name, keys, self.strict_edges(order))
        if self.hides or not self.found:
            self.consider(name, keys, self.loose_edges(order))

    def scattered_soon(self) -> Iterator[Dependency]:
        """Edges by which what a micro-batch makes for a collective is sent before the one after the next makes more.

        Nothing but the optimizer may need gradients that each micro-batch scatters: sent last, they pile up.
        """
        for register in self.plan.registers:
            made = self.plan.actor(register.producer)
            if made.comm is None and made.rate > 2 and register.fill == 1 and register.nbytes:
                for read in register.readers:
                    if isinstance(self.plan.actor(read.actor).comm, Collective) and read.firings == 1:
                        to, of = self.graph.first[made.id], self.graph.first[read.actor]
                        yield from ((of + n, to + n + 2) for n in range(made.rate - 2))

    def keep_computing(self, name: str, orders: Iterable[Order]) -> None:
        """Consider orders of compute queues, with the communication that they need first before all other.

        Then the same without more gradients in memory than of two micro-batches.
        """
        edges: list[Dependency] = []
        for order in orders:
            if order.queue == COMPUTING and order.actors[0] in self.graph.first:
                fired: Counter[int] = Counter()
                nodes = []
                for actor in order.actors:
                    nodes.append(self.graph.first[actor] + fired[actor])
                    fired[actor] += 1
                edges += pairwise(nodes)
        soon = [*self.scattered_soon()]
        for more in ([], soon)[: 1 + bool(soon)]:
            run = self.graph.run(self.priorities, [*edges, *more])
            if run is not None:
                self.budget = max(1, self.budget)
                self.consider(name, self.needed_first(run, more), [*edges, *more])

    def search(self, frugal: bool = False) -> None:
        """Consider all candidates that the budget allows; if ``frugal``, also candidates that need little memory."""
        for step in self.steps():
            if self.budget <= 0:
                break
            step()
        if not self.found:  # some firing needs more pieces in flight than any limit allows
            self.consider("priorities", self.priorities)
        if frugal:
            limit = 1
            while limit < self.plan.pieces and self.budget > 0:
                self.consider(f"{limit} in flight", self.priorities, self.same_flight_limit(limit))
                limit = max(limit + 1, limit * 5 // 4)
        if self.plan.pieces > 1 and self.pipeline.length > 1:
            self.hill_climb()
        if self.gathers:
            best = min(self.found, key=lambda c: c.period)
            self.keep_computing(best.name, best.plan.orders)

    def steps(self) -> Iterator[Callable[[], object]]:
        """The steps of the search: few without a pipeline, and a single one without micro-batches."""
        if self.plan.pieces == 1 or self.pipeline.length <= 1:
            for ahead in (0.0, 1.0)[: 1 + (self.plan.pieces > 1) * self.hides]:
                yield partial(self.consider, "priorities", self.priorities, [*self.flight_limits(ahead)])
            if self.optimizer_sends:
                yield partial(self.consider, "optimizer first", self._priorities(eager=True))
            return
        weights = any(task.kind is W for _, task in self.nodes)
        names = SCHEDULES[1:]
        if self.budget < len(self.graph.members) * (LISTED + STEADY) * len(names):  # not all may be tried
            names = tuple(sorted(names, key=lambda name: name is ScheduleName.GPIPE))  # it keeps the most in memory
        for name in names:
            if self.pipeline.misfit(name) is None:
                if weights == name.splits_backward:
                    yield partial(self.follow, name)
                elif weights and name is not ScheduleName.GPIPE:
                    yield partial(self.fill, name)
        for ahead in (0.0, 1.0, 2.0, 0.5, 4.0):
            for patience in (0.0, 1.0):
                yield partial(self.consider, "priorities", self.priorities, [*self.flight_limits(ahead)], patience)
        if not self.found:  # some firing needs more pieces in flight than any limit allows
            yield partial(self.consider, "priorities", self.priorities)

    def fill(self, name: ScheduleName) -> None:
        """Consider a published order of F and B whose gaps are filled with W."""
        order = self.pipeline.published(name)
        for ahead in (0.0, 1.0):
            limits = [*self.strict_edges(order), *self.flight_limits(ahead, weights_only=True)]
            self.consider(f"{name} filled with W", self.keys_of(order), limits, patience=1.0)

    def optimal(self) -> bool:
        """Whether the best candidate reaches the lower bound on the period."""
        return bool(self.found) and min(c.period for c in self.found) <= self.bound * (1 + SAME)

    def hill_climb(self) -> None:
        """Move firings along the critical path of the best candidate, as long as that shortens the period."""
        best = min(self.found, key=lambda c: c.period)
        origin = best.name
        better: Candidate | None = best
        while better is not None and self.budget > 0 and not self.optimal():
            best, better = better, None
            orders = self.compute_orders(best)
            for first, then in self.moves(best):
                queue = self.graph.queues[first][0]
                changed = [n for n in orders[queue] if n != then]
                changed.insert(changed.index(first), then)
                edges = [e for q, order in orders.items() for e in pairwise(changed if q == queue else order)]
                found = self.consider(f"{origin}, improved", self.priorities, edges)
                if found is not None and found.period < best.period * (1 - SAME / 10):
                    better = found
                    break
                if self.budget <= 0:
                    break

    def compute_orders(self, candidate: Candidate) -> dict[int, list[int]]:
        """Compute queue → its nodes in order."""
        orders: dict[int, list[int]] = {q: [] for q in self.computing}
        for node in candidate.run.nodes:
            if (queue := self.graph.queues[node][0]) in self.computing:
                orders[queue].append(node)
        return orders

    def moves(self, candidate: Candidate) -> Iterator[tuple[int, int]]:
        """The moves that may shorten the critical path: (node, later node of its queue to put before it).

        A block is a stretch of the path on one compute queue; only moves at the ends of blocks can help.  The later
        node must be ready before the other one ends, as it would only cause a delay otherwise.
        """
        graph, run = self.graph, candidate.run
        path: list[tuple[int, int]] = []  # (queue, node), backwards in time
        for actor, n in critical_firings(self.evaluate(candidate.plan), round(candidate.period)):
            node = graph.first[actor] + n % self.plan.actor(actor).rate
            queue = graph.queues[node][0]
            path.append((queue if queue in self.computing else -1, node))
        blocks: list[list[int]] = []
        last = -1
        for queue, node in reversed(path):
            if queue >= 0 and queue == last and run.starts[node] > run.starts[blocks[-1][-1]]:
                blocks[-1].append(node)
            elif queue >= 0:
                blocks.append([node])
            last = queue
        for near in (True, False):
            for block in blocks:
                for pair in _swaps(block, near):
                    ready = graph.ready(pair[1], run.starts)
                    if ready <= run.starts[pair[0]] + graph.durations[pair[0]] and pair[0] not in graph.needs[pair[1]]:
                        yield pair


def _swaps(block: Sequence[int], near: bool) -> Iterator[tuple[int, int]]:
    """Pairs of nodes of a block: moving the second before the first changes an end of the block.

    Yields pairs of neighbours if ``near``, else all other pairs.
    """
    if len(block) == 2 and near:
        yield block[0], block[1]
    elif len(block) > 2 and near:
        yield block[0], block[1]
        yield block[-2], block[-1]
    elif len(block) > 2:
        yield from ((block[0], node) for node in block[2:])
        yield from ((node, block[-1]) for node in block[1:-2])


def period(firings: FiringTimes) -> float:
    """Mean nanoseconds of an iteration, over the later half of the iterations that were run."""
    done = firings.iterations
    half = done // 2
    ends = [0, *(0 for _ in range(done))]
    for a in firings.plan.actors:
        times = firings.ends[a.id]
        for i in (half, done):
            if i:
                ends[i] = max(ends[i], times[i * a.rate - 1])
    return (ends[done] - ends[half]) / (done - half)


def iteration_end(firings: FiringTimes) -> int:
    """When the last iteration ends, in nanoseconds."""
    return max((ends[-1] for ends in firings.ends.values()), default=0)
