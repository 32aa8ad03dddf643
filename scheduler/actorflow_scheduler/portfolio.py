"""A plan and the time of each actor enter; orders for its queues leave, the one with the shortest period first.

Candidates are the published orders that fit the plan's stages, list scheduling by priorities with
limits on the pieces in flight, with and without waiting for what is about to come, and what a climb
along the critical path makes of the best of them.  Each is evaluated over several iterations with
slots for everything, so that streaming from one iteration into the next counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from actorflow_compiler.plan.plan import Order, Plan
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.critical_path import critical_firings
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.iteration_graph import Dependency, IterationGraph, IterationOrder
from actorflow_scheduler.pipeline import SCHEDULES, find_pipeline, task_of
from actorflow_scheduler.published_orders import PublishedOrder, StageTask
from actorflow_scheduler.slots import roomy
from actorflow_scheduler.timeline import stuck

STEADY = 6  # iterations after which the period is what it was over the last half of them
LEAST, EACH, MOST = 200_000, 350, 2_000_000  # firings that a search may simulate: in any case, for each firing, in all
LISTED = 4  # times as long as evaluating a firing does it take to find its place
SAME = 1e-3  # of a period: less is no difference
CLASSES = {"optimizer": 0, "boxing": 0, "send": 0, "sink": 0, "backward": 1, "forward": 2, "source": 2, "weight": 3}


@dataclass(frozen=True)
class Candidate:
    """Orders for all queues, evaluated."""

    name: str  # where it comes from: "zb-h1", "priorities"
    plan: Plan  # with these orders and slots for everything
    run: IterationOrder
    period: float  # nanoseconds


class Portfolio:
    """Makes and evaluates the candidates of one plan.

    ``budget`` is how many firings may yet be simulated; ``tried`` counts the candidates.
    """

    def __init__(self, plan: Plan, times: Durations) -> None:
        self.plan = roomy(plan)
        self.times = times
        self.tried = 0
        self.graph = graph = IterationGraph(plan, times)
        self.budget = min(MOST, LEAST + EACH * len(graph.members))
        self.pipeline = find_pipeline(plan)
        self.nodes: dict[tuple[int, StageTask], list[int]] = {}  # (rank, task) → its nodes
        self.task: dict[int, tuple[int, StageTask]] = {}
        for a in plan.actors:
            for n in range(a.rate if task_of(plan, a, 0) is not None else 0):
                task = task_of(plan, a, n)
                assert task is not None
                self.nodes.setdefault((a.rank, task), []).append(graph.first[a.id] + n)
                self.task[graph.first[a.id] + n] = (a.rank, task)
        self.computing = {i for i, (_, name) in enumerate(graph.names) if name == "compute"}  # queues
        worked = [0] * len(graph.names)
        for node, queues in enumerate(graph.queues):
            for queue in queues:
                worked[queue] += graph.lasts[node]
        self.bound = max(worked, default=0)  # nanoseconds: no period is shorter
        self.priorities = self._priorities()
        self.found: list[Candidate] = []
        self.known: set[tuple[Order, ...]] = set()  # of those that were found
        first = graph.run(self.priorities)
        assert first is not None  # without edges
        turn = {n: i for i, n in enumerate(first.nodes)}
        for nodes in self.nodes.values():
            nodes.sort(key=turn.__getitem__)

    # ---- keys and edges

    def _priorities(self) -> list[int]:
        """Backward before forward before weights, the oldest piece first; communication as it becomes ready."""
        actors = [self.plan.actor(m[0]) for m in self.graph.members]
        wanted = [
            (CLASSES[a.kind], int(a.rate == 1), 0, 0) if a.comm is not None else (CLASSES[a.kind], 0, n, a.id)
            for a, n in zip(actors, self.graph.firing, strict=True)
        ]
        number = {key: i for i, key in enumerate(sorted(set(wanted)))}
        return [number[key] for key in wanted]

    def by_guide(self, guide: PublishedOrder) -> list[int]:
        """As the guide says, then weights that it does not speak of, then optimizers; all else goes first."""
        keys = []
        for node, members in enumerate(self.graph.members):
            actor = self.plan.actor(members[0])
            if actor.comm is not None:
                keys.append(int(actor.rate == 1))
            elif actor.kind == "optimizer":
                keys.append(len(self.nodes) + 1)
            else:
                keys.append(len(self.nodes) if node in self.task else -1)
        for rank, position in self.pipeline.position.items():
            for turn, task in enumerate(guide[position]):
                for node in self.nodes.get((rank, task), ()):
                    keys[node] = turn
        return keys

    def in_turn(self, guide: PublishedOrder) -> Iterator[Dependency]:
        """Every rank keeps to the guide."""
        for rank, position in self.pipeline.position.items():
            tasks = [self.nodes[rank, t] for t in guide[position] if (rank, t) in self.nodes]
            yield from pairwise(n for nodes in tasks for n in nodes)

    def no_further(self, guide: PublishedOrder) -> Iterator[Dependency]:
        """No rank begins more pieces than the guide has in flight and one, which may wait in a collective."""
        for rank, position in self.pipeline.position.items():
            done: list[StageTask] = []
            for task in guide[position]:
                if task.kind == "B":
                    done.append(task)
                elif task.kind == "F" and len(done) > 1:
                    yield from self.after(rank, done[-2], task)

    def at_most(self, ahead: float, weights_only: bool = False) -> Iterator[Dependency]:
        """Limits on the pieces that a stage has begun and not yet taken back: with 0 those of 1F1B and ZB-H1.

        With 1 they are what communication that takes less than computing can use, and ZB-H2's.
        """
        stages = sorted({t.stage for _, t in self.nodes})
        left = {s: len(stages) - i for i, s in enumerate(stages)}
        more = len(stages) - 1 + self.hides
        for rank, task in self.nodes:
            if task.kind == "F":
                here = left[task.stage]
                limits = {"W": len(stages) + int(ahead * more), "B": here + int(ahead * (here - 1 + self.hides))}
                for kind in "W" if weights_only else "WB":
                    if task.piece >= limits[kind]:
                        yield from self.after(rank, StageTask(task.stage, kind, task.piece - limits[kind]), task)

    def few(self, limit: int) -> Iterator[Dependency]:
        """No stage has more than so many pieces in flight."""
        for rank, task in self.nodes:
            if task.kind == "F" and task.piece >= limit:
                for kind in "BW":
                    yield from self.after(rank, StageTask(task.stage, kind, task.piece - limit), task)

    def after(self, rank: int, first: StageTask, then: StageTask) -> Iterator[Dependency]:
        """A rank does one task before another."""
        for u in self.nodes.get((rank, first), ()):
            for v in self.nodes.get((rank, then), ()):
                yield u, v

    @property
    def hides(self) -> int:
        """1 where pieces have collectives in their midst that computing another piece can hide."""
        return int(any(a.rate > 1 and a.comm is not None and a.comm.kind != "send" for a in self.plan.actors))

    # ---- candidates

    def consider(
        self, name: str, keys: Sequence[int], edges: Iterable[Dependency] = (), patience: float = 0.0
    ) -> Candidate | None:
        """Evaluate a candidate; None if it cannot be, is one of those found, or nothing more may be simulated."""
        if self.budget <= 0 and self.found:
            return None
        self.budget -= len(self.graph.members) * LISTED
        run = self.graph.run(keys, [*edges], patience)
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
        """The firings of enough iterations to tell the period; raises DeadlockError."""
        firings = FiringTimes(plan, self.times)
        ends = [0]
        while firings.iterations < STEADY:
            if not firings.run():
                raise stuck(plan, firings.iterations)
            ends.append(iteration_end(firings))
            if len(ends) > 3 and ends[-1] - ends[-2] == ends[-2] - ends[-3]:
                break
        self.budget -= len(self.graph.members) * firings.iterations
        return firings

    def follow(self, name: str) -> None:
        """The published order, kept strictly, and as priorities where collectives would make it wait."""
        guide = self.pipeline.guide(name)
        keys = self.by_guide(guide)
        self.consider(name, keys, self.in_turn(guide))
        if self.hides or not self.found:
            self.consider(name, keys, self.no_further(guide))

    def search(self, frugal: bool = False) -> None:
        """All candidates, as far as the budget goes; if ``frugal`` also such as take little memory."""
        for step in self.steps():
            if self.budget <= 0:
                break
            step()
        if not self.found:  # something waits for more pieces than any limit lets begin
            self.consider("priorities", self.priorities)
        if frugal:
            limit = 1
            while limit < self.plan.pieces and self.budget > 0:
                self.consider(f"{limit} in flight", self.priorities, self.few(limit))
                limit = max(limit + 1, limit * 5 // 4)
        if self.plan.pieces > 1 and self.pipeline.length > 1:
            self.climb()

    def steps(self) -> Iterator[Callable[[], object]]:
        """What is tried, one after the other: little without a pipeline, nothing but one order without pieces."""
        if self.plan.pieces == 1 or self.pipeline.length <= 1:
            for ahead in (0.0, 1.0)[: 1 + (self.plan.pieces > 1) * self.hides]:
                yield partial(self.consider, "priorities", self.priorities, [*self.at_most(ahead)])
            return
        weights = any(task.kind == "W" for _, task in self.nodes)
        for name in SCHEDULES[1:]:
            if self.pipeline.misfit(name) is None:
                if weights == name.startswith("zb"):
                    yield partial(self.follow, name)
                elif weights and name != "gpipe":
                    yield partial(self.fill, name)
        for ahead in (0.0, 1.0, 2.0, 0.5, 4.0):
            for patience in (0.0, 1.0):
                yield partial(self.consider, "priorities", self.priorities, [*self.at_most(ahead)], patience)
        if not self.found:  # something waits for more pieces than any limit lets begin
            yield partial(self.consider, "priorities", self.priorities)

    def fill(self, name: str) -> None:
        """A published order of F and B, in whose gaps W go."""
        guide = self.pipeline.guide(name)
        for ahead in (0.0, 1.0):
            limits = [*self.in_turn(guide), *self.at_most(ahead, weights_only=True)]
            self.consider(f"{name} filled with W", self.by_guide(guide), limits, patience=1.0)

    def optimal(self) -> bool:
        """Whether no order can be faster than the best one found."""
        return bool(self.found) and min(c.period for c in self.found) <= self.bound * (1 + SAME)

    def climb(self) -> None:
        """Move firings along the critical path of the best candidate, as long as that makes it faster."""
        best = min(self.found, key=lambda c: c.period)
        origin = best.name
        better: Candidate | None = best
        while better is not None and self.budget > 0 and not self.optimal():
            best, better = better, None
            chains = self.chains(best)
            for first, then in self.moves(best):
                queue = self.graph.queues[first][0]
                order = [n for n in chains[queue] if n != then]
                order.insert(order.index(first), then)
                edges = [e for q, chain in chains.items() for e in pairwise(order if q == queue else chain)]
                found = self.consider(f"{origin}, improved", self.priorities, edges)
                if found is not None and found.period < best.period * (1 - SAME / 10):
                    better = found
                    break
                if self.budget <= 0:
                    break

    def chains(self, candidate: Candidate) -> dict[int, list[int]]:
        """The order of each compute queue."""
        chains: dict[int, list[int]] = {q: [] for q in self.computing}
        for node in candidate.run.nodes:
            if (queue := self.graph.queues[node][0]) in self.computing:
                chains[queue].append(node)
        return chains

    def moves(self, candidate: Candidate) -> Iterator[tuple[int, int]]:
        """(node, a later one of its queue that may go before it), at the ends of the blocks of the critical path.

        Only what is ready before the other one ends: all else would make it later.
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
                for pair in _ends(block, near):
                    ready = graph.ready(pair[1], run.starts)
                    if ready <= run.starts[pair[0]] + graph.lasts[pair[0]] and pair[0] not in graph.needs[pair[1]]:
                        yield pair


def _ends(block: Sequence[int], near: bool) -> Iterator[tuple[int, int]]:
    """Pairs of a block of which moving the second before the first changes one of its ends; neighbours, or others."""
    if len(block) == 2 and near:
        yield block[0], block[1]
    elif len(block) > 2 and near:
        yield block[0], block[1]
        yield block[-2], block[-1]
    elif len(block) > 2:
        yield from ((block[0], node) for node in block[2:])
        yield from ((node, block[-1]) for node in block[1:-2])


def period(firings: FiringTimes) -> float:
    """Nanoseconds of an iteration, over the later half of those that were run."""
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
    """When the last iteration that was run is done."""
    return max((ends[-1] for ends in firings.ends.values()), default=0)
