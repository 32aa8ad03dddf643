"""From a trace it is found which costs were forecast worst, what queues waited for, and what clocks say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.runtime.measured_costs import Costs, Target
from actorflow.tracing.clock import Estimate, SharedClock, estimate
from actorflow.tracing.measurement import IdleReason, Measurement, ReadSpan, measure
from actorflow.tracing.report import WaitShare, make_report, source_text, to_text
from actorflow.tracing.tracer import with_forecast
from actorflow.tracing.view import drawn, html
from actorflow_compiler.core.errors import TraceError
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import OfInput, Plan
from actorflow_scheduler.cost import Durations
from actorflow_scheduler.notation import COMPUTING
from actorflow_scheduler.timeline import nanoseconds
from runtime.coming_rows import LOADER, fed
from runtime.programs import MM, Program, on, spec
from runtime.trainings import training
from tracing.traced import CALLS, as_forecast, trace

MS = 1_000_000


def costs(plan: Plan, **named: int) -> Durations:
    """A firing of each actor takes 1 µs, that of the named ones so many ns; messages take no time."""
    return Durations({a.id: named.get(a.name, 1000) for a in plan.actors}, {})


def waits(found: Measurement) -> dict[tuple[int, str], int]:
    """(rank, reason) → ns."""
    spent: dict[tuple[int, str], int] = {}
    for gap in found.gaps():
        spent[gap.rank, gap.reason] = spent.get((gap.rank, gap.reason), 0) + gap.end - gap.start
    return spent


def test_a_stage_waits_for_the_data_of_a_slower_one() -> None:
    plan = training()
    found = as_forecast(plan, costs(plan, F1=MS, B1=MS))
    spent = waits(found)
    assert max(spent, key=lambda key: spent[key]) == (0, "data")
    assert {gap.on for gap in found.gaps() if gap.rank == 0 and gap.reason == "data"} >= {"send B1 of rank 1"}


def test_a_stage_waits_for_credit_where_its_readers_are_slow() -> None:
    plan = training()
    spent = waits(as_forecast(plan, costs(plan, loss=5 * MS)))  # reads what F1 makes, in a register of one slot
    assert max(spent, key=lambda key: spent[key])[1] in ("credit", "data")
    assert spent[1, "credit"] > spent.get((1, "data"), 0)


def test_a_transfer_that_stands_behind_another_is_a_wait_for_its_queue() -> None:
    p = Program()
    (x,) = p.actor("x", OfInput("x"), out=[spec(2, 2)], kind="source", queue="source")
    (a,) = p.actor("A", x, x, body=MM, out=[spec(2, 2)])
    (b,) = p.actor("B", x, x, body=MM, out=[spec(2, 2)])
    (there_a,) = p.send(a, to=1)
    (there_b,) = p.send(b, to=1)
    (c,) = p.actor("C", there_b, there_b, body=MM, out=[spec(2, 2)], rank=1)
    (d,) = p.actor("D", there_a, c, body=MM, out=[spec(2, 2)], rank=1)
    p.result(d, on(1), (B,), (2, 2), rank=1)
    plan = p.plan()
    found = as_forecast(plan, costs(plan, **{"send A": MS, "send B": MS // 4}))
    gap = max((g for g in found.gaps() if plan.actor(g.actor).name == "C"), key=lambda g: g.end - g.start)
    assert (gap.reason, gap.on) == ("queue", "send B of rank 0")
    assert 0.9 * MS < gap.end - gap.start <= MS  # what the first of the two transfers takes


@pytest.mark.parametrize(
    ("issued", "what"), [(1, "the script to make the next call"), (0, "all ranks to make the call")]
)
def test_a_script_that_calls_late_is_the_host(issued: int, what: str) -> None:
    plan = training()
    found = as_forecast(plan, costs(plan))
    late = 10 * MS
    rate = {a.id: a.rate for a in plan.actors}

    def later(times: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        return {a: [t + late * (n // rate[a]) for n, t in enumerate(ts)] for a, ts in times.items()}

    calls = {rank: [late * i for i in range(CALLS)] for rank in range(2)}
    made = {rank: [t * issued for t in times] for rank, times in calls.items()}
    shifted = Measurement(plan, later(found.starts), later(found.ends), {}, {}, made, calls)
    gaps = [g for g in shifted.gaps() if not g.rank]
    host = [g for g in gaps if g.reason == "host" and g.on == what]
    assert sum(g.end - g.start for g in host) > 0.9 * late * (CALLS - 2)


def late_sources(late: int, issued: int, begun: int, read: int, spans: str) -> tuple[Measurement, int]:
    """A run whose calls were made, begun and fired so many ns after each other; and the time between its firings.

    In the last ``read`` ns before a firing of the source, as ``spans`` says, it waited for rows, or the script did.
    """
    plan = fed()
    found = as_forecast(plan, costs(plan))
    x = next(a.id for a in plan.actors if a.name == "x")
    starts, ends = (
        {a: [t + late * n for n, t in enumerate(times)] for a, times in which.items()}
        for which in (found.starts, found.ends)
    )
    made, could = ({0: [every * n for n in range(CALLS)]} for every in (issued, begun))
    waited = {0: [ReadSpan(start - read, start, LOADER) for start in starts[x][1:]]}
    return replace(found, starts=starts, ends=ends, issued=made, begun=could, **{spans: waited}), late * (CALLS - 2)


def test_a_source_that_waits_for_rows_is_what_its_rank_waits_for() -> None:
    found, idle = late_sources(10 * MS, 0, 0, 6 * MS, "late")
    spent = waits(found)
    assert 0.59 * idle < spent[0, "source"] < 0.61 * idle * CALLS / (CALLS - 2)
    assert {gap.on for gap in found.gaps() if gap.reason == "source"} == {f"rows of {LOADER}"}
    assert spent[0, "data"] + spent[0, "source"] == pytest.approx(sum(spent.values()), rel=0.01)


def test_rows_that_come_while_a_rank_computes_are_not_waited_for() -> None:
    plan = fed()
    found = as_forecast(plan, costs(plan, F=10 * MS))
    f = next(a.id for a in plan.actors if a.name == "F")
    hidden = [ReadSpan(a, b, LOADER) for a, b in zip(found.starts[f], found.ends[f], strict=True)]
    assert (0, "source") not in waits(replace(found, late={0: hidden}, reads={0: hidden}))


def test_a_script_that_reads_before_it_makes_the_call_waits_for_the_source() -> None:
    found, idle = late_sources(10 * MS, 10 * MS, 10 * MS, 6 * MS, "reads")
    spent = waits(found)
    assert 0.59 * idle < spent[0, "source"] < 0.61 * idle * CALLS / (CALLS - 2)
    assert spent[0, "host"] > 0.39 * idle


@pytest.mark.parametrize("begun", [0, 10 * MS])  # 10 ms: other ranks make their calls late
def test_a_script_that_reads_behind_a_call_that_it_has_made_holds_nothing_up(begun: int) -> None:
    found, _ = late_sources(10 * MS, 0, begun, 6 * MS, "reads")
    assert (0, "source") not in waits(found)


@pytest.mark.parametrize(("most", "told"), [(0.131, True), (0.004, False)])
def test_the_report_says_what_share_of_the_time_waits_for_the_source(most: float, told: bool) -> None:
    traced = trace()
    found = make_report(traced, traced.ran[0])
    assert list(source_text(found)) == []
    assert "for source" not in to_text(traced, found)
    share = WaitShare(IdleReason.SOURCE, most / 2, f"rows of {LOADER}", 1, most)
    found = replace(found, waits=(*(w for w in found.waits if w.reason is not IdleReason.SOURCE), share))
    said = f"13% of the time waits for source (rank 1: rows of {LOADER})"
    assert (said in to_text(traced, found)) is told
    assert ("of the time waits for source" in html(traced, found)) is told


def test_what_a_queue_runs_and_waits_for_is_all_of_its_time() -> None:
    traced = trace()
    found = make_report(traced, traced.ran[0])
    m = found.measured
    end = m.end_of(m.iterations - 1)
    lasts = [max(m.ends[id][-1] for id in o.actors) for o in m.plan.orders if o.queue == COMPUTING]
    after = sum(end - last for last in lasts) / (len(lasts) * (end - m.begin))  # the slower rank's last firings
    assert found.busy + sum(w.share for w in found.waits) + after == pytest.approx(1.0, abs=1e-6)
    assert found.measured.iterations == CALLS


def test_a_run_as_forecast_is_found_to_be_as_forecast() -> None:
    plan = training()
    given_costs = costs(plan, F0=3 * MS, B0=5 * MS)
    found = as_forecast(plan, given_costs)
    assert all(found.taken(a) == given_costs.firing[a.id] for a in plan.actors)


def test_costs_of_ranks_that_share_cores_are_forecast_as_for_the_run() -> None:
    plan = training()
    measured = Costs({"of something else": 1.0})
    ranks = 8 * len(os.sched_getaffinity(0))
    alone, shared = (with_forecast(0, plan, Target(threads=1, ranks=n, costs=measured)).costs for n in (1, ranks))
    f1 = next(a.id for a in plan.actors if a.name == "F1")
    assert alone.firing[f1] == nanoseconds(plan, measured.hardware("cpu")).firing[f1]
    assert shared.firing[f1] > 2 * alone.firing[f1]


def test_the_actor_whose_cost_was_forecast_worst_is_named_first() -> None:
    plan = training()
    fair = nanoseconds(plan, CPU_CORE)
    f1 = next(a for a in plan.actors if a.name == "F1")
    traced = trace(costs=Durations({**fair.firing, f1.id: 80 * MS}, fair.latency))
    found = make_report(traced, traced.ran[0])
    assert found.costs[0].name == "F1"
    assert found.costs[0].off < -0.2  # four firings of 80 ms that took nothing like it
    assert "F1" in to_text(traced, found).partition("forecast worst")[2].splitlines()[2]


def test_the_page_shows_the_measured_timeline_beside_the_forecast() -> None:
    traced = trace()
    found = make_report(traced, traced.ran[0])
    page = html(traced, found)
    for text in ("What the run waited for", "Forecast costs and measured ones", "forecast</h3>", "measured</h3>"):
        assert text in page
    timeline = drawn(found.measured, begin=0.5)
    assert timeline.begin == 0.5
    assert min(s.start for s in timeline.spans if s.firing // 4 == 1 and s.kind == "forward") >= 0.5
    steps = {(s.actor, s.firing) for s in timeline.spans}
    assert len(steps) == len(timeline.spans) == 3 * sum(a.rate for a in found.ran.plan.actors)


def test_a_trace_that_lacks_a_firing_is_refused() -> None:
    traced = trace()
    lost = next(e for e in traced.events if e["ph"] == "X" and e["args"]["firing"] == 1)
    rest = [e for e in traced.events if e is not lost]
    with pytest.raises(TraceError, match="lacks firings of actor"):
        measure(type(traced)("s", "0", traced.ranks, traced.ran, rest), traced.ran[0])


def test_a_plan_that_never_ran_whole_is_refused() -> None:
    traced = trace()
    with pytest.raises(TraceError, match="holds no whole step of plan"):
        make_report(type(traced)("s", "0", traced.ranks, traced.ran, []), traced.ran[0])


@given(
    ahead=st.integers(-(10**12), 10**12),
    trips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8),
)
def test_an_estimate_of_a_clock_is_off_by_its_doubt_at_most(ahead: int, trips: list[tuple[int, int]]) -> None:
    here = 0
    queue = iter(trips)

    def ask() -> int:
        nonlocal here
        there, back = next(queue)
        here += there
        answer = here + ahead
        here += back
        return answer

    found = estimate(ask, len(trips), now=lambda: here)
    assert abs(found.ahead - ahead) <= found.doubt
    assert found.doubt == min((there + back + 1) // 2 for there, back in trips)


@given(drift=st.integers(-200, 200), at=st.integers(0, 10**12))
def test_clocks_that_drift_apart_are_joined_by_a_line(drift: int, at: int) -> None:
    def ahead(here: int) -> int:
        return 5000 + here * drift // 10**6

    to = SharedClock(7, tuple(Estimate(t, ahead(t), 0) for t in (0, 10**12)))
    assert abs(to(at) - (at + ahead(at) - 7)) <= 1
