"""Plans of one step without orders enter; the best of them with slot counts and frozen orders, proven live, leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from actorflow_compiler.core.errors import CallError, PlanError
from actorflow_compiler.core.hardware import CPU_CORE, Hardware
from actorflow_compiler.core.units import seconds_text
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.summary import summarise
from actorflow_compiler.plan.variant import Variant
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler.cost import momentary_bytes
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.pipeline import SCHEDULES
from actorflow_scheduler.portfolio import SAME, Candidate, Portfolio
from actorflow_scheduler.portfolio import period as period_of
from actorflow_scheduler.proof import WHAT_TO_DO, prove, too_much
from actorflow_scheduler.rank_classes import FoldedPlan, fold, unfold
from actorflow_scheduler.slots import SlotPlanner
from actorflow_scheduler.timeline import Timeline, nanoseconds

__all__ = ["SCHEDULES", "check_name", "schedule"]

Memory = Mapping[int, int]  # rank → bytes that its registers may hold, with what an actor needs while it fires


def check_name(name: str) -> str:
    """The name of a schedule, if it is one; raises CallError."""
    if name not in SCHEDULES:
        raise CallError(f"schedule={name!r} was found; one of {', '.join(map(repr, SCHEDULES))} was expected")
    return name


def schedule(
    make: Callable[[Variant], Plan] | Plan,
    hardware: Hardware = CPU_CORE,
    memory: Memory | None = None,
    name: str = "auto",
) -> Plan:
    """Order, size and prove a plan, or the best of those that ``make`` makes.

    ``name`` is one of SCHEDULES: "auto" looks for the shortest period, and of equals for the least
    memory; another name gives that published schedule.  ``memory`` caps the bytes that the registers of a rank hold
    at a time, with what an actor needs while it fires: where they do not suffice, time is given up, also by
    computing forward values once more.  Raises DeadlockError if no slot counts let the plan run, PlanError if it is
    not legal, does not fit, or its stages do not fit the schedule; CallError for an unknown name.
    """
    check_name(name)
    search = _Search(make, hardware, memory or {}, name)
    found = search.best()
    plan = search.unfolded(found)
    if search.is_pipeline:
        told = forecast(plan, hardware)
        tried = f" of {search.tried} tried" if search.tried > 1 else ""
        note = f"schedule {found.name}{tried}: period {seconds_text(told.period)}, bubble {told.bubble:.0%}"
        plan = replace(plan, notes=(*plan.notes, note))
    return summarise(prove(plan, memory, hardware))


@dataclass(frozen=True, slots=True)
class _Sized:
    """A candidate with slot counts."""

    name: str
    variant: Variant
    plan: Plan  # of one of each class of ranks that are alike
    period: float  # nanoseconds
    peak: Mapping[int, int]  # rank → most bytes that its registers hold at a time


class _Search:
    def __init__(self, make: Callable[[Variant], Plan] | Plan, hardware: Hardware, memory: Memory, name: str) -> None:
        self.make, self.hardware, self.memory, self.name = make, hardware, memory, name
        self.made: dict[Variant, Portfolio] = {}
        self.sizes: dict[Variant, SlotPlanner] = {}
        self.whole: dict[Variant, Plan] = {}
        self.folded: dict[Variant, FoldedPlan] = {}
        self.momentary: dict[Variant, Mapping[int, int]] = {}  # listed rank → bytes that an actor needs while it fires

    def unfolded(self, found: _Sized) -> Plan:
        """The plan of all ranks."""
        return unfold(self.whole[found.variant], replace(self.folded[found.variant], plan=found.plan))

    @property
    def tried(self) -> int:
        """Candidates that were evaluated."""
        return sum(p.tried for p in self.made.values())

    def best(self) -> _Sized:
        """The fastest that fits; raises PlanError, which names another schedule that fits, if nothing does."""
        found = self.fitting()
        if found is None:
            raise PlanError(self.refusal())
        return found

    def fitting(self) -> _Sized | None:
        """The fastest that fits; None if nothing does."""
        variants = self.variants()
        for variant in variants:
            self.look(variant, self.name)
        found = self.choose(variants)
        if self.memory and (found is None or not self.is_fastest(found)):
            again = [replace(v, recompute=True) for v in variants]
            if callable(self.make) and any(p.plan.pieces > 1 for p in self.made.values()):
                for variant in again:
                    self.look(variant, self.name)
                found = self.choose(list(self.made))
        return found

    @property
    def is_pipeline(self) -> bool:
        """Whether there is anything to search: pieces, and several ranks that they go through."""
        portfolio = next(iter(self.made.values()))
        return portfolio.plan.pieces > 1 and portfolio.pipeline.length > 1

    def variants(self) -> list[Variant]:
        """The ways to cut the backward pass that the schedule is for."""
        if not callable(self.make):
            return [Variant()]
        if self.name != "auto":
            return [Variant(weights=self.name.startswith("zb"))]
        plain = self.portfolio(Variant())
        backward = any(task.kind == "B" for _, task in plain.nodes)
        return [Variant(), Variant(weights=True)] if backward and self.is_pipeline else [Variant()]

    def portfolio(self, variant: Variant) -> Portfolio:
        """What is searched for a variant: of ranks that are alike one."""
        if variant not in self.made:
            plan = verify(self.make(variant) if callable(self.make) else self.make)
            times = nanoseconds(plan, self.hardware)
            self.whole[variant] = plan
            self.folded[variant] = folded = fold(FoldedPlan(plan, {a.rank: (a.rank,) for a in plan.actors}), times)
            self.momentary[variant] = momentary_bytes(folded.plan)
            self.made[variant] = Portfolio(folded.plan, times)
        return self.made[variant]

    def look(self, variant: Variant, name: str) -> None:
        """Fill a variant's portfolio."""
        portfolio = self.portfolio(variant)
        if name == "auto":
            portfolio.search(frugal=bool(self.memory))
        else:
            portfolio.follow(name)
            if not portfolio.found:
                raise PlanError(
                    f"plan {portfolio.plan.name!r}: schedule {name!r} cannot run it: something in the step (a norm, a "
                    "loss over several stages' values) waits for more micro-batches than that order begins; "
                    "expected: schedule='auto', which finds an order, or 'gpipe', which begins all of them"
                )

    def candidates(self, variants: list[Variant]) -> list[tuple[Variant, Candidate]]:
        """All that were evaluated, the fastest first; without those that another one makes needless."""
        found = [(v, c) for v in variants for c in self.made[v].found]
        return sorted(found, key=lambda x: x[1].period)

    def choose(self, variants: list[Variant]) -> _Sized | None:
        """The fastest that fits the memory, and of equally fast ones that which takes least."""
        found = self.candidates(variants)
        if not self.memory:
            fastest = [x for x in found if x[1].period <= found[0][1].period * (1 + SAME)]
            return self.size(*min(fastest, key=lambda x: self.sizes_of(x[0]).estimate(x[1].run)), 0)
        best: _Sized | None = None
        for variant, candidate in found:
            if best is not None and candidate.period >= best.period * (1 - SAME):
                break
            if self.over(self.sizes_of(variant).at_least(candidate.run), variant)[0] > 1:
                continue
            sized = self.fewest(variant, candidate)
            if sized is not None and (best is None or sized.period < best.period):
                best = sized
        return best

    def fewest(self, variant: Variant, candidate: Candidate) -> _Sized | None:
        """The most slots that fit the memory; None if the fewest do not."""
        last = len(SlotPlanner.LEVELS) - 1
        least = self.size(variant, candidate, last)
        if not self.fits(least):
            return None
        each = (self.size(variant, candidate, level) for level in range(last))
        return next((sized for sized in each if self.fits(sized)), least)

    def sizes_of(self, variant: Variant) -> SlotPlanner:
        if variant not in self.sizes:
            self.sizes[variant] = SlotPlanner(self.made[variant].graph)
        return self.sizes[variant]

    def size(self, variant: Variant, candidate: Candidate, level: int) -> _Sized:
        slots = self.sizes_of(variant).slots(candidate.run, candidate.period, level)
        registers = tuple(replace(r, slots=slots[r.id]) for r in candidate.plan.registers)
        plan = replace(candidate.plan, registers=registers)
        firings = self.made[variant].evaluate(plan)
        timeline = Timeline(plan, firings.iterations, firings.fired, firings.ends, firings.lasts)
        name = candidate.name + ", recomputing" * variant.recompute
        return _Sized(name, variant, plan, period_of(firings), timeline.peak_bytes)

    def fits(self, sized: _Sized) -> bool:
        """Whether the registers of every rank stay within its cap."""
        return self.over(sized.peak, sized.variant)[0] <= 1

    def caps(self, variant: Variant) -> dict[int, int]:
        """Listed rank → the least that those like it have for registers."""
        alike, firing = self.folded[variant].alike, self.momentary[variant]
        caps = {
            listed: [self.memory[r] - firing[listed] for r in ranks if r in self.memory]
            for listed, ranks in alike.items()
        }
        return {listed: min(of_all) for listed, of_all in caps.items() if of_all}

    def is_fastest(self, found: _Sized) -> bool:
        """Whether memory costs no time."""
        return found.period <= min(c.period for p in self.made.values() for c in p.found) * (1 + SAME)

    def refusal(self) -> str:
        """What to say when nothing fits."""
        nearest = min(
            self.candidates(list(self.made)), key=lambda x: self.over(self.sizes_of(x[0]).at_least(x[1].run), x[0])[0]
        )
        sized = self.size(*nearest, len(SlotPlanner.LEVELS) - 1)
        rank = self.over(sized.peak, sized.variant)[1]
        cap = self.caps(sized.variant)[rank] + self.momentary[sized.variant][rank]
        text = f"plan {sized.plan.name!r}: schedule {self.name!r}: " + too_much(sized.plan, rank, sized.peak[rank], cap)
        fitting: list[tuple[float, str, int]] = []
        for other in (*SCHEDULES[1:], SCHEDULES[0]) if self.name != "auto" else ():
            if other != self.name and not (other == "auto" and fitting):
                try:
                    search = _Search(self.make, self.hardware, self.memory, other)
                    found = search.fitting()
                except PlanError:  # its stages do not fit the schedule
                    continue
                if found is None:
                    continue
                fitting.append((found.period, other, found.peak[rank] + search.momentary[found.variant][rank]))
        if fitting:
            _, other, most = min(fitting)
            return f"{text}; schedule={other!r} needs {most} there and fits"
        return f"{text}; {WHAT_TO_DO}"

    def over(self, held: Mapping[int, int], variant: Variant) -> tuple[float, int]:
        """The largest share of its cap that a rank takes, and the rank."""
        return max((held.get(rank, 0) / max(cap, 1e-9), rank) for rank, cap in self.caps(variant).items())
