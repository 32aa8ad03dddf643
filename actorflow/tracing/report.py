"""Report each plan of a trace: measured against forecast times, as numbers and text.

The forecast is based on the costs of firings alone.  An error of it is either a wrong cost of an actor, or an
unexpected wait of a queue.  Both are listed, the worst first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from actorflow.show.styles import short
from actorflow.tracing.folder import MERGED, TraceData, TracedPlan, ranks_text
from actorflow.tracing.measurement import IdleReason, Measurement, measure
from actorflow_compiler.core.errors import TraceError
from actorflow_compiler.core.units import columns, ranges_text, seconds_text
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.notation import COMPUTING
from actorflow_scheduler.timeline import Timeline, stuck

__all__ = ["ActorCost", "TraceReport", "WaitShare", "make_report", "source_text", "to_text"]

ITERATIONS = 8  # of the forecast
WORST = 8  # actors that are named
LEAST = 0.005  # share of the time below which a wait is not listed


@dataclass(frozen=True, slots=True)
class ActorCost:
    """The forecast and the measured time of an actor's firing; of actors of one name, the one that is furthest off."""

    actor: int
    name: str
    kind: str
    ranks: tuple[int, ...]  # that have an actor of this name
    rank: int  # whose it is
    rate: int  # firings in a step
    forecast: float  # seconds of a firing
    measured: float  # seconds of a firing, median

    @property
    def off(self) -> float:
        """Seconds of a step by which the forecast was off."""
        return self.rate * (self.measured - self.forecast)


@dataclass(frozen=True, slots=True)
class WaitShare:
    """The time that compute queues waited for one reason, over all ranks."""

    reason: IdleReason
    share: float  # of the time of all compute queues
    on: str  # what they waited for the longest
    rank: int  # that waited most for this reason …
    most: float  # … as a share of its own time


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The report of one plan of a trace."""

    ran: TracedPlan
    measured: Measurement
    period: float  # seconds of a step, measured
    forecast: float  # seconds of a step, forecast
    costs: tuple[ActorCost, ...]  # furthest off first
    waits: tuple[WaitShare, ...]  # the longest first
    busy: float  # share of the time in which compute queues ran an actor


def make_report(traced: TraceData, ran: TracedPlan) -> TraceReport:
    """The report of a trace's plan.  Raises TraceError if the trace has no complete step of it."""
    found = measure(traced, ran)
    if not found.iterations:
        raise TraceError(f"the trace holds no whole step of plan {ran.plan.name!r}; {_why_none(traced)}")
    waits, busy = _waits(found)
    timeline = _forecast(ran)
    return TraceReport(ran, found, found.period / 1e9, timeline.period, _costs(found, timeline), waits, busy)


def _why_none(traced: TraceData) -> str:
    if not traced.cut:
        return "let the script make at least one call of it"
    ends = f"the run was cut short: {traced.cut}"
    if traced.lost:
        ends = f"{ranks_text(traced.lost)} left no recording, and {ends}"
    return f"{ends}. {MERGED} has what there is, for https://ui.perfetto.dev"


def to_text(traced: TraceData, found: TraceReport) -> str:
    """A report for people."""
    return "\n".join(_lines(traced, found)) + "\n"


def source_text(found: TraceReport) -> Iterator[str]:
    """A sentence about the rank that waited most for its data source, if any did for long."""
    wait = next(w for w in found.waits if w.reason is IdleReason.SOURCE)
    if wait.most >= LEAST:
        rank = f"rank {wait.rank}: " if found.ran.plan.world > 1 else ""
        yield f"{wait.most:.0%} of the time waits for source ({rank}{wait.on}), which the forecast leaves out"


def _forecast(ran: TracedPlan) -> Timeline:
    """The forecast that was made when the plan ran, not what this machine would forecast now."""
    firings = FiringTimes(ran.plan, ran.costs)
    if not firings.run(ITERATIONS):
        raise stuck(ran.plan, ITERATIONS)
    return Timeline(ran.plan, ITERATIONS, firings.fired, firings.ends, firings.durations)


def _costs(found: Measurement, timeline: Timeline) -> tuple[ActorCost, ...]:
    by_name: dict[tuple[str, str], list[ActorCost]] = {}
    for a in found.plan.actors:
        forecast, taken = timeline.durations[a.id] / 1e9, found.taken(a) / 1e9
        cost = ActorCost(a.id, short(a.name), a.kind, (a.rank,), a.rank, a.rate, forecast, taken)
        by_name.setdefault((cost.name, a.kind), []).append(cost)
    worst = [
        replace(max(costs, key=lambda c: abs(c.off)), ranks=tuple(sorted({c.rank for c in costs})))
        for costs in by_name.values()
    ]
    return tuple(sorted(worst, key=lambda c: -abs(c.off)))


def _waits(found: Measurement) -> tuple[tuple[WaitShare, ...], float]:
    """What compute queues waited for, and the share of their time in which they ran."""
    spent: Counter[tuple[IdleReason, int]] = Counter()  # (reason, rank) → ns
    on: dict[IdleReason, Counter[str]] = {reason: Counter() for reason in IdleReason}
    for gap in found.gaps():
        spent[gap.reason, gap.rank] += gap.end - gap.start
        on[gap.reason][gap.on] += gap.end - gap.start
    ranks = sorted({o.rank for o in found.plan.orders if o.queue == COMPUTING and o.actors})
    window = max(1, found.end_of(found.iterations - 1) - found.begin)
    waits = []
    for reason in IdleReason:
        rank = max(ranks, key=lambda r: spent[reason, r])
        share = sum(spent[reason, r] for r in ranks) / (window * len(ranks))
        name = on[reason].most_common(1)[0][0] if on[reason] else ""
        waits.append(WaitShare(reason, share, name, rank, spent[reason, rank] / window))
    return tuple(sorted(waits, key=lambda w: -w.share)), _busy(found, ranks, window)


def _busy(found: Measurement, ranks: list[int], window: int) -> float:
    worked = 0
    for a in found.plan.actors:
        if a.queue == COMPUTING:
            spans = zip(found.starts[a.id], found.ends[a.id], strict=True)
            last = found.end_of(found.iterations - 1)
            worked += sum(max(0, min(end, last) - max(start, found.begin)) for start, end in spans)
    return worked / (window * len(ranks))


def _lines(traced: TraceData, found: TraceReport) -> Iterator[str]:
    plan, m = found.ran.plan, found.measured
    counted = m.iterations - m.first
    yield (
        f"plan {plan.name!r} on {plan.world} rank{'s' * (plan.world != 1)}, {m.iterations} steps recorded, "
        f"the last {counted} count"
    )
    if traced.cut:
        yield f"  cut short {traced.cut}"
    ratio = f" ({found.period / found.forecast:.2f} ×)" if found.forecast else ""
    yield (
        f"  step      {seconds_text(found.period)} measured, {seconds_text(found.forecast)} forecast "
        f"on {found.ran.hardware}{ratio}"
    )
    yield from map("  reading   {}".format, source_text(found))
    yield f"  computing {found.busy:.1%} of the compute queues' time"
    named = [w for w in found.waits if w.share >= LEAST]
    for i, wait in enumerate(named):
        most = f"; rank {wait.rank}: {wait.most:.1%}" if plan.world > 1 else ""
        yield f"  {'waited' if i == 0 else '':9} {wait.share:.1%} for {wait.reason}, most of it for {wait.on}{most}"
    if not named:
        yield "  waited    for nothing"
    doubt = max((r.doubt for r in traced.ranks), default=0)
    if doubt:
        yield f"  clocks    of different machines agree to {seconds_text(doubt / 1e9)}"
    yield ""
    yield "costs that were forecast worst, by what they make of a step"
    yield from (f"  {line}" for line in columns(_table(found.costs[:WORST]), "<<<>>>>>"))


def _table(costs: tuple[ActorCost, ...]) -> list[list[str]]:
    table = [["actor", "kind", "ranks", "firings", "forecast", "measured", "ratio", "a step"]]
    for c in costs:
        ranks = ranges_text(c.ranks) + (f" (here {c.rank})" if len(c.ranks) > 1 else "")
        ratio = f"{c.measured / c.forecast:.2f} ×" if c.forecast else "–"
        sign = "+" if c.off >= 0 else "−"
        table.append([
            c.name, c.kind, ranks, str(c.rate), seconds_text(c.forecast), seconds_text(c.measured), ratio,
            f"{sign}{seconds_text(abs(c.off))}",
        ])  # fmt: skip
    return table
