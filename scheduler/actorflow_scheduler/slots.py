"""Frozen orders and a period enter; slot counts with which the plan keeps that period leave.

Firings that are repeated every period, each at its time, need as many slots of a register as tokens
of it are held at once.  A linear program finds the times that hold the fewest bytes: for firings u, v
such that v needs the u of d iterations ago, start(v) ≥ start(u) + time(u) + way - period · d, where way
is how long a token or a credit is under way.  Until its credit is back a slot is held.  Counts from
any such times keep the period, and the plan live: with frozen orders and private registers, firing as
early as possible is never later than firing at those times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.plan.plan import Plan, Register, tokens_per_iteration
from actorflow_scheduler.iteration_graph import IterationGraph, IterationOrder

SOLVED = 12_000  # firings of an iteration; the program of a larger one takes too long
PASSES = 200  # over the constraints, to mend what rounding to nanoseconds did

Starts = NDArray[np.int64]  # node → nanoseconds
Slots = dict[int, int]  # register → slots
_Need = tuple[int, int, int, int]  # a firing, one that needs it, iterations between them, nanoseconds under way


class SlotPlanner:
    """Slot counts for the orders of one plan, from plentiful (level 0) to as few as the orders allow."""

    LEVELS = ((1.0, True), (1.0, False), (1.1, False), (10.0, False))  # times the period; two slots between queues?

    def __init__(self, graph: IterationGraph, solved: int = SOLVED) -> None:
        self.graph = graph
        self.solved = solved
        self.way = graph.times.way
        self.plan = plan = roomy(graph.plan)
        self.counted = [r for r in plan.registers if not r.initial]
        self.several = any(tokens_per_iteration(plan, r) > 1 for r in self.counted)  # else one slot has to do
        self.fixed = sorted({*_needs(graph, plan)})
        self.tokens = {r.id: tuple(_tokens(graph, r)) for r in self.counted}
        queue = {a.id: graph.queues[graph.first[a.id]] for a in plan.actors}
        self.crossing = {  # within a queue, its order alone says how many tokens are held
            r.id for r in self.counted if any(queue[x.actor] != queue[r.producer] for x in r.readers)
        }

        self.within = [
            (r, np.array([begin for begin, _ in self.tokens[r.id]]), np.array([ends for _, ends in self.tokens[r.id]]))
            for r in self.counted
            if r.nbytes and r.id not in self.crossing
        ]

    def slots(self, run: IterationOrder, period: float, level: int = 0) -> Slots:
        """Slots of all registers; those with initial tokens keep theirs.

        Times that only the solver would find are not looked for in large plans: they get what the
        iteration takes when it runs alone.
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
                source = self.plan.actor(r.producer).kind == "source"  # the next batch is fetched early
                slots = max(slots, 2 if source else min(2, tokens_per_iteration(self.plan, r)))
            found[r.id] = slots
        return found

    def estimate(self, run: IterationOrder) -> int:
        """The bytes of the rank with most of them, if the iteration runs alone."""
        taken: Counter[int] = Counter()
        starts, every = np.array(run.starts, np.int64), self.length(run)
        for r in self.counted:
            if r.nbytes:
                taken[self.plan.home(r)] += r.nbytes * self.held(r, starts, every)
        return max(taken.values(), default=0)

    def at_least(self, run: IterationOrder) -> dict[int, int]:
        """Rank → bytes that registers within one of its queues hold at a time: their orders alone say so."""
        turn = np.empty(len(run.nodes), np.int64)
        turn[np.array(run.nodes)] = np.arange(len(run.nodes))
        changes: dict[int, NDArray[np.int64]] = {}
        for r, begins, ends in self.within:
            change = changes.setdefault(self.graph.queues[begins[0]][0], np.zeros(len(turn) + 1, np.int64))
            np.add.at(change, turn[begins], r.nbytes)
            np.add.at(change, turn[ends].max(axis=1) + 1, -r.nbytes)
        most: dict[int, int] = {}
        for queue, change in changes.items():
            rank = self.graph.names[queue][0]
            most[rank] = max(most.get(rank, 0), int(np.cumsum(change).max()))
        return most

    def length(self, run: IterationOrder) -> int:
        """Nanoseconds of the iteration alone."""
        graph = self.graph
        return max((s + t + way for s, t, way in zip(run.starts, graph.lasts, graph.way, strict=True)), default=1)

    def held(self, register: Register, starts: Starts, every: int) -> int:
        """The most tokens of a register that are held at once, until the credits for them are back."""
        lasts, way = self.graph.lasts, self.way.get(register.producer, 0)
        tokens = self.tokens[register.id]
        begun = np.array([starts[begin] for begin, _ in tokens], np.int64)
        freed = np.array([max(starts[e] + lasts[e] for e in ends) for _, ends in tokens], np.int64) + way
        again = int(freed.max() - begun.min()) // every + 2  # iterations that may overlap
        begins = np.add.outer(np.arange(again) * every, begun).ravel()
        return int((np.searchsorted(begins, freed, side="left") - np.arange(len(freed))).max())

    def place(self, run: IterationOrder, every: int) -> Starts | None:
        """When each firing starts, so that registers hold the fewest bytes; None if no times are found."""
        from scipy.optimize import linprog  # here: it takes a third of a second, in every process
        from scipy.sparse import csr_array

        graph = self.graph
        u, v, ago, way = np.array([*self.fixed, *_turns(graph, run)], np.int64).reshape(-1, 4).T
        lasts = np.array(graph.lasts, np.int64)
        least = lasts[u] + way - ago * every
        count = len(graph.members)
        cost = np.zeros(count)
        freed: list[tuple[int, int]] = []  # firing that ends before a token is free, variable of when it is
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
        matrix = csr_array(
            (np.concatenate([ones, -ones]), (np.concatenate([rows, rows]), np.concatenate([before, after]))),
            shape=(len(before), width),
        )
        found = linprog(
            np.concatenate([cost, weights]),
            A_ub=matrix,
            b_ub=-np.concatenate([least, lasts[last]]) / every,
            bounds=(0, None),
        )
        if found.status:
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
    """The plan with slots for all tokens of an iteration, and for the next batch."""
    return replace(
        plan,
        registers=tuple(
            r
            if r.initial
            else replace(r, slots=tokens_per_iteration(plan, r) + (plan.actor(r.producer).kind == "source"))
            for r in plan.registers
        ),
    )


def _needs(graph: IterationGraph, plan: Plan) -> Iterator[_Need]:
    """What firings need of each other, with slots for all tokens of an iteration."""
    for a in plan.actors:
        base = graph.first[a.id]
        yield from ((node - 1, node, 0, 0) for node in range(base + 1, base + a.rate))
    for r in plan.registers:
        way = graph.times.way.get(r.producer, 0)
        yield from ((u, v, ago, way) for u, v, ago in (*graph.edges(r), *graph.credits(r, r.slots)))


def _turns(graph: IterationGraph, run: IterationOrder) -> Iterator[_Need]:
    """Each queue's order, and its first firing after its last one of the iteration before."""
    queues: list[list[int]] = [[] for _ in graph.names]
    for node in run.nodes:
        for queue in graph.queues[node]:
            queues[queue].append(node)
    for chain in queues:
        yield from ((u, v, 0, 0) for u, v in pairwise(chain))
        yield chain[-1], chain[0], 1, 0


def _tokens(graph: IterationGraph, register: Register) -> Iterator[tuple[int, tuple[int, ...]]]:
    """For each token of an iteration the firing that begins it, and those after which readers let it go."""
    made = graph.first[register.producer]
    for token in range(tokens_per_iteration(graph.plan, register)):
        ends = tuple(graph.first[r.actor] + (token + 1) * r.firings - 1 for r in register.readers)
        yield made + token * register.fill, ends or (made + (token + 1) * register.fill - 1,)
