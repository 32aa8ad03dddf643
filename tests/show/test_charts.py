"""What the charts of a page show, as data: every firing where it was, on one axis that can show all of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from actorflow.show.actors import actor_graph
from actorflow.show.charts import memory_chart, time_axis, timeline_chart
from actorflow.show.details import details
from actorflow.show.styles import LINES, STYLES
from actorflow.show.timeline import TimelineSpan, TimelineView, forecast_timeline
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Plan
from runtime.coming_rows import fed
from shown_plans import view

FAST = Hardware()


def shown() -> tuple[Plan, TimelineView]:
    plan = view().plan
    return plan, forecast_timeline(plan, FAST)


def test_an_iteration_that_took_longer_than_was_foretold_can_be_seen_whole() -> None:
    _, found = shown()
    slow = replace(found, spans=tuple(replace(s, start=5 * s.start, end=5 * s.end) for s in found.spans),
                   begin=5 * found.begin, end=5 * found.end)  # fmt: skip
    axis = time_axis([found, slow])
    assert axis["first"][0] < 0
    assert axis["first"][1] >= (slow.end - slow.begin) * 1e3
    for t in (found, slow):
        assert axis["bounds"][0] <= (min(s.start for s in t.spans) - t.begin) * 1e3
        assert axis["bounds"][1] >= (max(s.end for s in t.spans) - t.begin) * 1e3


def test_every_firing_is_there_once_in_the_row_of_its_queue() -> None:
    plan, found = shown()
    chart = timeline_chart(plan, found, "forecast")
    columns, rows = chart["spans"], chart["rows"]
    assert {len(columns[name]) for name in ("row", "kind", "start", "end", "actor", "piece", "iteration")} == {
        len(found.spans)
    }
    expected = sorted((s.actor, round((s.start - found.begin) * 1e3, 6), s.piece) for s in found.spans)
    assert sorted(zip(columns["actor"], columns["start"], columns["piece"], strict=True)) == expected
    for row, actor, kind in zip(columns["row"], columns["actor"], columns["kind"], strict=True):
        a = plan.actor(actor)
        assert rows[row]["label"] == (f"rank {a.rank} · compute" if a.queue == "compute" else a.queue)
        assert chart["kinds"][kind]["label"] == STYLES[a.kind].label
    order = list(zip(columns["row"], columns["start"], strict=True))
    assert order == sorted(order)  # which the page relies on
    for before, after in pairwise(rows):
        assert after["top"] >= before["top"] + before["tall"] - 1e-9
    critical = {(columns["actor"][k], columns["start"][k]) for k in columns["critical"]}
    assert critical == {
        (s.actor, round((s.start - found.begin) * 1e3, 6)) for s in found.spans if (s.actor, s.firing) in found.critical
    }


def test_bubbles_are_where_a_compute_queue_runs_nothing() -> None:
    plan, _ = shown()
    actor = next(a for a in plan.actors if a.kind == "forward" and a.rank == 0)
    other = next(a for a in plan.actors if a.kind == "forward" and a.rank != 0)

    def span(actor_: int, rank: int, start: float, end: float) -> TimelineSpan:
        return TimelineSpan(rank, "compute", actor_, 0, 0, "forward", start, end)

    spans = (span(actor.id, 0, 1.0, 2.0), span(actor.id, 0, 4.0, 5.0), span(other.id, other.rank, 2.0, 3.0))
    found = timeline_chart(plan, TimelineView(spans, 1.0, 5.0), "forecast")["bubbles"]
    assert list(zip(found["row"], found["start"], found["end"], strict=True)) == [(0, 1000, 3000), (1, 0, 1000)]


def test_ranks_that_hold_the_same_are_one_line_and_more_than_the_colours_are_dashed() -> None:
    memory = {rank: ((0.0, 1.0), (10 * (rank // 2), 5)) for rank in range(20)}
    chart = memory_chart(TimelineView((), 0.0, 1.0, memory=memory), None, "forecast-memory")
    assert [line["label"] for line in chart["lines"]] == [f"ranks {2 * k}-{2 * k + 1}" for k in range(10)]
    assert [line["dashed"] for line in chart["lines"]] == [k >= len(LINES) for k in range(10)]
    assert chart["most"] == 90


@pytest.mark.parametrize(("limit", "drawn"), [(None, None), (100, 100), (149, 149), (151, None)])
def test_a_limit_that_is_far_away_is_not_drawn(limit: int | None, drawn: int | None) -> None:
    timeline = TimelineView((), 0.0, 1.0, memory={0: ((0.0,), (100,))})
    assert memory_chart(timeline, limit, "forecast-memory")["limit"] == drawn


def test_nothing_at_all_is_an_empty_chart() -> None:
    plan, _ = shown()
    empty = TimelineView((), 0.0, 0.0)
    assert timeline_chart(plan, empty, "forecast")["spans"]["row"] == []
    axis = time_axis([empty])
    assert axis["first"][0] < axis["first"][1]
    assert time_axis([])["bounds"][0] < time_axis([])["bounds"][1]


def test_a_source_says_which_rows_of_an_argument_it_takes() -> None:
    plan = fed()
    actors = details(plan, [0], {})["actors"]
    assert {a["name"]: a["takes"] for a in actors.values()} == {"x": ["rows 2-3 of x"], "F": [], "sink 0": []}
    assert "<title>x: source\ntakes rows 2-3 of x</title>" in actor_graph(plan, {}, {0: [0]})
