"""State a layout problem as linear constraints: the option of each class of items, and what is boxed to what.

There is one choice for each class of repeated items, whatever stages of a pipeline they are on.  Each operand takes a
value from the layout that it is made in to the one that is needed: as much of each layout leaves as is made, and as
much of each need arrives as there is.  What several readers need is paid for once.  With choices that are whole numbers
the cost is that of the search; without, it is a lower bound, which is mostly the cost of the best choice.

Most layouts are boxed to all needs but their own at the same price (from any split to any other).  Such layouts go
through a common node, so that there are not as many variables as pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.core.linear_program import LinearProgram, SparseMatrix
from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B
from actorflow_compiler.infer.problem import Problem

Row = Mapping[int, float]
Options = dict[int, float]  # variables of options, each with 1


@dataclass(slots=True)
class _AlikeLayouts:
    """Layouts of a value that are boxed to every need but those that they meet at the same price."""

    prices: dict[int, float] = field(default_factory=dict)  # need → s
    layouts: list[int] = field(default_factory=list)


class LayoutProgram:
    """Variables with costs in seconds, sums that they keep, and sums that are at least a number; all from 0 to 1."""

    def __init__(self, problem: Problem, classes: Sequence[Sequence[int]]) -> None:
        self.p, self.classes = problem, classes
        self.cost: list[float] = []
        self.equal: list[tuple[Row, float]] = []
        self.least: list[tuple[Row, float]] = []
        self.class_of = {i: c for c, members in enumerate(classes) for i in members}
        self.memory: dict[tuple[object, str], dict[int, float]] = {}  # (placement, kind) → variable → bytes
        self.x = [self._options(members) for members in classes]  # class by class, the variable of each option
        for group in self._groups():
            self._value(group)

    def linear(self, kept: NDArray[np.bool_], scale: float, budget: float | None, slack: float = 0.0) -> LinearProgram:
        """The program with the variables ``kept``, the others being 0, and costs times ``scale``.

        ``budget``: bytes of each device; a share of ``slack`` of it stays free.  The constraints for it come last.
        """
        least = list(self.least)
        if budget is not None:
            for where in {where for where, _ in self.memory}:
                for kind in ("activations", "gradients"):
                    row = {**self.memory.get((where, "variables"), {}), **self.memory.get((where, kind), {})}
                    # in units of the budget, so that the solver's tolerances mean the same for all models
                    least.append(({x: -c / budget for x, c in row.items()}, slack - 1.0))
        column = np.cumsum(kept) - 1
        return LinearProgram(
            np.array(self.cost)[kept] * scale,
            _matrix([row for row, _ in least], kept, column, -1.0),
            -np.array([low for _, low in least], float),
            (0, 1),
            _matrix([row for row, _ in self.equal], kept, column),
            np.array([total for _, total in self.equal], float),
        )

    def rank(self, c: int) -> tuple[bool, int, int]:
        """Smaller for classes on which more hangs: weights first, then what has the most readers and operands."""
        p, first = self.p, self.classes[c][0]
        around = sum(1 + len(p.readers.get(v, ())) for v in p.touched[first])
        return p.items[first].node >= 0, -around * len(self.classes[c]), c

    def _variable(self, cost: float = 0.0) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _options(self, members: Sequence[int]) -> list[int]:
        """Add a variable for the share of each option; the shares sum to 1."""
        own = self.p.items[members[0]].own
        x = [self._variable(len(members) * c) for c in own]
        self.equal.append((dict.fromkeys(x, 1.0), 1.0))
        return x

    def _groups(self) -> list[list[int]]:
        """Groups of values that the same classes make and read in the same way, over links of the same speed."""
        reads: dict[int, list[tuple[float, ...]]] = {}
        others: dict[int, dict[Placement, int]] = {}  # value → the further placements where it is read, numbered
        for i, item in enumerate(self.p.items):
            for j, v in enumerate(item.reads):
                where: tuple[float, ...] = ()
                if item.placement != self.p.placement[v]:
                    there = others.setdefault(v, {})
                    prices = self.p.prices(self.p.placement[v], item.placement)
                    near = self.p.prices(self.p.placement[v], self.p.placement[v])  # a value crosses in parts, or whole
                    number = there.setdefault(item.placement, len(there))
                    where = number, prices.bandwidth, prices.latency, near.bandwidth, near.latency
                reads.setdefault(v, []).append((self.class_of[i], j, *where))
        targets = {t.value for t in self.p.targets}
        found: dict[object, list[int]] = {}
        for v in self.p.placement:
            made = self.p.producer.get(v)
            if made is None and v not in self.p.free:
                continue
            maker = (v,) if made is None or v in targets else (self.class_of[made], self.p.items[made].outs.index(v))
            found.setdefault((maker, self.p.metas[v], tuple(sorted(reads.get(v, ())))), []).append(v)
        return list(found.values())

    def _value(self, group: Sequence[int]) -> None:
        """Add the boxing of values alike from the layouts they are made in to those needed, and their memory."""
        v, weight = group[0], len(group)
        haves = self._made_in(v)
        operands = self._operands_of(v)
        always = {self.p.target_need(t) for t in self.p.targets if t.value == v}
        needs = always.union(*operands)
        prices = {(h, n): weight * self.p.edge(v, h, n) for h in haves for n in sorted(needs)}
        if any(prices.values()):
            self._boxing(haves, operands, always, prices)
        self._memory_of(group, haves)

    def _made_in(self, v: int) -> dict[int, Options]:
        """The layouts that a value is made in, each with the options that make it so; B for what no item makes."""
        made = self.p.producer.get(v)
        if made is None:
            return {self.p.layout_id(B): {}}
        out = self.p.items[made].outs.index(v)
        found: dict[int, Options] = {}
        for x, layouts in zip(self.x[self.class_of[made]], self.p.makes[made], strict=True):
            found.setdefault(layouts[out], {})[x] = 1.0
        return found

    def _operands_of(self, v: int) -> list[dict[int, Options]]:
        """For each operand of each class of readers in a place: need → the options that have it."""
        found: dict[tuple[int, int, int], dict[int, Options]] = {}
        places: dict[Placement, int] = {}
        for reader in self.p.readers.get(v, ()):
            c, item = self.class_of[reader], self.p.items[reader]
            place = places.setdefault(item.placement, len(places))
            for j, value in enumerate(item.reads):
                if value != v or (c, j, place) in found:
                    continue
                rows = found[c, j, place] = {}
                for x, s in zip(self.x[c], item.options, strict=True):
                    rows.setdefault(self.p.need_id(v, s.ins[j], item), {})[x] = 1.0
        return [found[key] for key in sorted(found)]

    def _boxing(
        self, haves: dict[int, Options], operands: list[dict[int, Options]], always: set[int],
        prices: dict[tuple[int, int], float],
    ) -> None:  # fmt: skip
        """Add what it costs that each operand gets what it needs from what there is."""
        results: list[dict[int, Options]] = [{need: {}} for need in sorted(always)]
        rows_of = [*operands, *results]
        alike = self._alike(haves, prices)
        paid: dict[tuple[int, int], int] = {}  # (number of a group, need), (-1 - layout, need) if it is met → variable

        def passed(key: tuple[int, int], price: float) -> int:
            """A variable for what of an operand takes a way; the way is paid for once, however many take it."""
            if len(rows_of) == 1 or not price:
                return self._variable(price)
            if key not in paid:
                paid[key] = self._variable(price)
            taken = self._variable()
            self.least.append(({paid[key]: 1.0, taken: -1.0}, 0.0))
            return taken

        for rows in rows_of:
            arrives: dict[int, dict[int, float]] = {need: {} for need in rows}
            for number, group in enumerate(alike):
                leaves: dict[int, float] = {}
                for need in rows:
                    if need in group.prices:
                        way = passed((number, need), group.prices[need])
                        leaves[way] = arrives[need][way] = 1.0
                for have in group.layouts:
                    met: dict[int, float] = {}
                    for need in rows:
                        if self._meets(have, need):
                            way = passed((-1 - have, need), prices[have, need])
                            met[way] = arrives[need][way] = 1.0
                    if met and len(group.layouts) > 1:
                        self.least.append(({**haves[have], **dict.fromkeys(met, -1.0)}, 0.0))
                    leaves |= met | {x: -c for x, c in haves[have].items()}
                self.equal.append((leaves, 0.0 if haves[group.layouts[0]] else 1.0))
            for need, options in rows.items():
                total = 0.0 if options else 1.0  # a result is needed in any case
                self.equal.append(({**arrives[need], **{x: -c for x, c in options.items()}}, total))

    def _meets(self, have: int, need: int) -> bool:
        """Whether a layout is the one needed, though perhaps in another place."""
        return have == self.p.layout_of_need[need]

    def _alike(self, haves: Mapping[int, object], prices: Mapping[tuple[int, int], float]) -> list[_AlikeLayouts]:
        """The layouts in groups of those with equal prices, but for the needs that they meet themselves."""
        own: dict[int, dict[int, float]] = {have: {} for have in haves}
        for (have, need), price in prices.items():
            own[have][need] = price
        found: list[_AlikeLayouts] = []
        for have, costs in own.items():
            rest = {n: price for n, price in costs.items() if not self._meets(have, n)}
            for group in found:
                if all(group.prices.get(n, price) == price for n, price in rest.items()) and not any(
                    self._meets(h, n) and own[h][n] > group.prices.get(n, rest.get(n, own[h][n]))
                    for h in (*group.layouts, have)
                    for n in own[h]
                ):
                    break
            else:
                group = _AlikeLayouts()
                found.append(group)
            group.prices |= rest
            group.layouts.append(have)
        return found

    def _memory_of(self, group: Sequence[int], haves: dict[int, Options]) -> None:
        """Add the memory of values alike, each where it is: as variables, and where readers keep them."""
        p, v, held_at = self.p, group[0], Counter(self.p.placement[v] for v in group)
        if v in p.variables:
            for where, count in held_at.items():
                memory = self.memory.setdefault((where, "variables"), {})
                for layout, xs in haves.items():
                    for x in xs:
                        memory[x] = memory.get(x, 0.0) + count * p.held_bytes(v, layout)
        kind = "activations" if p.phase.get(v) == Phase.FORWARD else "gradients"
        for layout, readers in self._keepers_of(v).items():
            held = self._variable()
            for xs in readers:
                self.least.append(({held: 1.0, **{x: -c for x, c in xs.items()}}, 0.0))
            for where, count in held_at.items():
                self.memory.setdefault((where, kind), {})[held] = count * p.held_bytes(v, layout)

    def _keepers_of(self, v: int) -> dict[int, list[Options]]:
        """Layout in which readers keep a value → for each class of them, the options that do."""
        reader_of_class: dict[int, int] = {}
        for reader in self.p.readers.get(v, ()):
            reader_of_class.setdefault(self.class_of[reader], reader)
        found: dict[int, list[Options]] = {}
        for c, reader in sorted(reader_of_class.items()):
            rows: dict[int, Options] = {}
            for x, pairs in zip(self.x[c], self.p.kept[reader], strict=True):
                for value, layout in pairs:
                    if value == v:
                        rows.setdefault(layout, {})[x] = 1.0
            for layout, row in rows.items():
                found.setdefault(layout, []).append(row)
        return found


def _matrix(
    rows: Sequence[Row], kept: NDArray[np.bool_], column: NDArray[np.int64], factor: float = 1.0
) -> SparseMatrix:
    """The rows, times ``factor``, of the variables that are kept."""
    at = np.array([i for i, row in enumerate(rows) for _ in row], np.int64)
    variables = np.array([x for row in rows for x in row], np.int64)
    values = np.array([factor * c for row in rows for c in row.values()], float)
    here = kept[variables] if len(variables) else np.zeros(0, bool)
    return SparseMatrix(values[here], at[here], column[variables[here]], (len(rows), int(kept.sum())))
