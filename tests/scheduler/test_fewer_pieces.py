"""Forecasts of plans of many micro-batches by two of fewer are those of the whole plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

import actorflow as flow
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.compile import capture_step, fold_captured
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.variant import PLAIN
from actorflow_scheduler import fewer_pieces
from actorflow_scheduler.cost import moved_by_all, variable_bytes
from actorflow_scheduler.fewer_pieces import forecast_draft, pieces_of_drafts, with_pieces
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.schedule import schedule_folded
from models import CASES, DEEP_GPT
from trained import Layout, request_of

NODES = Hardware(node_size=2, inside=Link(4e11, 1e-6), bytes_per_s=1e9, latency_s=1e-5)
LAYOUTS = {
    "2 stages": (Layout(2, 48, hardware=NODES, goal=goal_of("pipeline", None)), "1f1b"),
    "4 stages": (Layout(4, 64, hardware=NODES, goal=goal_of("pipeline", None)), "1f1b"),
    "2 stages × data 2, ZeRO 2": (
        Layout(
            4, 48, hardware=NODES, goal=goal_of({"pipeline": 2, "data": 2}, None),
            prepare=lambda model: flow.zero(model, 2),
        ),
        "1f1b",
    ),
    "2 stages, the best order": (Layout(2, 48, hardware=NODES, goal=goal_of("pipeline", None)), "auto"),
    "data 2": (Layout(2, 48, hardware=NODES), "auto"),
    "data 2, ZeRO 3": (Layout(2, 48, hardware=NODES, prepare=lambda model: flow.zero(model, 3)), "auto"),
}  # fmt: skip


def captured_of(layout: Layout) -> tuple[Capture, StepRequest]:
    request, _ = request_of(replace(DEEP_GPT, batches=CASES["gpt"].batches), layout, 2 * layout.micro_batches)
    return capture_step(request), request


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_is_forecast_from_two_of_fewer_micro_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, schedule = LAYOUTS[name]
    step = fold_captured(*captured_of(layout))
    whole = schedule_folded(step.cut, NODES, name=schedule, proven=False)
    expected = forecast(whole, NODES)
    assert forecast_draft(step.cut, NODES, name=schedule) == (expected, moved_by_all(whole))
    monkeypatch.setattr(fewer_pieces, "MANY", 100)
    found, moved = forecast_draft(step.cut, NODES, name=schedule)
    assert found.drafted
    assert not expected.drafted
    assert found.micro_batches == expected.micro_batches == layout.micro_batches
    searched = schedule == "auto" and "stages" in name  # other orders are found for other numbers of micro-batches
    assert found.period == pytest.approx(expected.period, rel=0.05 if searched else 0.01)
    assert moved == pytest.approx(moved_by_all(whole), rel=1e-6)
    held, known = (max(rank.total for rank in one.ranks) for one in (found, expected))
    assert held == pytest.approx(known, rel=0.2 if searched else 0.03)
    assert found.bubble == pytest.approx(expected.bubble, abs=0.03 if searched else 0.01)


def test_only_large_plans_are_forecast_so_whose_parts_all_happen_once_or_for_each_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = fold_captured(*captured_of(LAYOUTS["2 stages"][0])).cut(PLAIN).plan
    assert pieces_of_drafts(plan) is None
    monkeypatch.setattr(fewer_pieces, "MANY", 100)
    assert pieces_of_drafts(plan) == (8, 12)
    some = next(k for k, a in enumerate(plan.actors) if a.rate == plan.pieces)
    uneven = tuple(replace(a, rate=8) if k == some else a for k, a in enumerate(plan.actors))
    assert pieces_of_drafts(replace(plan, actors=uneven)) is None
    few = fold_captured(*captured_of(replace(LAYOUTS["2 stages"][0], micro_batches=32))).cut(PLAIN).plan
    assert pieces_of_drafts(few) is None  # of 20 micro-batches together, which are more than half of 32


def test_fewer_micro_batches_are_as_if_the_batch_was_smaller() -> None:
    layout, _ = LAYOUTS["2 stages × data 2, ZeRO 2"]
    plans: list[FoldedPlan] = [
        with_pieces(fold_captured(*captured_of(replace(layout, micro_batches=count))).cut(PLAIN), 8)
        for count in (8, 48)
    ]
    (one, seconds), (other, longer) = (
        (found, forecast(schedule_folded(found, NODES, name="1f1b", proven=False), NODES).period) for found in plans
    )
    assert [a.rate for a in one.plan.actors] == [a.rate for a in other.plan.actors]
    assert [(r.fill, r.readers) for r in one.plan.registers] == [(r.fill, r.readers) for r in other.plan.registers]
    assert one.plan.pieces == other.plan.pieces == 8
    assert longer == pytest.approx(seconds, rel=0.01)  # it takes the whole batch apart


def test_an_error_of_a_plan_to_be_compared_says_nothing_of_other_schedules() -> None:
    layout, _ = LAYOUTS["2 stages"]
    step = fold_captured(*captured_of(layout))

    needs = forecast(schedule_folded(step.cut, NODES, name="1f1b", proven=False), NODES)
    enough = max(rank.registers + rank.workspace for rank in needs.ranks)
    between = dict.fromkeys(variable_bytes(step.cut(PLAIN).plan), enough)
    with pytest.raises(PlanError, match=r"'gpipe'.*schedule='1f1b' needs \d+ there and fits"):
        schedule_folded(step.cut, NODES, between, "gpipe")
    with pytest.raises(PlanError, match=r"'gpipe'.*use more ranks") as compared:
        schedule_folded(step.cut, NODES, between, "gpipe", proven=False)
    assert "schedule='1f1b'" not in str(compared.value)
