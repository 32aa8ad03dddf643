"""What the forecast says of a plan, and that alike ranks need to be simulated once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actorflow_scheduler.firing_times
import actorflow_scheduler.forecast
from actorflow_compiler.core.errors import DeadlockError, LayoutError
from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.plan.plan import Plan, Variable
from actorflow_scheduler import schedule
from actorflow_scheduler.firing_times import FiringTimes
from actorflow_scheduler.forecast import forecast, run_until_steady
from actorflow_scheduler.forecast_text import to_text
from actorflow_scheduler.outline import outline
from actorflow_scheduler.rank_classes import fold
from actorflow_scheduler.replicas import replicated
from actorflow_scheduler.timeline import nanoseconds, simulate
from drawn_plans import meshes, pipelines
from fewer import fewer
from orders import least, ordered, with_slots
from plans import Sketch, pipeline
from runtime.coming_rows import fed

UNIT = Hardware(flops_per_s=1.0, bytes_per_s=1e12, latency_s=0.0, fire_overhead_s=0.0)  # one operation a second
SLOW = Hardware(flops_per_s=1e3, bytes_per_s=1e4, latency_s=2e-4, fire_overhead_s=0.0)


def stages_of(stages: int, replicas: int, nbytes: int = 400, pieces: int = 8) -> Plan:
    """A scheduled pipeline whose stages have a variable each."""
    plan = schedule(pipeline(stages, pieces, replicas=replicas, statistics=(1,), nbytes=nbytes), SLOW)
    ranks = [tuple(range(k * replicas, (k + 1) * replicas)) for k in range(stages)]
    variables = tuple(
        Variable(f"w{k}", (100 * (k + 1),), "float32", Placement("cpu", r, (replicas,)), (B,), "parameter")
        for k, r in enumerate(ranks)
    )
    return replace(plan, variables=variables)


def test_a_symmetric_plan_is_foretold_by_one_rank_of_each_stage_as_by_all_of_them() -> None:
    plan = stages_of(4, 4)
    found = forecast(plan, SLOW)
    assert [list(r.ranks) for r in found.ranks] == [[4 * k + d for d in range(4)] for k in range(4)]
    whole = simulate(plan, 4, SLOW)
    assert found.steady
    assert found.period == whole.period
    assert found.first == whole.iteration_ends[0] / 1e9
    peaks = whole.peak_bytes
    for ranks in found.ranks:
        for rank in ranks.ranks:
            assert ranks.registers == peaks[rank]
            assert ranks.variables == 400 * (rank // 4 + 1)
    lines = str(simulate(plan, 1, SLOW)).splitlines()
    assert [" ".join(r.order) for r in found.ranks for _ in r.ranks] == [line.partition(": ")[2] for line in lines]


@pytest.mark.parametrize(("more", "classes"), [(1e-6, [[0, 1]]), (0.01, [[0], [1]])])
def test_ranks_with_as_good_as_the_same_work_are_of_one_class(more: float, classes: list[list[int]]) -> None:
    plan = stages_of(1, 2)  # one rank adds a bias, the others do not
    actors = tuple(replace(a, flops=a.flops * (1 + more)) if a.rank == 0 else a for a in plan.actors)
    assert any(a.flops for a in actors)
    found = forecast(replace(plan, actors=actors), SLOW)
    assert [list(r.ranks) for r in found.ranks] == classes


@settings(max_examples=fewer(60), deadline=None)
@given(st.one_of(pipelines(), meshes()))
def test_folding_changes_no_firing(plan: Plan) -> None:
    plan = ordered(with_slots(plan, least(plan)), SLOW)
    times = nanoseconds(plan, SLOW)
    folded = fold(plan, times)
    assert sorted(r for ranks in folded.rank_classes.values() for r in ranks) == sorted({a.rank for a in plan.actors})
    few, all_of_them = FiringTimes(folded.plan, times), FiringTimes(plan, times)
    assert few.run(3)
    assert all_of_them.run(3)
    for actor in folded.plan.actors:
        assert few.ends[actor.id] == all_of_them.ends[actor.id]
        assert few.durations[actor.id] == all_of_them.durations[actor.id]


def test_ranks_at_other_ends_of_unlike_links_are_not_alike() -> None:
    plan = stages_of(2, 2)
    assert len(forecast(plan, SLOW).ranks) == 2
    nodes = replace(SLOW, node_size=3, inside=Link(1e6, 1e-5))  # rank 0 → 2 stays on a node, rank 1 → 3 does not
    assert len(forecast(plan, nodes).ranks) == 4


def test_the_bubble_of_1f1b_is_the_published_one() -> None:
    for stages, pieces in ((2, 4), (4, 8), (8, 32)):
        found = forecast(outline(stages, pieces, flops=10.0, sent=1, saved=1, parameters=1), UNIT)
        assert found.bubble == pytest.approx((stages - 1) / (pieces + stages - 1), abs=1e-3)


def test_computing_limits_a_plan_on_a_fast_network_and_sending_one_on_a_slow_network() -> None:
    plan = schedule(pipeline(2, 8, nbytes=400), UNIT)
    assert forecast(plan, UNIT).critical[0][1] == "compute"
    slow = replace(UNIT, bytes_per_s=10.0)
    assert forecast(plan, slow).critical[0][1].startswith("send:")
    shares = [share for _, _, share in forecast(plan, slow).critical]
    assert sum(shares) == pytest.approx(1.0)


def test_an_outline_says_what_its_pipeline_does_with_all_replicas_listed() -> None:
    one = outline(3, 6, 4, flops=1000.0, sent=100, saved=200, parameters=50, dtype="float32", optimizer=0)
    found = forecast(one, SLOW)
    assert found.world == 12
    assert [list(r.ranks) for r in found.ranks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [" ".join(r.order) for r in found.ranks] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0B4 0B5 0O0",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5 1O0",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 2O0",
    ]
    reduced = 200 * 3 / 4 * 2 / SLOW.bytes_per_s + 2 * SLOW.latency_s  # of four replicas, in two rounds
    assert found.ranks[0].busy["comm"] * found.period == pytest.approx(reduced)


def test_many_replicas_of_a_plan_are_foretold_as_if_all_were_planned() -> None:
    few, many = stages_of(3, 2), stages_of(3, 6)
    found = forecast(replicated(few, 3), SLOW)
    listed = forecast(many, SLOW)
    assert found.world == listed.world == 18
    assert found.period == pytest.approx(listed.period)
    assert [list(r.ranks) for r in found.ranks] == [list(r.ranks) for r in listed.ranks]
    assert [(r.registers, r.variables, r.order) for r in found.ranks] == [
        (r.registers, r.variables, r.order) for r in listed.ranks
    ]


def test_replicas_are_not_multiplied_where_there_are_none() -> None:
    with pytest.raises(LayoutError, match="no other rank holds the same parts of all variables as rank 0"):
        replicated(stages_of(2, 1), 4)
    plan = stages_of(2, 2)
    split = tuple(replace(v, sbp=(Split(0),)) for v in plan.variables)
    with pytest.raises(LayoutError, match="expected at least two of each"):
        replicated(replace(plan, variables=split), 4)


def test_tensor_parallel_groups_stay_as_large_as_they_are() -> None:
    s = Sketch()
    mesh = Placement("cpu", (0, 1, 2, 3), (2, 2))  # data × tensor
    parts = [s.actor("F", rank=r) for r in range(4)]
    for group in ((0, 1), (2, 3)):
        for r, member in zip(group, s.collective(group, "activations"), strict=True):
            s.join(parts[r], member)
    for group in ((0, 2), (1, 3)):
        for r, member in zip(group, s.collective(group, "gradients"), strict=True):
            s.join(parts[r], member)
    weight = Variable("w", (8,), "float32", mesh, (B, Split(0)), "parameter")
    folded = replicated(replace(s.plan(), variables=(weight,)), 4)
    groups = {a.name: len(a.comm.ranks) for a in folded.plan.actors if a.comm is not None}
    assert groups == {"activations": 2, "gradients": 8}


def test_of_a_plan_with_many_firings_few_iterations_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = schedule(pipeline(3, 6), Hardware(flops_per_s=1e3), name="1f1b")
    monkeypatch.setattr(actorflow_scheduler.forecast, "_cycle", lambda _: 0)  # as if no iteration were as another
    firings = [run_until_steady(plan, nanoseconds(plan, Hardware(flops_per_s=1e3)), plan)[0].iterations]
    monkeypatch.setattr(actorflow_scheduler.firing_times, "SIMULATED", 1)
    firings.append(run_until_steady(plan, nanoseconds(plan, Hardware(flops_per_s=1e3)), plan)[0].iterations)
    assert firings == [8, 3]


def test_a_stuck_plan_raises_its_cycle() -> None:
    s = Sketch()
    a, b = s.actor("a"), s.actor("b", "sink", queue="sink")
    s.join(a, b)
    s.join(b, a)
    with pytest.raises(DeadlockError, match="a@rank0 waits for register 1"):
        forecast(s.plan({}), UNIT)


def test_the_text_says_what_fits_and_what_does_not() -> None:
    plan = outline(2, 4, 2, flops=1e6, sent=1000, saved=1000, parameters=1000, dtype="float32", optimizer=2)
    text = to_text(forecast(plan, replace(SLOW, memory_bytes=1 << 20)), full=True)
    assert "for 4 micro-batches" in text
    assert "all ranks fit 1.0 MiB" in text
    assert "ranks 2-3: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1O0" in text
    short = to_text(forecast(plan, replace(SLOW, memory_bytes=1000)))
    assert "4 of 4 ranks do not fit 1000 B" in short
    assert "1F0" not in short


def test_sixteen_thousand_devices_are_foretold_without_listing_them() -> None:
    plan = outline(64, 128, 256, flops=1e12, sent=1 << 20, saved=1 << 20, parameters=1 << 20)
    assert len(plan.plan.actors) < 64 * 8
    found = forecast(plan, Hardware())
    assert found.world == sum(len(r.ranks) for r in found.ranks) == 16_384
    assert found.bubble == pytest.approx(63 / (128 + 63), rel=0.1)


def test_the_text_says_of_a_plan_that_takes_batches_that_reading_them_is_not_counted() -> None:
    word = "batches   are taken to be there in time: reading them is not counted"
    assert word in to_text(forecast(fed(), SLOW))
    assert word not in to_text(forecast(stages_of(2, 1), SLOW))
