"""The timeline that is foretold: what is drawn is what the machine does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow.show.timeline import ALL_RANKS, forecast_timeline
from actorflow_compiler.core.hardware import Hardware, SharedCores
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.schedule import schedule
from actorflow_scheduler.timeline import nanoseconds
from plans import pipeline
from shown_plans import view

FAST = Hardware()


def test_the_iteration_that_is_looked_at_has_every_firing_once_in_each_period() -> None:
    plan = view().plan
    found, told = forecast_timeline(plan, FAST), forecast(plan, FAST)
    by_actor: dict[int, list[int]] = {}
    for s in found.spans:
        by_actor.setdefault(s.actor, []).append(s.firing)
        assert s.piece == s.firing % plan.actor(s.actor).rate
    for actor in plan.actors:
        fired = sorted(by_actor[actor.id])
        assert fired == list(range(len(fired)))
        assert len(fired) % actor.rate == 0
    starts = {(s.actor, s.firing): s.start for s in found.spans}
    a = next(a for a in plan.actors if a.kind == "forward")
    last = len(by_actor[a.id]) - 1
    assert starts[a.id, last] - starts[a.id, last - a.rate] == pytest.approx(told.period)
    assert found.begin < found.end <= max(s.end for s in found.spans)


def test_firings_of_the_critical_cycle_follow_one_another_without_a_gap() -> None:
    plan = view().plan
    found, latency = forecast_timeline(plan, FAST), nanoseconds(plan, FAST).latency
    spans = [s for s in found.spans if (s.actor, s.firing) in found.critical]
    ends = {round(s.end * 1e9) + sent for s in spans for sent in (0, *latency.values())}  # tokens, and credits
    inside = [s for s in found.spans if (s.actor, s.firing) in found.critical and found.begin < s.start < found.end]
    assert inside
    assert all(round(s.start * 1e9) in ends for s in inside)


def test_memory_over_time_peaks_where_the_forecast_says_or_below() -> None:
    plan = view().plan
    told = {rank: r for r in forecast(plan, FAST).ranks for rank in r.ranks}
    for rank, (when, held) in forecast_timeline(plan, FAST).memory.items():
        assert list(when) == sorted(set(when))
        assert told[rank].registers + told[rank].variables <= max(held) <= told[rank].total
        assert min(held) >= told[rank].variables


def test_of_many_ranks_one_of_those_that_are_alike_is_drawn() -> None:
    plan = schedule(pipeline(2, 4, replicas=ALL_RANKS), FAST)
    found = forecast_timeline(plan, FAST)
    assert len({s.rank for s in found.spans}) == 2
    assert sorted(r for s in {s.rank for s in found.spans} for r in found.ranks_of(s)) == list(range(plan.world))
    whole = forecast_timeline(schedule(pipeline(2, 4, replicas=2), FAST), FAST)
    assert {s.rank for s in whole.spans} == set(range(4))


@pytest.mark.parametrize("replicas", [2, ALL_RANKS])
def test_ranks_that_share_cores_are_drawn_as_slow_as_they_are_foretold(replicas: int) -> None:
    plan = schedule(pipeline(2, 4, replicas=replicas), FAST)
    shared = replace(FAST, cores=SharedCores(0.25, 1))
    told = forecast(plan, shared).period
    assert told > 2 * forecast(plan, FAST).period
    found = forecast_timeline(plan, shared)
    last = max(s.end for s in found.spans if s.kind == "optimizer")
    before = max(s.end for s in found.spans if s.kind == "optimizer" and s.end < last - told / 2)
    assert last - before == pytest.approx(told, rel=1e-3)
