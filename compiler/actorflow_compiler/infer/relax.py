"""Solve the linear relaxation of a layout problem: the best mixture of choices, and a lower bound of every choice.

There is one choice for each class of repeated items, and for each value the layouts that it is boxed to.  This is
facility location: a layout is paid for once, however many readers need it.  The linear relaxation is tight where
values have one reader; a greedy walk and local improvement decide the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.linear_program import LinearProgram, SparseMatrix, expect_programs, solve
from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.sbp import B
from actorflow_compiler.infer.prices import prices_of
from actorflow_compiler.infer.problem import Problem

Row = Mapping[int, float]
LARGEST = 40_000  # variables


@dataclass(frozen=True, slots=True)
class RelaxedSolution:
    """The solution of the relaxation."""

    shares: tuple[tuple[float, ...], ...]  # class by class, of each option in the best mixture; () if not solved
    bound: float | None  # s; no choice of tied items costs less
    byte_price: float  # dual price of the budget: s saved for each further byte


def relax(problem: Problem, classes: Sequence[Sequence[int]], budget: float | None) -> RelaxedSolution | None:
    """Solve the relaxation with HiGHS; ``budget`` is in bytes for each device.  None: nothing fits the budget.

    A program of more than ``LARGEST`` variables is not solved, because that would take minutes.
    """
    expect_programs()
    program = _Program(problem, classes)
    return RelaxedSolution((), None, 0.0) if len(program.cost) > LARGEST else program.solve(budget)


class _Program:
    def __init__(self, problem: Problem, classes: Sequence[Sequence[int]]) -> None:
        self.p, self.classes = problem, classes
        self.cost: list[float] = []
        self.equal: list[Row] = []  # sums that are 1
        self.least: list[tuple[Row, float]] = []  # sums that are at least a number
        self.class_of = {i: c for c, members in enumerate(classes) for i in members}
        self.memory: dict[tuple[object, str], dict[int, float]] = {}
        self.x = [self.options(members) for members in classes]
        for group, weight in self.groups():
            self.value(group, weight)

    def variable(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def options(self, members: Sequence[int]) -> list[int]:
        """Add a variable for the share of each option; the shares sum to 1."""
        own = self.p.items[members[0]].own
        x = [self.variable(len(members) * c) for c in own]
        self.equal.append(dict.fromkeys(x, 1.0))
        return x

    def groups(self) -> list[tuple[int, int]]:
        """Groups of values that the same classes make and read in the same way: (one of them, their number)."""
        reads: dict[int, list[tuple[int, int]]] = {}
        for i, item in enumerate(self.p.items):
            for j, v in enumerate(item.reads):
                reads.setdefault(v, []).append((self.class_of[i], j))
        targets = {t.value for t in self.p.targets}
        found: dict[object, list[int]] = {}
        for v in self.p.placement:
            made = self.p.producer.get(v)
            if made is None and v not in self.p.free:
                continue
            maker = (v,) if made is None or v in targets else (self.class_of[made], self.p.items[made].outs.index(v))
            found.setdefault((maker, self.p.metas[v], tuple(sorted(reads.get(v, ())))), []).append(v)
        return [(values[0], len(values)) for values in found.values()]

    def value(self, v: int, weight: int) -> None:
        """Add the boxing of a value from the layouts it is made in to those needed, and its memory."""
        haves = self.made_in(v)
        needs = self.readers_of(v, self.p.wants)
        always = {self.p.target_need(t) for t in self.p.targets if t.value == v}
        for need in always | needs.keys():
            self.edges(v, weight, haves, need, needs.get(need, []), need in always)
        self.add_memory(v, weight, haves)

    def made_in(self, v: int) -> dict[int, dict[int, float]]:
        """The layouts that a value is made in, each with the options that make it so; B for what no item makes."""
        made = self.p.producer.get(v)
        if made is None:
            return {self.p.layout_id(B): {}}
        out = self.p.items[made].outs.index(v)
        found: dict[int, dict[int, float]] = {}
        for x, layouts in zip(self.x[self.class_of[made]], self.p.makes[made], strict=True):
            found.setdefault(layouts[out], {})[x] = 1.0
        return found

    def readers_of(
        self, v: int, listed: Sequence[Sequence[Sequence[tuple[int, int]]]]
    ) -> dict[int, list[dict[int, float]]]:
        """What readers need or keep of a value; for each class of readers, the options that need or keep it.

        ``listed`` has pairs (value, what is needed or kept of it), for each item and each of its options.
        """
        reader_of_class: dict[int, int] = {}
        for reader in self.p.readers.get(v, ()):
            reader_of_class.setdefault(self.class_of[reader], reader)
        found: dict[int, list[dict[int, float]]] = {}
        for c, reader in sorted(reader_of_class.items()):
            rows: dict[int, dict[int, float]] = {}
            for x, pairs in zip(self.x[c], listed[reader], strict=True):
                for value, what in pairs:
                    if value == v:
                        rows.setdefault(what, {})[x] = 1.0
            for what, row in rows.items():
                found.setdefault(what, []).append(row)
        return found

    def edges(
        self, v: int, weight: int, haves: dict[int, dict[int, float]], need: int,
        readers: list[dict[int, float]], always: bool,
    ) -> None:  # fmt: skip
        """Add edges: a need that some reader has must be met from a layout that the value has."""
        prices = {have: weight * self.p.edge(v, have, need) for have in haves}
        if not any(prices.values()):
            return
        z = {have: self.variable(price) for have, price in prices.items()}
        for have, xs in haves.items():
            if xs:
                self.least.append(({z[have]: -1.0, **xs}, 0.0))
        if always:
            self.least.append((dict.fromkeys(z.values(), 1.0), 1.0))
        for xs in readers:
            self.least.append(({**dict.fromkeys(z.values(), 1.0), **{x: -c for x, c in xs.items()}}, 0.0))

    def add_memory(self, v: int, weight: int, haves: dict[int, dict[int, float]]) -> None:
        """Add the memory of a value: as a variable, and where readers keep it."""
        p, where = self.p, self.p.placement[v]
        if v in p.variables:
            memory = self.memory.setdefault((where, "variables"), {})
            for layout, xs in haves.items():
                for x in xs:
                    memory[x] = memory.get(x, 0.0) + weight * p.held_bytes(v, layout)
        kind = "activations" if p.phase.get(v) == Phase.FORWARD else "gradients"
        for layout, readers in self.readers_of(v, p.kept).items():
            held = self.variable(0.0)
            for xs in readers:
                self.least.append(({held: 1.0, **{x: -c for x, c in xs.items()}}, 0.0))
            self.memory.setdefault((where, kind), {})[held] = weight * p.held_bytes(v, layout)

    def solve(self, budget: float | None) -> RelaxedSolution | None:
        least = list(self.least)
        if budget is not None:
            for where in {where for where, _ in self.memory}:
                for kind in ("activations", "gradients"):
                    row = {**self.memory.get((where, "variables"), {}), **self.memory.get((where, kind), {})}
                    # in units of the budget, so that the solver's tolerances mean the same for all models
                    least.append(({x: -c / budget for x, c in row.items()}, -1.0))
        # as if the latency were a CPU core's, so that the solver's tolerances mean the same for all hardware
        scale = CPU_CORE.latency_s / prices_of(self.p.hardware.slowest).latency
        found = solve(
            LinearProgram(
                np.array(self.cost) * scale,
                self.matrix([row for row, _ in least], -1.0),
                -np.array([low for _, low in least]),
                (0, 1),
                self.matrix(self.equal),
                np.ones(len(self.equal)),
            )
        )
        if found is None:
            return None
        price = 0.0
        if budget is not None:
            price = float(-found.marginals[len(self.least) :].sum()) / budget / scale
        return RelaxedSolution(tuple(tuple(found.x[x].tolist()) for x in self.x), found.cost / scale, price)

    def matrix(self, rows: Sequence[Row], factor: float = 1.0) -> SparseMatrix:
        """The rows, times ``factor``."""
        at = [i for i, row in enumerate(rows) for _ in row]
        columns = [x for row in rows for x in row]
        values = [factor * c for row in rows for c in row.values()]
        shape = len(rows), len(self.cost)
        return SparseMatrix(np.array(values, float), np.array(at, np.int64), np.array(columns, np.int64), shape)
