"""Schedule a step: choose the best of its plans, give it frozen orders and slot counts, and prove it deadlock-free."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.schedule_names import ScheduleName, schedule_name
from actorflow_compiler.core.units import seconds_text
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.summary import summarise
from actorflow_compiler.plan.unfold import unfold_ranks
from actorflow_compiler.plan.variant import AHEAD, Variant
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler.cost import max_workspace_bytes
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.gathers_ahead import SPARE, GatheredChunks, gathered_chunks, with_gathers_at_once
from actorflow_scheduler.pipeline import SCHEDULES
from actorflow_scheduler.portfolio import SAME, STEADY, Candidate, Portfolio
from actorflow_scheduler.portfolio import period as period_of
from actorflow_scheduler.proof import WHAT_TO_DO, prove_folded, prove_groups, too_much
from actorflow_scheduler.published_orders import B
from actorflow_scheduler.rank_classes import every_rank, fold, with_orders_of
from actorflow_scheduler.slots import SlotPlanner
from actorflow_scheduler.timeline import Timeline, nanoseconds

__all__ = ["SCHEDULES", "schedule", "schedule_folded"]

Made = Plan | FoldedPlan

Memory = Mapping[int, int]  # rank → most bytes for its live registers and the largest workspace together
WORTH = 0.01  # gathers run further ahead only if that shortens the period by this fraction
IN_TURN = 2 * AHEAD  # the most chunks of a pass that are tried where memory is not known, if micro-batches gather anew


def schedule(
    make: Callable[[Variant], Made] | Made,
    hardware: Hardware = CPU_CORE,
    memory: Memory | None = None,
    name: str = "auto",
    room: Memory | None = None,
    beside: bool = True,
) -> Plan:
    """Give a plan, or the best of the variants that ``make`` makes, orders and slot counts, and prove it.

    Of ranks that are alike one is scheduled and proven, for all of them.  A plan that lists one rank of each class
    (``FoldedStep.cut``) becomes the plan of all ranks.
    ``name`` is one of SCHEDULES: "auto" searches for the shortest period, and among equal periods for the least memory;
    any other name stands for that published schedule.  ``memory`` caps, for some ranks, the peak bytes of live
    registers and workspace; to stay below the caps, the plan may become slower, also by recomputing forward values.
    ``room`` is how many such bytes all ranks have, where that is known: gathers of parameters run further ahead where
    that is faster and fits.  It is no cap: a plan that does not fit even so stays as it is.  ``beside`` says whether
    gathers run while ranks compute; where they do not, it is never faster.

    Raises DeadlockError if no slot counts let the plan run; PlanError if it is not legal, does not fit the memory, or
    its stages do not fit the schedule; CallError for an unknown name; UnlikeError as ``unfold_ranks``.
    """
    search = _Search(make, hardware, memory or {}, schedule_name(name))
    found, told = search.run_ahead(room, beside)
    folded = search.proven(found)
    plan = search.unfolded(found)
    notes = (*plan.notes, *told, *search.told(found, folded))
    return summarise(prove_groups(verify(replace(plan, notes=notes))))


def schedule_folded(
    make: Callable[[Variant], FoldedPlan] | FoldedPlan,
    hardware: Hardware = CPU_CORE,
    memory: Memory | None = None,
    name: str = "auto",
    room: Memory | None = None,
    beside: bool = True,
    proven: bool = True,
) -> FoldedPlan:
    """As ``schedule``, for plans of one rank of each class (``FoldedStep.cut``); the result is for ``forecast``.

    ``hardware`` is that by which ranks were found to be alike.  ``memory`` and ``room`` are for ranks, listed or not.
    It lists the ranks, and has the orders and slots, that the plan of all ranks has when it is scheduled and folded.
    Its summary says only what the compiler knows.  Without ``proven`` it is not proved, and says nothing of how it was
    found, nor an error of which schedule would fit: to be compared with others.  Raises as ``schedule``.
    """
    search = _Search(make, hardware, memory or {}, schedule_name(name), advises=proven)
    found, told = search.run_ahead(room, beside)
    if not proven:
        return search.with_orders(found)
    folded = search.proven(found)
    return replace(folded, plan=replace(found.plan, notes=(*found.plan.notes, *told, *search.told(found, folded))))


@dataclass(frozen=True, slots=True)
class _SizedCandidate:
    """A candidate with slot counts."""

    name: str
    variant: Variant
    plan: Plan  # folded to one rank of each class
    period: float  # nanoseconds
    peak: Mapping[int, int]  # rank → peak bytes of its live registers
    exact: bool = True  # else it has slots for all tokens, and mostly needs fewer


class _Search:
    """The search over variants of a step, orders and slot counts; it works on plans folded to one rank of each class.

    "Listed" ranks are those of the folded plan.
    """

    def __init__(
        self,
        make: Callable[[Variant], Made] | Made,
        hardware: Hardware,
        memory: Memory,
        name: ScheduleName,
        advises: bool = True,
    ) -> None:
        self.make, self.hardware, self.memory, self.name = make, hardware, memory, name
        self.advises = advises  # whether an error says which other schedule fits, for which they are searched
        self.portfolios: dict[Variant, Portfolio] = {}
        self.planners: dict[Variant, SlotPlanner] = {}
        self.given: dict[Variant, FoldedPlan] = {}  # without orders
        self.folded: dict[Variant, FoldedPlan] = {}  # the same, as far as ranks do the same work at the same times
        self.workspace: dict[Variant, Mapping[int, int]] = {}  # listed rank → bytes of the largest workspace
        self.ahead: set[Variant] = set()  # whose candidates with other delays of gathers are made

    def with_orders(self, found: _SizedCandidate) -> FoldedPlan:
        """The plan of a candidate."""
        return replace(self.folded[found.variant], plan=found.plan)

    def proven(self, found: _SizedCandidate) -> FoldedPlan:
        """The plan of a candidate, proven."""
        return prove_folded(self.with_orders(found), self.caps(found.variant), self.hardware)

    def unfolded(self, found: _SizedCandidate) -> Plan:
        """The plan of all ranks, with the orders and slot counts of a candidate."""
        given = self.given[found.variant]
        return unfold_ranks(replace(given, plan=with_orders_of(given.plan, self.with_orders(found))))

    def told(self, found: _SizedCandidate, plan: FoldedPlan) -> tuple[str, ...]:
        """The note about the schedule of a pipeline."""
        if not self.is_pipeline:
            return ()
        expected = forecast(plan, self.hardware)
        tried = f" of {self.tried} tried" if self.tried > 1 else ""
        period = seconds_text(expected.period)
        return (f"schedule {found.name}{tried}: period {period}, bubble {expected.bubble:.0%}",)

    @property
    def tried(self) -> int:
        """Number of candidates that were evaluated."""
        return sum(p.tried for p in self.portfolios.values())

    def best(self, exact: bool = True) -> _SizedCandidate:
        """The fastest candidate that fits the memory; raises PlanError, which suggests a schedule, if none does.

        ``exact``: see ``choose``.
        """
        found = self.best_or_none(exact)
        if found is None:
            raise PlanError(self.refusal())
        return found

    def best_or_none(self, exact: bool = True) -> _SizedCandidate | None:
        """As ``best``; None if none fits."""
        variants = self.variants()
        for variant in variants:
            self.fill(variant, self.name)
        found = self.choose(variants, exact)
        if not self.memory or not callable(self.make) or all(p.plan.pieces == 1 for p in self.portfolios.values()):
            return found
        again = [replace(v, recompute=True) for v in variants]
        if found is None:
            found = self.fewer_chunks(variants)
        if found is None or not self.is_fastest(found):
            for variant in again:
                self.fill(variant, self.name)
            found = self.choose(list(self.portfolios), exact)
        return found or self.fewer_chunks(again)

    def fewer_chunks(self, variants: list[Variant]) -> _SizedCandidate | None:
        """The fastest candidate that fits the memory with fewer gathered chunks at a time; None if none does."""
        few = ({"ahead": 1}, {"shared": True}, {"shared": True, "ahead": 1})[: 1 if self.is_pipeline else 3]
        fewer = [replace(v, **less) for v in variants if self.chunks(v).in_turn for less in few]
        for variant in fewer:
            with contextlib.suppress(PlanError):  # the named schedule needs chunks of both passes
                self.fill(variant, self.name)
        return self.choose(fewer)

    @property
    def is_pipeline(self) -> bool:
        """Whether micro-batches go through several ranks, so that there are orders to search."""
        portfolio = next(iter(self.portfolios.values()))
        return portfolio.plan.pieces > 1 and portfolio.pipeline.length > 1

    def variants(self) -> list[Variant]:
        """The variants to consider: backward whole, or cut into gradients of inputs and of weights."""
        if not callable(self.make):
            return [Variant()]
        if self.name is not ScheduleName.AUTO:
            return [Variant(weights=self.name.splits_backward)]
        plain = self.portfolio(Variant())
        backward = any(task.kind is B for _, task in plain.nodes)
        return [Variant(), Variant(weights=True)] if backward and self.is_pipeline else [Variant()]

    def portfolio(self, variant: Variant) -> Portfolio:
        """The portfolio of a variant's folded plan; made at the first call."""
        if variant not in self.portfolios:
            made = self.make(variant) if callable(self.make) else self.make
            given = made if isinstance(made, FoldedPlan) else every_rank(made)
            verify(given.plan)
            times = nanoseconds(given.on_planes, self.hardware)
            self.given[variant] = given
            self.folded[variant] = folded = fold(given, times)
            self.workspace[variant] = max_workspace_bytes(folded.plan)
            self.portfolios[variant] = Portfolio(folded.plan, times)
        return self.portfolios[variant]

    def fill(self, variant: Variant, name: ScheduleName) -> None:
        """Evaluate the candidates of a variant; raises PlanError if the named schedule cannot run it."""
        portfolio = self.portfolio(variant)
        if name is ScheduleName.AUTO:
            portfolio.search(frugal=bool(self.memory))
        else:
            portfolio.follow(name)
            if not portfolio.found:
                raise PlanError(
                    f"plan {portfolio.plan.name!r}: schedule {str(name)!r} cannot run it: something in the step (a "
                    "norm, a loss over several stages' values) waits for more micro-batches than that order begins; "
                    "expected: schedule='auto', which finds an order, or 'gpipe', which begins all of them"
                )

    def candidates(self, variants: list[Variant]) -> list[tuple[Variant, Candidate]]:
        """All candidates of these variants, the fastest first."""
        found = [(v, c) for v in variants for c in self.portfolios[v].found]
        return sorted(found, key=lambda x: x[1].period)

    def choose(self, variants: list[Variant], exact: bool = True, below: float = math.inf) -> _SizedCandidate | None:
        """The fastest candidate that fits the memory; without memory caps, the smallest of the equally fast ones.

        If not ``exact``, one that fits even so keeps slots for all tokens, which takes no time to find.  None if none
        with a period ``below`` that many nanoseconds fits.
        """
        found = [x for x in self.candidates(variants) if x[1].period < below]
        if not self.memory and found:
            spare = SPARE if any(self.chunks(v).in_turn for v in variants) else SAME
            fastest = [x for x in found if x[1].period <= found[0][1].period * (1 + spare)]
            variant, candidate = min(fastest, key=lambda x: self.planner(x[0]).estimate(x[1].run))
            return self.size(variant, candidate, 0 if exact else None)
        best: _SizedCandidate | None = None
        for variant, candidate in found:
            if best is not None and candidate.period >= best.period * (1 - SAME):
                break
            if self.over(self.planner(variant).at_least(candidate.run), variant)[0] > 1:
                continue
            sized = None if exact else self.size(variant, candidate, None)
            if sized is None or not self.fits(sized):
                sized = self.most_slots(variant, candidate)
            if sized is not None and sized.period < min(below, math.inf if best is None else best.period):
                best = sized
        return best

    def most_slots(self, variant: Variant, candidate: Candidate) -> _SizedCandidate | None:
        """A candidate with the most plentiful level of slots that fits the memory; None if even the fewest do not."""
        first, *between, last = range(len(SlotPlanner.LEVELS))
        most = self.size(variant, candidate, first)
        if self.fits(most):
            return most
        least = self.size(variant, candidate, last)
        if not self.fits(least):
            return None
        each = (self.size(variant, candidate, level) for level in between)
        return next((sized for sized in each if self.fits(sized)), least)

    def planner(self, variant: Variant) -> SlotPlanner:
        if variant not in self.planners:
            self.planners[variant] = SlotPlanner(self.portfolios[variant].graph)
        return self.planners[variant]

    def size(self, variant: Variant, candidate: Candidate, level: int | None) -> _SizedCandidate:
        """A candidate with slots of a level of the planner's; None: for all tokens."""
        plan = candidate.plan
        if level is not None:
            slots = self.planner(variant).slots(candidate.run, candidate.period, level)
            plan = replace(plan, registers=tuple(replace(r, slots=slots[r.id]) for r in plan.registers))
        firings = self.portfolios[variant].evaluate(plan)
        timeline = _timeline(plan, firings)
        name = candidate.name + ", recomputing" * variant.recompute
        return _SizedCandidate(name, variant, plan, period_of(firings), timeline.peak_bytes, level is not None)

    def fits(self, sized: _SizedCandidate) -> bool:
        """Whether the registers of every rank stay within its cap."""
        return self.over(sized.peak, sized.variant)[0] <= 1

    def caps(self, variant: Variant, memory: Memory | None = None) -> dict[int, int]:
        """Listed rank → the smallest cap on bytes of registers among the ranks of its class."""
        classes, firing = self.folded[variant].rank_classes, self.workspace[variant]
        memory = self.memory if memory is None else memory
        known = {listed: [memory[r] for r in ranks if r in memory] for listed, ranks in classes.items()}
        return {listed: min(caps) - firing.get(listed, 0) for listed, caps in known.items() if caps}

    # ---- how far gathers of parameters run ahead

    def chunks(self, variant: Variant) -> GatheredChunks:
        """The chunks of parameters that the plan of a variant gathers."""
        return gathered_chunks(self.folded[variant].plan)

    def run_ahead(self, room: Memory | None, beside: bool) -> tuple[_SizedCandidate, tuple[str, ...]]:
        """The best candidate, or one whose gathers run further ahead if that is faster and fits the room; and a note.

        Of the numbers of chunks that are about equally fast it is a small one.
        """
        known = room is not None and beside and callable(self.make)
        found, told = self.run_further(self.best(exact=not known), room, beside)
        if not found.exact:  # it stays as it is, and may fit with fewer slots
            found, told = self.run_further(self.sized(found), room, beside)
        return found, told

    def run_further(
        self, found: _SizedCandidate, room: Memory | None, beside: bool
    ) -> tuple[_SizedCandidate, tuple[str, ...]]:
        """As ``run_ahead``, of one candidate; it has slots for all tokens only if it is the one that was given."""
        chunks = self.chunks(found.variant)
        if not chunks.most:
            return found, ()
        if found.variant.shared or found.variant.ahead == 1:
            return found, (f"{chunks.text(found.variant.ahead, found.variant.shared)}; there is no memory for more",)
        if not beside:
            return found, (f"{chunks.text(AHEAD)}; more would not be faster",)
        if room is None or not callable(self.make):
            below = found.period * (1 - WORTH)
            if chunks.in_turn and callable(self.make) and self.period_ahead(found, IN_TURN) < below:
                found = self.choose([replace(found.variant, ahead=IN_TURN)], below=below) or found
            return found, (f"{chunks.text(found.variant.ahead)}; whether there is memory for more is not known",)
        if not self.fits_early(found, room):
            return found, (f"{chunks.text(AHEAD)}; there is no memory for more",)
        return self.further_ahead(found, room)

    def sized(self, found: _SizedCandidate) -> _SizedCandidate:
        """A candidate with no more slots than it needs, or the best one if it does not fit the memory so."""
        return found if found.exact else self.choose([found.variant]) or self.best()

    def further_ahead(
        self, found: _SizedCandidate, room: Memory, exact: bool = False
    ) -> tuple[_SizedCandidate, tuple[str, ...]]:
        """As ``run_ahead``, where the room is known.

        If not ``exact``, candidates that fit it even with slots for all tokens are compared so, and only the best gets
        its slots.  With these, firings are at other times: where it does not fit then, all are compared exactly.
        """
        chunks = self.chunks(found.variant)
        free = found.period if self.is_optimal(found) else self.period_ahead(found, None)
        best, fits, lacks = found, AHEAD, 2 * chunks.most  # ``lacks``: so many do not fit, if there are as many
        several = self.portfolios[found.variant].plan.pieces > 1
        more = tries = 2 if several else 0  # orders of several pieces may be better without ``free`` being
        while fits < chunks.most and lacks - fits > max(1, fits // 4):
            if self.is_optimal(best) or (tries <= 0 and best.period <= free * (1 + WORTH)):
                break
            ahead = min(2 * fits, chunks.most) if lacks > chunks.most else (fits + lacks) // 2
            variant = replace(found.variant, ahead=None if ahead == chunks.most else ahead)
            below = best.period * (1 - WORTH)
            if self.period_ahead(found, variant.ahead) >= below:
                fits, tries = ahead, tries - 1
                continue
            one = self.choose([variant], exact, below)
            fitting = one is not None and self.fits_early(one, room)
            if one is not None and not fitting and not one.exact:
                one = self.choose([variant], below=below)
                fitting = one is not None and self.fits_early(one, room)
            if one is None or not fitting:
                lacks = ahead
            else:
                best, fits, tries = one, ahead, more
        further = best is not found
        if not best.exact:
            sized = self.choose([best.variant], below=found.period * (1 - WORTH) if further else math.inf)
            if sized is None or not self.fits_early(sized, room):
                return self.further_ahead(self.sized(found), room, exact=True)
            best = sized
        told = chunks.text(best.variant.ahead)
        if further:
            saved = seconds_text((found.period - best.period) / 1e9)
            told += f", with which a step takes {saved} less than with {AHEAD}"
        if best.period > free * (1 + WORTH):
            told += "; more would be faster, and do not fit the memory"
        elif not further:
            told += "; more would not be faster"
        return best, (told,)

    def period_ahead(self, found: _SizedCandidate, ahead: int | None) -> float:
        """The shortest period of the candidate with other delays of gathers, whether or not it fits; may be infinite.

        A pipeline computes in the same order.
        """
        variant = replace(found.variant, ahead=ahead)
        portfolio = self.portfolio(variant)
        if variant not in self.ahead:
            self.ahead.add(variant)
            if not self.is_pipeline:
                self.fill(variant, self.name)
            portfolio.keep_computing(found.name, found.plan.orders)
        return min((c.period for c in portfolio.found), default=math.inf)

    def fits_early(self, sized: _SizedCandidate, room: Memory) -> bool:
        """Whether a candidate fits the room, also if its gathers are as early as they may be."""
        firings = FiringTimes(sized.plan, with_gathers_at_once(sized.plan, self.portfolios[sized.variant].times))
        firings.run(STEADY // 2)
        early = _timeline(sized.plan, firings).peak_bytes
        caps = self.caps(sized.variant, room)
        return all(max(sized.peak.get(rank, 0), early.get(rank, 0)) <= cap for rank, cap in caps.items())

    def is_optimal(self, found: _SizedCandidate) -> bool:
        """Whether a queue of a candidate is always at work."""
        return found.period <= self.portfolios[found.variant].bound * (1 + WORTH)

    def is_fastest(self, found: _SizedCandidate) -> bool:
        """Whether a candidate is as fast as the fastest candidate without memory caps."""
        return found.period <= min(c.period for p in self.portfolios.values() for c in p.found) * (1 + SAME)

    def refusal(self) -> str:
        """The error text for when no candidate fits the memory; if it ``advises``, with another schedule that fits."""
        of_variants = (self.candidates([variant]) for variant in self.portfolios)
        nearest = (
            min(found, key=lambda x: self.over(self.planner(x[0]).at_least(x[1].run), x[0])[0])
            for found in of_variants
            if found
        )
        sizes = (self.size(*one, len(SlotPlanner.LEVELS) - 1) for one in nearest)
        sized = min(sizes, key=lambda one: self.over(one.peak, one.variant)[0])
        rank = self.over(sized.peak, sized.variant)[1]
        cap = self.caps(sized.variant)[rank] + self.workspace[sized.variant][rank]
        why = too_much(sized.plan, rank, sized.peak[rank], cap)
        text = f"plan {sized.plan.name!r}: schedule {str(self.name)!r}: {why}"
        fitting: list[tuple[float, ScheduleName, int]] = []
        asked = self.advises and self.name is not ScheduleName.AUTO
        for other in (*SCHEDULES[1:], SCHEDULES[0]) if asked else ():
            if other != self.name and not (other is ScheduleName.AUTO and fitting):
                try:
                    search = _Search(self.make, self.hardware, self.memory, other)
                    found = search.best_or_none()
                except PlanError:  # its stages do not fit the schedule
                    continue
                if found is None:
                    continue
                fitting.append((found.period, other, found.peak[rank] + search.workspace[found.variant][rank]))
        if fitting:
            _, other, most = min(fitting)
            return f"{text}; schedule={str(other)!r} needs {most} there and fits"
        return f"{text}; {WHAT_TO_DO}"

    def over(self, held: Mapping[int, int], variant: Variant) -> tuple[float, int]:
        """The largest ratio of a rank's bytes to its cap, and that rank."""
        return max((held.get(rank, 0) / max(cap, 1e-9), rank) for rank, cap in self.caps(variant).items())


def _timeline(plan: Plan, firings: FiringTimes) -> Timeline:
    return Timeline(plan, firings.iterations, firings.fired, firings.ends, firings.durations)
