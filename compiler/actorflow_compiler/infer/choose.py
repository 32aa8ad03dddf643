"""A problem and a goal go in; the choice of every item, and what is known of how good it is, come out.

The search begins from templates (data parallel, ZeRO, tensor parallel) and from the solver's relaxation,
and keeps the best that fits the budget.  Memory has a price, which rises until the budget holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from actorflow_compiler.errors import LayoutError
from actorflow_compiler.infer.goal import Alternative, AxisReport, Explanation, Goal, Held
from actorflow_compiler.infer.problem import Problem
from actorflow_compiler.infer.relax import Relaxed, relax
from actorflow_compiler.infer.search import Search, Start
from actorflow_compiler.infer.ties import tie
from actorflow_compiler.sbp import B, Split, show

CHEAPEST = 1e-12  # s for each byte held: where the price begins to rise
DEAREST = 1e-5  # s for each byte held: no memory is saved at a higher price
STEP = 4.0  # by which it rises
HALVINGS = 3  # steps between a price under which the budget does not hold and one under which it does


def choose(problem: Problem, goal: Goal, rest: int, explain: str | None) -> tuple[list[int], AxisReport]:
    """Decide an axis; ``rest`` is by how much later axes can divide what a device holds.

    Raises LayoutError for a budget that nothing fits.
    """
    return _Choice(problem, goal, rest).run(explain)


class _Choice:
    def __init__(self, problem: Problem, goal: Goal, rest: int) -> None:
        self.p, self.goal = problem, goal
        self.budget = None if goal.budget is None else goal.budget * rest
        names = [(item.name, item.kind) for item in problem.items]
        producers = [[problem.producer[v] for v in item.reads if v in problem.producer] for item in problem.items]
        self.classes = tie(names, producers)

    def run(self, explain: str | None) -> tuple[list[int], AxisReport]:
        solved = relax(self.p, self.classes, None) if self.p.mode != "data" or self.budget is not None else None
        best, start = self.searched(0.0, solved)
        if not self.fits(best):
            solved = relax(self.p, self.classes, self.budget)
            best, start = self.within_budget(best, solved)
        report = AxisReport(
            self.p.axis, self.p.mode, start, len(self.p.items), len(self.classes), self.seconds(best),
            min(solved.bound, self.seconds(best)) if solved else None,
            max(best.held().values(), key=lambda h: h.peak, default=Held(0.0, 0.0, 0.0)),
            tuple(self.explained(best, explain)) if explain is not None else (),
        )  # fmt: skip
        return best.choice, report

    def starts(self) -> Iterator[Start]:
        """The templates of a mode."""
        items = self.p.items
        variables = {i for i, item in enumerate(items) if item.node < 0}
        whole = {i: self.option(i, B) for i in variables}
        if self.p.mode == "tensor":
            yield Start("tensor", True, {i: 0 for i in variables if len(items[i].options) == 1})
            return
        yield Start("data", False, whole)
        if self.p.mode == "auto" or self.p.hinted:
            yield Start("hinted", True, whole)
        if self.p.mode == "auto":
            states = {i for i in variables if self.p.state(i)}
            cut = {i: self.first_cut(i) for i in variables}
            yield Start("zero 1", False, {i: cut[i] if i in states else whole[i] for i in variables})
            yield Start("zero 3", False, cut)
            yield Start("tensor", True, {i: 0 for i in variables if len(items[i].options) == 1})

    def option(self, i: int, layout: object) -> int:
        """The option of a variable for a layout, else its first."""
        found = [o for o, s in enumerate(self.p.items[i].options) if s.outs[0] == layout]
        return found[0] if found else 0

    def first_cut(self, i: int) -> int:
        """The first option that splits a variable, else its first."""
        found = [o for o, s in enumerate(self.p.items[i].options) if isinstance(s.outs[0], Split)]
        return found[0] if found else 0

    def searched(self, price: float, solved: Relaxed | None, warm: Search | None = None) -> tuple[Search, str]:
        """The best of the searches from all starts, at a price for each byte held."""
        begun: list[tuple[str, Search]] = []
        for start in self.starts():
            search = Search(self.p, self.classes, price)
            search.walk(start)
            begun.append((start.name, search))
        if solved is not None:
            search = Search(self.p, self.classes, price)
            search.round(solved.shares)
            begun.append(("solver", search))
        if warm is not None:
            search = Search(self.p, self.classes, price)
            for i, option in enumerate(warm.choice):
                search.put(i, option)
            begun.append(("without budget", search))
        for _, search in begun:
            search.settle()
        name, best = min(begun, key=lambda found: (not self.fits(found[1]), found[1].total()))
        return best, name

    def within_budget(self, free: Search, solved: Relaxed | None) -> tuple[Search, str]:
        """Raise the price of memory until the budget holds, then lower it as far as it does."""
        if solved is None:
            raise LayoutError(self.refusal(self.searched(DEAREST, None, free)[0]))
        low, high = 0.0, max(solved.byte_price, CHEAPEST)
        found, name = self.searched(high, solved, free)
        while not self.fits(found):
            if high > DEAREST:
                raise LayoutError(self.refusal(found))
            low, high = high, high * STEP
            found, name = self.searched(high, solved, free)
        for _ in range(HALVINGS):
            middle = (low * high) ** 0.5 if low else high / STEP
            tried, tried_name = self.searched(middle, solved, free)
            if not self.fits(tried):
                low = middle
                continue
            high = middle
            if self.seconds(tried) <= self.seconds(found):
                found, name = tried, tried_name
        return found, name

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

    def refusal(self, least: Search) -> str:
        """What to say of a budget that nothing fits."""
        assert self.goal.budget is not None
        where, held = max(least.held().items(), key=lambda item: item[1].peak)
        scale = self.goal.budget / (self.budget or 1.0)
        parts = {"variables": held.variables, "activations": held.activations, "gradients": held.gradients}
        big = sorted(
            ((self.p.held_bytes(item.outs[0], self.p.makes[i][least.choice[i]][0]), item.name)
             for i, item in enumerate(self.p.items) if item.node < 0 and item.placement == where),
            reverse=True,
        )[:3]  # fmt: skip
        return (
            f"no layout fits a memory budget of {size(self.goal.budget)} for each device; the least that was found "
            f"needs {size(held.peak * scale)} on each device of {where}: "
            + ", ".join(f"{size(n * scale)} of {what}" for what, n in parts.items())
            + "; the largest variables are "
            + ", ".join(f"{name} ({size(n * scale)})" for n, name in big)
            + ". Use more devices, more micro-batches, a smaller batch or a larger budget"
        )

    def explained(self, search: Search, pattern: str) -> Iterator[Explanation]:
        """What the items whose name or op a pattern matches could have been."""
        for i, item in enumerate(self.p.items):
            op = self.p.graph.nodes[item.node].op if item.node >= 0 else "variable"
            if not (re.fullmatch(pattern, item.name) or re.fullmatch(pattern, op)):
                continue
            now = search.choice[i]
            prices = search.prices(i)
            yield Explanation(
                item.name, f"{op} ({item.phase})" if item.node >= 0 else op, self.p.axis,
                tuple(
                    Alternative(
                        str(s) if item.node >= 0 else show(s.outs[0] or B), prices[o] - prices[now], o == now, s.source
                    )
                    for o, s in sorted(enumerate(item.options), key=lambda pair: prices[pair[0]])
                ),
            )  # fmt: skip


def size(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB"):
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
