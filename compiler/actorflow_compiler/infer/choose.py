"""Choose the layouts along one mesh axis: search from several starts, within the memory budget.

The search begins from templates (data parallel, ZeRO, tensor parallel) and from the solver's relaxation,
and keeps the best that fits the budget.  Memory has a price, which rises until the budget holds.  Where the best stays
above the relaxation's bound, the integer program is solved, and is a further start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.linear_program import Ended
from actorflow_compiler.core.sbp import B, Split, show
from actorflow_compiler.hints.goal import WHOLE_VARIABLES, Goal, ParallelMode
from actorflow_compiler.infer.problem import LayoutItem, Problem
from actorflow_compiler.infer.relax import (
    GAP,
    LARGEST,
    LARGEST_INTEGER,
    LIMITS,
    IntegerChoice,
    RelaxedSolution,
    decide,
    dive,
    relax,
)
from actorflow_compiler.infer.repeated_blocks import group_repeated
from actorflow_compiler.infer.reports import Alternative, AxisReport, Explanation, MemoryUse, size_text
from actorflow_compiler.infer.search import Search, SearchStart
from actorflow_compiler.infer.sequence_axis import HEADS_START, RING_START, SEQUENCE_START

CHEAPEST = 1e-11  # s for each byte held: the lowest initial price of memory
DEAREST = 1e-5  # s for each byte held: a higher price saves no more memory
STEP = 4.0  # factor by which the price rises
ASTRAY, WORTH = 0.5, 1e-3  # share of all seconds, and seconds, of boxing that data parallelism does not need
INTEGER = "integer program"  # the name of that start
BELOW = 3  # the search begins this many steps below the solver's price


def choose(problem: Problem, goal: Goal, rest: int, explain: str | None) -> tuple[list[int], AxisReport]:
    """Decide an axis; ``rest`` is the factor by which later axes can still divide the bytes that a device holds.

    Raises LayoutError if no choice fits the memory budget.
    """
    return _AxisChoice(problem, goal, rest).run(explain)


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound of all choices of tied items."""

    seconds: float | None  # None: not known
    note: str = ""  # why a gap remains


def closed(bound: float | None, seconds: float) -> bool:
    """Whether a choice is as near to the bound as it needs to be."""
    return bound is not None and bound >= seconds * (1 - GAP)


def bound_of(integer: IntegerChoice, seconds: float) -> Bound:
    """The bound that the integer program gives for a choice that costs ``seconds``, and why it is not closer."""
    program = f"an integer program of {integer.variables:,} variables"
    why = {
        Ended.NODES: f"{LIMITS.nodes:,} branches of {program} did not close it",
        Ended.SECONDS: f"{program} was given up after {LIMITS.seconds:.0f} s",
        Ended.FAILED: f"{program} could not be solved",
        None: f"{program} is larger than those of {LARGEST_INTEGER:,} that are solved",
    }
    return Bound(integer.bound, "" if closed(integer.bound, seconds) else why.get(integer.ended, ""))


def unsolved(relaxed: RelaxedSolution) -> Bound:
    """No bound, as the program is too large."""
    return Bound(None, f"the program has {relaxed.variables:,} variables, more than the {LARGEST:,} that are solved")


class _AxisChoice:
    def __init__(self, problem: Problem, goal: Goal, rest: int) -> None:
        self.p, self.goal = problem, goal
        self.rest = rest
        self.budget = None if goal.budget is None else max(goal.budget - goal.taken, 1.0) * rest
        names = [(item.name, item.kind) for item in problem.items]
        producers = [[problem.producer[v] for v in item.reads if v in problem.producer] for item in problem.items]
        self.classes = group_repeated(names, producers)

    def run(self, explain: str | None) -> tuple[list[int], AxisReport]:
        found = self.run_searches(0.0)
        bound = Bound(None)
        if self.p.mode not in WHOLE_VARIABLES or self.budget is not None or self.astray(found[0][1]):
            found, bound = self.with_solver(found)
        start, best = min(found, key=lambda f: self.seconds(f[1]))
        if not self.fits(best):
            start, best, bound = self.within_budget(found, best)
        report = AxisReport(
            self.p.axis, self.p.mode, start, len(self.p.items), len(self.classes), self.seconds(best),
            None if bound.seconds is None else min(bound.seconds, self.seconds(best)), bound.note,
            max(best.held().values(), key=lambda h: h.peak, default=MemoryUse(0.0, 0.0, 0.0)),
            tuple(self.explanations(best, explain)) if explain is not None else (),
        )  # fmt: skip
        return best.choice, report

    def astray(self, search: Search) -> bool:
        """Whether a data parallel choice moves so much beside gradients that the solver may well save its own time.

        Only along one of several axes: where it is the only one, each device reads its own rows of the batch.
        """
        boxed = sum(
            self.p.edge(v, search.have[v], need)
            for v, needs in search.needs.items()
            for need in needs
            if v in search.have and not self.p.needs[need][2]
        )
        return (
            self.p.mode == ParallelMode.DATA
            and any(len(where.hierarchy) > 1 for where in self.p.placement.values())
            and not self.p.mirrored
            and boxed > max(WORTH, ASTRAY * self.seconds(search))
        )

    def with_solver(self, found: list[tuple[str, Search]]) -> tuple[list[tuple[str, Search]], Bound]:
        """Search from the relaxation's solution as well, and from the integer program's where a gap remains."""
        least = min(self.seconds(s) for _, s in found)
        solved = relax(self.p, self.classes, None, least, least)
        if solved is None:  # nothing is cheaper
            return found, Bound(least)
        if solved.bound is None:
            return found, unsolved(solved)
        found = [*found, self.from_mixture(solved.shares)]
        least = min(self.seconds(s) for _, s in found)
        if not closed(solved.bound, least) and (mixture := dive(solved, None, least)):
            found = [*found, self.from_mixture(mixture)]
            least = min(least, self.seconds(found[-1][1]))
        if closed(solved.bound, least):
            return found, Bound(solved.bound)
        integer = decide(solved, None, least)
        if integer.options:
            found = [*found, (INTEGER, self.of_classes(integer.options))]
            found[-1][1].settle()
            least = min(least, self.seconds(found[-1][1]))
        return found, bound_of(integer, least)

    def from_mixture(self, shares: Sequence[Sequence[float]]) -> tuple[str, Search]:
        """The search from the choice nearest to a mixture of options."""
        search = self.rounded(shares)
        search.settle()
        return "solver", search

    def rounded(self, shares: Sequence[Sequence[float]]) -> Search:
        """The choice nearest to a mixture of options, class by class."""
        search = Search(self.p, self.classes)
        search.round(shares)
        return search

    def of_classes(self, options: Sequence[int]) -> Search:
        """The choice that gives all items of a class the same option."""
        search = Search(self.p, self.classes)
        for members, option in zip(self.classes, options, strict=True):
            for i in members:
                search.put(i, option)
        return search

    def starts(self) -> Iterator[SearchStart]:
        """The templates of a mode."""
        items = self.p.items
        variables = {i for i, item in enumerate(items) if item.node < 0}
        whole = {i: self.option(i, B) for i in variables}
        if self.p.mode == ParallelMode.TENSOR:
            yield SearchStart("tensor", whole=True, variables={i: 0 for i in variables if len(items[i].options) == 1})
            return
        around = (RING_START,) if any(op.ring for op in self.p.along) else ()
        for name in (SEQUENCE_START, *around, HEADS_START) if self.p.along else ():
            ops = ((i, self.p.along[item.node]) for i, item in enumerate(items) if item.node >= 0)
            yield SearchStart(name, variables=whole, among={i: op.first(name) for i, op in ops})
        yield SearchStart("data", variables=whole)
        if self.p.mode == ParallelMode.AUTO or self.p.hinted:
            yield SearchStart("hinted", whole=True, variables=whole)
        if self.p.mode == ParallelMode.AUTO:
            states = {i for i in variables if self.p.state(i)}
            cut = {i: self.first_cut(i) for i in variables}
            yield SearchStart("zero 1", variables={i: cut[i] if i in states else whole[i] for i in variables})
            yield SearchStart("zero 3", gathered=True, variables=cut)
            yield SearchStart("tensor", whole=True, variables={i: 0 for i in variables if len(items[i].options) == 1})

    def option(self, i: int, layout: object) -> int:
        """The option of a variable for a layout, else its first."""
        found = [o for o, s in enumerate(self.p.items[i].options) if s.outs[0] == layout]
        return found[0] if found else 0

    def first_cut(self, i: int) -> int:
        """The first option that splits a variable, else its first."""
        found = [o for o, s in enumerate(self.p.items[i].options) if isinstance(s.outs[0], Split)]
        return found[0] if found else 0

    def run_searches(
        self, price: float, solved: RelaxedSolution | None = None, warm: Search | None = None
    ) -> list[tuple[str, Search]]:
        """Search from all starts, at a price for each byte held; returns (name of the start, search) for each."""
        searches: list[tuple[str, Search]] = []
        for start in self.starts():
            search = Search(self.p, self.classes, price)
            search.walk(start)
            searches.append((start.name, search))
        if solved is not None and solved.shares:
            search = self.rounded(solved.shares)
            search.byte_price = price
            searches.append(("solver", search))
        if warm is not None:
            search = Search(self.p, self.classes, price)
            for i, option in enumerate(warm.choice):
                search.put(i, option)
            searches.append(("without budget", search))
        for _, search in searches:
            search.settle()
        return searches

    def within_budget(self, found: list[tuple[str, Search]], free: Search) -> tuple[str, Search, Bound]:
        """The cheapest choice that fits the budget.

        The relaxation's solution is taken where it fits and is near the bound.  Else the price of memory rises until it
        exceeds the solver's, and the integer program closes what gap remains.
        """
        solved = relax(self.p, self.classes, self.budget, self.seconds(free))
        if solved is None:
            tried = self.run_searches(DEAREST, None, free)
            raise self.refusal(self.smallest(tried))
        if solved.bound is not None:
            found = [*found, ("solver", self.rounded(solved.shares))]
        name, best = self.cheapest(found)
        if best is not None and closed(solved.bound, self.seconds(best)):
            return name, best, Bound(solved.bound)
        price = max(solved.byte_price / STEP**BELOW, CHEAPEST)
        while price <= DEAREST and (price < solved.byte_price * STEP or not any(self.fits(s) for _, s in found)):
            found = found + self.run_searches(price, solved, free)
            price *= STEP
        name, best = self.cheapest(found)
        if solved.bound is None:
            if best is None:
                raise self.refusal(self.smallest(found))
            return name, best, unsolved(solved)
        least = float("inf") if best is None else self.seconds(best)
        if best is not None and closed(solved.bound, least):
            return name, best, Bound(solved.bound)
        if shares := dive(solved, self.budget, least):
            found = [*found, ("solver", self.rounded(shares))]
            name, best = self.cheapest(found)
            least = float("inf") if best is None else self.seconds(best)
            if best is not None and closed(solved.bound, least):
                return name, best, Bound(solved.bound)
        integer = decide(solved, self.budget, least)
        if integer.options:
            name, best = self.cheapest([*found, (INTEGER, self.of_classes(integer.options))])
        if best is None:
            raise self.refusal(self.smallest(found))
        return name, best, bound_of(integer, self.seconds(best))

    def cheapest(self, found: list[tuple[str, Search]]) -> tuple[str, Search | None]:
        """The cheapest choice that fits the budget, improved while it does; None if none fits."""
        fitting = [(name, search) for name, search in found if self.fits(search)]
        if not fitting:
            return "", None
        name, best = min(fitting, key=lambda f: self.seconds(f[1]))
        best.polish(self.fits)
        return name, best

    def smallest(self, found: list[tuple[str, Search]]) -> Search:
        """The choice that needs the least memory."""
        return min((s for _, s in found), key=lambda s: max(h.peak for h in s.held().values()))

    def fits(self, search: Search) -> bool:
        """Whether every device holds no more than the budget."""
        return self.budget is None or all(h.peak <= self.budget for h in search.held().values())

    def seconds(self, search: Search) -> float:
        """The price of a choice without that of its memory."""
        price, search.byte_price = search.byte_price, 0.0
        try:
            return search.total()
        finally:
            search.byte_price = price

    def refusal(self, least: Search) -> LayoutError:
        """The error for a budget that no choice fits."""
        assert self.goal.budget is not None
        where, held = max(least.held().items(), key=lambda item: item[1].peak)
        scale, taken = 1 / self.rest, self.goal.taken
        parts = {"variables": held.variables, "activations": held.activations, "gradients": held.gradients}
        others = f", {size_text(taken)} of variables that only other jobs use" if taken else ""
        big = sorted(
            ((self.p.held_bytes(item.outs[0], self.p.makes[i][least.choice[i]][0]), item.name)
             for i, item in enumerate(self.p.items) if item.node < 0 and item.placement == where),
            reverse=True,
        )[:3]  # fmt: skip
        error = LayoutError(
            f"no layout fits a memory budget of {size_text(self.goal.budget)} for each device; the least that was "
            f"found needs {size_text(held.peak * scale + taken)} on each device of {where}: "
            + ", ".join(f"{size_text(n * scale)} of {what}" for what, n in parts.items())
            + others
            + "; the largest variables are "
            + ", ".join(f"{name} ({size_text(n * scale)})" for n, name in big)
            + ". Use more devices, more micro-batches, a smaller batch or a larger budget"
        )
        error.needed = held.peak * scale + taken
        return error

    def explanations(self, search: Search, pattern: str) -> Iterator[Explanation]:
        """The alternatives of the items whose name or op a pattern matches."""
        for i, item in enumerate(self.p.items):
            op = self.p.graph.nodes[item.node].op if item.node >= 0 else "variable"
            if not (re.fullmatch(pattern, item.name) or re.fullmatch(pattern, op)):
                continue
            now = search.choice[i]
            prices = search.prices(i)
            order = sorted(range(len(prices)), key=lambda o: prices[o])
            yield Explanation(
                item.name, f"{op} ({item.phase})" if item.node >= 0 else op, self.p.axis,
                tuple(self.alternative_of(item, o, prices[o] - prices[now], o == now) for o in order),
            )  # fmt: skip

    def alternative_of(self, item: LayoutItem, option: int, seconds: float, chosen: bool) -> Alternative:
        """An option of an item that costs ``seconds`` more than the chosen one, for a report."""
        s = item.options[option]
        text = str(s) if item.node >= 0 else show(s.outs[0] or B)
        against = ""
        if item.work and s.letter is None and self.p.size(item.placement) > 1:
            against = "the same work on every device"
        elif seconds >= self.p.forbidden / 2:
            against = f'not with parallel="{self.p.mode}"'
        return Alternative(text, seconds, chosen, s.source, against)
