"""Search for a choice of all items of a layout problem: a greedy walk, then local improvement.

The walk goes through the graph and takes the cheapest option given what came before.  Then every class
of repeated items is looked at again, with all its neighbours, until nothing gets cheaper; last every item
by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, PartialSum, Split
from actorflow_compiler.infer.problem import Problem
from actorflow_compiler.infer.reports import MemoryUse

SWEEPS = 8
DECIDED, RELEVANT = 0.8, 0.3  # shares: decided from here on; and, as a fraction of the largest share, worth trying
FADE = 0.8  # discount for each op that the look-ahead passes
CASCADE = 24  # most classes to change together when a value is made whole earlier than needed


@dataclass(frozen=True, slots=True)
class SearchStart:
    """Where a search begins."""

    name: str
    whole: bool = False  # the batch is not split, and prices include those of readers ahead
    gathered: bool = False  # variables are gathered where they are used
    variables: Mapping[int, int] | None = None  # item of a variable → option; others take the layout needed
    among: Mapping[int, Sequence[int]] = field(default_factory=dict)  # item of an op → options that are tried


class Search:
    """A choice for each item of a problem, and its price."""

    def __init__(self, problem: Problem, classes: Sequence[Sequence[int]], byte_price: float = 0.0) -> None:
        """``byte_price``: s for each byte that a device holds from one phase to another."""
        self.problem, self.byte_price = problem, byte_price
        self.tied = [list(c) for c in classes]
        self.single = [[i] for i in range(len(problem.items))]
        self.choice = [-1] * len(problem.items)
        self.have: dict[int, int] = {}
        self.needs: dict[int, Counter[int]] = {v: Counter() for v in problem.placement}
        self.kept: dict[int, Counter[int]] = {v: Counter() for v in problem.placement}
        self.whole_input = problem.layout_id(B)
        for t in problem.targets:
            self.needs[t.value][problem.target_need(t)] += 1
        self.have.update(dict.fromkeys(problem.free, self.whole_input))
        self._ahead: dict[tuple[int, int], float] = {}
        self.class_of = {i: c for c, members in enumerate(self.tied) for i in members}
        self._priced: dict[tuple[object, ...], tuple[float, ...]] = {}  # surroundings → prices of an item that has them

    # prices

    def value_price(self, v: int) -> float:
        """Seconds for all boxings of a value."""
        have = self.have.get(v, -1)
        total = 0.0
        if have >= 0:
            edges = self.problem.edges(v, have)
            for need, count in self.needs[v].items():
                if count:
                    total += edges[need]
        if self.byte_price:
            held = sum(self.problem.held_bytes(v, layout) for layout, count in self.kept[v].items() if count)
            if v in self.problem.variables and have >= 0:
                held += self.problem.held_bytes(v, have)
            total += self.byte_price * held
        return total

    def total(self) -> float:
        """Seconds of the whole choice."""
        own = sum(item.own[c] for item, c in zip(self.problem.items, self.choice, strict=True))
        return own + sum(self.value_price(v) for v in self.have)

    def held(self) -> dict[Placement, MemoryUse]:
        """The memory that each device of a placement uses."""
        p = self.problem
        found: dict[Placement, list[float]] = {}
        for v in p.variables:
            found.setdefault(p.placement[v], [0.0, 0.0, 0.0])[0] += p.held_bytes(v, self.have[v])
        for v, layouts in self.kept.items():
            at = 1 if p.phase.get(v) == Phase.FORWARD else 2
            for layout, count in layouts.items():
                if count:
                    found.setdefault(p.placement[v], [0.0, 0.0, 0.0])[at] += p.held_bytes(v, layout)
        return {where: MemoryUse(*sums) for where, sums in found.items()}

    def prices(self, i: int) -> tuple[float, ...]:
        """Seconds of each option of an item, if nothing else changes; costs that do not depend on it are left out."""
        around = self._surroundings(i)
        if around not in self._priced:
            item, now, touched = self.problem.items[i], self.choice[i], self.problem.touched[i]
            found = []
            for option in range(len(item.options)):
                self.put(i, option)
                found.append(item.own[option] + sum(map(self.value_price, touched)))
            self.put(i, now)
            self._priced[around] = tuple(found)
        return self._priced[around]

    def _surroundings(self, i: int) -> tuple[object, ...]:
        """All that the prices of an item's options depend on; it is equal for the items of most repeated blocks."""
        p, touched = self.problem, self.problem.touched[i]
        found: list[object] = [p.item_kind[i], self.choice[i], self.byte_price]
        if len(touched) < len(p.items[i].reads) + len(p.items[i].outs):  # which of them are the same value
            found.append(tuple(touched.index(v) if v >= 0 else v for v in (*p.items[i].reads, *p.items[i].outs)))
        for v in touched:
            found += (p.value_kind[v], self.have.get(v, -1), frozenset(self.needs[v].items()))
            if self.byte_price:
                found.append(frozenset(self.kept[v].items()))
        return tuple(found)

    # moves

    def _count(self, i: int, option: int, by: int) -> None:
        for counts, pairs in ((self.needs, self.problem.wants[i][option]), (self.kept, self.problem.kept[i][option])):
            for v, what in pairs:
                count = counts[v][what] + by
                if count:
                    counts[v][what] = count
                else:
                    del counts[v][what]

    def _set(self, i: int, option: int) -> None:
        self.choice[i] = option
        for o, layout in zip(self.problem.items[i].outs, self.problem.makes[i][option], strict=True):
            if o >= 0:
                self.have[o] = layout

    def put(self, i: int, option: int) -> None:
        """Give an item an option."""
        if self.choice[i] >= 0:
            self._count(i, self.choice[i], -1)
        self._count(i, option, 1)
        self._set(i, option)

    def walk(self, start: SearchStart) -> None:
        """Take the cheapest option for every item in graph order; variables are as ``start`` says."""
        p = self.problem
        self._ahead = self._look_ahead() if start.whole else {}
        later = []
        for i, item in enumerate(p.items):
            if start.gathered and p.is_use(i):
                self.put(i, 0)
            elif item.node >= 0:
                self._take_cheapest(i, start, start.among.get(i))
            elif len(item.options) == 1 or (start.variables and i in start.variables):
                self.put(i, start.variables.get(i, 0) if start.variables else 0)
            else:
                later.append(i)
        for i in later:
            v = p.items[i].outs[0]
            prices = []
            for option in range(len(p.items[i].options)):
                self.have[v] = p.makes[i][option][0]
                prices.append(self.value_price(v))
            self.put(i, prices.index(min(prices)))

    def round(self, shares: Sequence[Sequence[float]]) -> None:
        """Take the option with the largest share; where no share is decisive, the cheapest of them, in graph order."""
        self._ahead = {}
        open_items = []
        for members, mixture in zip(self.tied, shares, strict=True):
            most = max(mixture)
            for i in members:
                if most >= DECIDED:
                    self.put(i, mixture.index(most))
                else:
                    open_items.append((i, [o for o, share in enumerate(mixture) if share >= most * RELEVANT]))
        for i, options in sorted(open_items):
            self._take_cheapest(i, SearchStart("solver"), options)

    def _take_cheapest(self, i: int, start: SearchStart, among: Sequence[int] | None = None) -> None:
        p, item = self.problem, self.problem.items[i]
        best, least = 0, float("inf")
        for option in range(len(item.own)) if among is None else among:
            price = item.own[option]
            for v, need in p.wants[i][option]:
                if self.needs[v][need]:
                    continue
                have = self.have.get(v, -1)
                sbp = p.needs[need][0]
                if have < 0:
                    price += p.forbidden if v in p.possible and sbp not in p.possible[v] else 0.0
                    continue
                if v in p.free and start.whole and isinstance(sbp, Split):
                    price += p.forbidden
                elif isinstance(p.layouts[have], PartialSum) and isinstance(sbp, Split):
                    price += p.edge(v, have, p.whole_need(need))  # most sums are wanted whole in the end
                else:
                    price += p.edge(v, have, need)
            for o, layout in zip(item.outs, p.makes[i][option], strict=True):
                price += self._ahead.get((o, layout), 0.0)
                if among is not None and o >= 0:  # some readers are decided
                    price += sum(p.edge(o, layout, need) for need, count in self.needs[o].items() if count)
            if price < least - 1e-15:
                best, least = option, price
        self.put(i, best)

    def _look_ahead(self) -> dict[tuple[int, int], float]:
        """(value, layout) → estimated seconds of the dearest path of readers, each taking its cheapest option."""
        p = self.problem
        ahead: dict[tuple[int, int], float] = {}
        after: dict[tuple[int, int], dict[tuple[int, ...], float]] = {}  # (reader, value) → its needs → s from there on
        for i in range(len(p.items) - 1, -1, -1):
            item = p.items[i]
            for o, layouts in zip(item.outs, zip(*p.makes[i], strict=True), strict=True):
                if o < 0:
                    continue
                readers = [after[r, o] for r in p.readers.get(o, ()) if p.items[r].node >= 0]
                for have in set(layouts):
                    ahead[o, have] = max((self._cost_ahead(o, have, needs) for needs in readers), default=0.0)
            if item.node < 0:
                continue
            for v in set(item.reads):
                after[i, v] = {}
            for own, made, wanted in zip(item.own, p.makes[i], p.wants[i], strict=True):
                later = max((ahead.get(pair, 0.0) for pair in zip(item.outs, made, strict=True)), default=0.0)
                seconds = own + FADE * later
                for v in set(item.reads):
                    needs = tuple(need for w, need in wanted if w == v)
                    after[i, v][needs] = min(seconds, after[i, v].get(needs, seconds))
        return ahead

    def _cost_ahead(self, v: int, have: int, after: Mapping[tuple[int, ...], float]) -> float:
        edges = self.problem.edges(v, have)
        return min(seconds + sum(map(edges.__getitem__, needs)) for needs, seconds in after.items())

    def improve(self, members: Sequence[int], forced: Sequence[int] | None = None) -> float:
        """Give tied items their best option among unchanged neighbours, or forced ones; returns the change in s."""
        p = self.problem
        options = len(p.items[members[0]].options)
        old = [self.choice[i] for i in members]
        if options == 1 or (forced is not None and list(forced) == old):
            return 0.0
        one = None if forced is None else forced[0]
        if len({v for i in members for v in p.touched[i]}) == sum(len(p.touched[i]) for i in members) and (
            forced is None or all(option == one for option in forced)
        ):
            return self._improve_apart(members, one)
        touched = {v for i in members for v in (*p.items[i].reads, *p.items[i].outs) if v >= 0}
        prices = {}
        for option in range(options) if forced is None else (-1,):
            for n, i in enumerate(members):
                self.put(i, option if forced is None else forced[n])
            own = sum(p.items[i].own[self.choice[i]] for i in members)
            prices[option] = own + sum(map(self.value_price, touched))
        uniform = len(set(old)) == 1
        if forced is None and uniform:
            before = prices[old[0]]
        else:
            last = [self.choice[i] for i in members]
            for i, option in zip(members, old, strict=True):
                self.put(i, option)
            own = sum(p.items[i].own[self.choice[i]] for i in members)
            before = own + sum(map(self.value_price, touched))
            if forced is not None:
                for i, option in zip(members, last, strict=True):
                    self.put(i, option)
                return prices[-1] - before
        best = min(prices, key=lambda o: (prices[o], o))
        if prices[best] >= before - 1e-12:
            for i, option in zip(members, old, strict=True):
                self.put(i, option)
            return 0.0
        for i in members:
            self.put(i, best)
        return prices[best] - before

    def _improve_apart(self, members: Sequence[int], forced: int | None) -> float:
        """As ``improve``, for items of which no two read or make the same value: the prices of each are its own."""
        before, sums = 0.0, [0.0] * len(self.problem.items[members[0]].options)
        for (now, prices), count in Counter((self.choice[i], self.prices(i)) for i in members).items():
            before += count * prices[now]
            sums = [total + count * price for total, price in zip(sums, prices, strict=True)]
        best = sums.index(min(sums)) if forced is None else forced
        if forced is None and sums[best] >= before - 1e-12:
            return 0.0
        for i in members:
            self.put(i, best)
        return sums[best] - before

    def sweep(self, classes: Sequence[Sequence[int]]) -> None:
        """Improve class by class, back and forth, until nothing gets cheaper; revisits only neighbours of changes."""
        p = self.problem
        where = {i: c for c, members in enumerate(classes) for i in members}
        dirty = set(range(len(classes)))
        for number in range(SWEEPS):
            order = sorted(dirty, reverse=not number % 2)
            dirty = set()
            for c in order:
                if self.improve(classes[c]) < 0:
                    for i in classes[c]:
                        item = p.items[i]
                        for v in (*item.reads, *item.outs):
                            dirty.update(where[r] for r in p.readers.get(v, ()))
                            if v in p.producer:
                                dirty.add(where[p.producer[v]])
                    dirty.discard(c)
            if not dirty:
                break

    def settle(self) -> None:
        """Improve until nothing gets cheaper: tied classes, then cascades, then single items."""
        self.sweep(self.tied)
        if sum(self._cascade(c) for c in range(len(self.tied))):
            self.sweep(self.tied)
        self.sweep(self.single)

    def polish(self, fits: Callable[[Search], bool]) -> None:
        """Improve without a price of memory, class by class, as long as the choice fits."""
        self.byte_price = 0.0
        for members in (*self.tied, *reversed(self.tied)):
            before = [self.choice[i] for i in members]
            if self.improve(members) < 0 and not fits(self):
                for i, option in zip(members, before, strict=True):
                    self.put(i, option)

    def _cascade(self, c: int) -> bool:
        """Try a class with whole outputs, and its readers after it.

        Adding a value up once may be cheaper than once for each reader, and a part that is cut from a whole
        value here may have to be gathered later.
        """
        p, i = self.problem, self.tied[c][0]
        item, now = p.items[i], self.choice[i]
        if item.node < 0 or item.work or now == 0:
            return False
        s = item.options[now]
        cut = any(
            p.layouts[self.have[v]] == B and isinstance(sbp, Split) and v not in p.free
            for v, sbp in zip(item.reads, s.ins, strict=True)
        )
        if not cut and not any(isinstance(o, PartialSum) for o in s.outs):
            return False
        cone, seen = [c], {c}
        for k in cone:
            for m in self.tied[k]:
                for o in p.items[m].outs:
                    for r in p.readers.get(o, ()):
                        other = self.class_of[r]
                        if other not in seen and len(cone) < CASCADE and not p.items[r].work:
                            seen.add(other)
                            cone.append(other)
        before = [(k, [self.choice[m] for m in self.tied[k]]) for k in cone]
        change = self.improve(self.tied[c], [0] * len(self.tied[c]))
        change += sum(self.improve(self.tied[k]) for k in sorted(cone[1:]))
        if change < -1e-9:
            return True
        for k, old in before:
            self.improve(self.tied[k], old)
        return False
