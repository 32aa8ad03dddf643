"""Choose slot counts with which a plan of given orders reaches a given period and holds few bytes.

Suppose that every firing happens at a fixed time, repeated every period.  A register then needs as many slots as its
tokens occupy at the same time.  A linear program finds the times at which registers hold the fewest bytes, under the
constraints start(v) ≥ start(u) + duration(u) + latency - period · d for every firing v that needs the firing u of d
iterations before.  A slot is occupied until its credit has returned.

Slot counts from any such times reach the period and cannot cause a deadlock: with frozen orders and one producer for
each register, firing as early as possible is never later than firing at those times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.core.linear_program import LinearProgram, SparseMatrix, solve
from actorflow_compiler.plan.plan import ActorKind, Plan, Register, tokens_per_iteration
from actorflow_scheduler.iteration_graph import IterationGraph, IterationOrder

SOLVED = 12_000  # most firings of an iteration for which the linear program is solved; more would take too long
PASSES = 200  # most passes over the constraints, to repair those that rounding to nanoseconds violates

Starts = NDArray[np.int64]  # node → nanoseconds
Slots = dict[int, int]  # register → slots
_Need = tuple[int, int, int, int]  # (firing, firing that needs it, iterations between them, latency in nanoseconds)


class SlotPlanner:
    """Slot counts for the orders of one plan, from plentiful (level 0) to as few as the orders allow."""

    LEVELS = ((1.0, True), (1.0, False), (1.1, False), (10.0, False))  # (factor on the period, two slots across queues)

    def __init__(self, graph: IterationGraph, solved: int = SOLVED) -> None:
        self.graph = graph
        self.solved = solved
        self.latency = graph.times.latency
        self.plan = plan = roomy(graph.plan)
        self.counted = [r for r in plan.registers if not r.initial]
        self.several = any(tokens_per_iteration(plan, r) > 1 for r in self.counted)  # else one slot each is enough
        # the constraints that do not follow from the queues' order, whichever it is
        self.fixed = sorted({n for n in _needs(graph, plan) if n[3] or not _share_a_queue(graph, n[0], n[1])})
        self.tokens = {r.id: tuple(_tokens(graph, r)) for r in self.counted}
        queue = {a.id: graph.queues[graph.first[a.id]] for a in plan.actors}
        self.crossing = {  # registers read on another queue; for all others the queue's order alone gives the slots
            r.id for r in self.counted if any(queue[x.actor] != queue[r.producer] for x in r.readers)
        }
        self.within = [  # registers within one queue: (register, firings that begin its tokens, firings that free them)
            (r, np.array([begin for begin, _ in self.tokens[r.id]]), np.array([ends for _, ends in self.tokens[r.id]]))
            for r in self.counted
            if r.nbytes and r.id not in self.crossing
        ]

    def slots(self, run: IterationOrder, period: float, level: int = 0) -> Slots:
        """Slot counts of all registers; registers with initial tokens keep theirs.

        For plans of more than ``solved`` firings the linear program is not solved: they get the slots that one
        iteration needs when it runs alone.
        """
        if not self.several:
            return {r.id: r.slots for r in self.plan.registers}
        longer, two = self.LEVELS[level]
        every = int(np.ceil(period * longer))
        starts = self.place(run, every) if len(self.graph.members) <= self.solved else None
        if starts is None:
            starts, every = np.array(run.starts, np.int64), self.length(run)
        found = {r.id: r.slots for r in self.plan.registers if r.initial}
        for r in self.counted:
            slots = self.held(r, starts, every)
            if two and r.id in self.crossing:
                source = self.plan.actor(r.producer).kind == ActorKind.SOURCE  # the next batch is fetched early
                slots = max(slots, 2 if source else min(2, tokens_per_iteration(self.plan, r)))
            found[r.id] = slots
        return found

    def estimate(self, run: IterationOrder) -> int:
        """The bytes of registers on the rank with the most, if one iteration runs alone."""
        taken: Counter[int] = Counter()
        starts, every = np.array(run.starts, np.int64), self.length(run)
        for r in self.counted:
            if r.nbytes:
                taken[self.plan.home(r)] += r.nbytes * self.held(r, starts, every)
        return max(taken.values(), default=0)

    def at_least(self, run: IterationOrder) -> dict[int, int]:
        """Rank → a lower bound on its bytes of registers.

        It is the peak of the registers within one queue, which depends only on the queue's order.
        """
        position = np.empty(len(run.nodes), np.int64)
        position[np.array(run.nodes)] = np.arange(len(run.nodes))
        changes: dict[int, NDArray[np.int64]] = {}
        for r, begins, ends in self.within:
            change = changes.setdefault(self.graph.queues[begins[0]][0], np.zeros(len(position) + 1, np.int64))
            np.add.at(change, position[begins], r.nbytes)
            np.add.at(change, position[ends].max(axis=1) + 1, -r.nbytes)
        most: dict[int, int] = {}
        for queue, change in changes.items():
            rank = self.graph.names[queue][0]
            most[rank] = max(most.get(rank, 0), int(np.cumsum(change).max()))
        return most

    def length(self, run: IterationOrder) -> int:
        """Nanoseconds that one iteration takes when it runs alone."""
        graph = self.graph
        times = zip(run.starts, graph.durations, graph.latency, strict=True)
        return max((start + duration + latency for start, duration, latency in times), default=1)

    def held(self, register: Register, starts: Starts, every: int) -> int:
        """The most tokens of a register that occupy slots at the same time; a slot is free when its credit is back."""
        durations, latency = self.graph.durations, self.latency.get(register.producer, 0)
        tokens = self.tokens[register.id]
        begun = np.array([starts[begin] for begin, _ in tokens], np.int64)
        freed = np.array([max(starts[e] + durations[e] for e in ends) for _, ends in tokens], np.int64) + latency
        again = int(freed.max() - begun.min()) // every + 2  # iterations that may overlap
        begins = np.add.outer(np.arange(again) * every, begun).ravel()
        return int((np.searchsorted(begins, freed, side="left") - np.arange(len(freed))).max())

    def place(self, run: IterationOrder, every: int) -> Starts | None:
        """Start times of all firings at which registers hold the fewest bytes; None if the solver finds none."""
        graph = self.graph
        u, v, back, latency = np.array([*self.fixed, *_queue_order(graph, run)], np.int64).reshape(-1, 4).T
        durations = np.array(graph.durations, np.int64)
        least = durations[u] + latency - back * every
        count = len(graph.members)
        cost = np.zeros(count)
        freed: list[tuple[int, int]] = []  # (last firing to use a token, variable of when it is freed)
        weights: list[float] = []
        most = max((r.nbytes for r in self.counted), default=0) or 1
        for r in self.counted:
            weight = r.nbytes / most if r.id in self.crossing else 0
            for begin, ends in self.tokens[r.id] if weight else ():
                cost[begin] -= weight
                if len(ends) == 1:
                    cost[ends[0]] += weight
                else:
                    freed += [(end, count + len(weights)) for end in ends]
                    weights.append(weight)
        last, variables = np.array(freed, np.int64).reshape(-1, 2).T
        before, after = np.concatenate([u, last]), np.concatenate([v, variables])
        rows, width = np.arange(len(before)), count + len(weights)
        ones = np.ones(len(before))
        values = np.concatenate([ones, -ones])
        places = np.concatenate([rows, rows]), np.concatenate([before, after])
        found = solve(
            LinearProgram(
                np.concatenate([cost, weights]),
                SparseMatrix(values, *places, (len(before), width)),
                -np.concatenate([least, durations[last]]) / every,
                (0, None),
            )
        )
        if found is None or not found.best:
            return None
        starts: Starts = np.rint(found.x[:count] * every).astype(np.int64)
        for _ in range(PASSES):
            later = starts.copy()
            np.maximum.at(later, v, starts[u] + least)
            if (later == starts).all():
                return starts
            starts = later
        return None


def roomy(plan: Plan) -> Plan:
    """The plan with slots for all tokens of an iteration; registers of sources get one more, for the next batch."""
    return replace(
        plan,
        registers=tuple(
            r
            if r.initial
            else replace(r, slots=tokens_per_iteration(plan, r) + (plan.actor(r.producer).kind == ActorKind.SOURCE))
            for r in plan.registers
        ),
    )


def _needs(graph: IterationGraph, plan: Plan) -> Iterator[_Need]:
    """The constraints between firings that come from actors and registers, and not from the order of the queues."""
    for a in plan.actors:
        base = graph.first[a.id]
        yield from ((node - 1, node, 0, 0) for node in range(base + 1, base + a.rate))
    for r in plan.registers:
        latency = graph.times.latency.get(r.producer, 0)
        yield from ((u, v, back, latency) for u, v, back in (*graph.edges(r), *graph.credits(r, r.slots)))


def _share_a_queue(graph: IterationGraph, one: int, other: int) -> bool:
    """Whether two firings are of one queue, whose order has one begin after the other has ended."""
    return not set(graph.queues[one]).isdisjoint(graph.queues[other])


def _queue_order(graph: IterationGraph, run: IterationOrder) -> Iterator[_Need]:
    """The constraints of each queue's order, including its first firing after the last one of the iteration before."""
    queues: list[list[int]] = [[] for _ in graph.names]
    for node in run.nodes:
        for queue in graph.queues[node]:
            queues[queue].append(node)
    for chain in queues:
        yield from ((u, v, 0, 0) for u, v in pairwise(chain))
        yield chain[-1], chain[0], 1, 0


def _tokens(graph: IterationGraph, register: Register) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each token of an iteration, the firing that begins it and the firings after which it is freed."""
    made = graph.first[register.producer]
    for token in range(tokens_per_iteration(graph.plan, register)):
        ends = tuple(graph.first[r.actor] + (token + 1) * r.firings - 1 for r in register.readers)
        yield made + token * register.fill, ends or (made + (token + 1) * register.fill - 1,)
