"""Sequences are cut into stages as well as trying all cuts would."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.placing.partition import (
    POSITIONS,
    PartitionUnit,
    _Costs,
    least_longest,
    partition,
    stage_seconds,
)

UNITS = st.lists(st.builds(PartitionUnit, *(st.integers(0, 6).map(float) for _ in range(4))), min_size=1, max_size=8)
SPEEDS = st.sampled_from([1.0, 4.0, math.inf])


def crossing(units: list[PartitionUnit], first: tuple[int, ...]) -> float:
    return sum(units[f].crossing for f in first[1:])


def held(units: list[PartitionUnit], first: tuple[int, ...], pieces: int) -> list[float]:
    """The bytes of each stage."""
    stages, ends = len(first), [*first, len(units)]
    return [
        sum(u.parameters + min(pieces, stages - k) * u.activations for u in units[ends[k] : ends[k + 1]])
        for k in range(stages)
    ]


def every_cut(count: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in combinations(range(1, count), stages - 1)]


@given(UNITS, st.data(), SPEEDS, st.integers(1, 4), st.sampled_from([math.inf, 20.0, 40.0]))
def test_no_other_cut_is_faster_nor_as_fast_with_fewer_bytes_across(
    units: list[PartitionUnit], data: st.DataObject, speed: float, pieces: int, memory: float
) -> None:
    stages = data.draw(st.integers(1, len(units)))
    fitting = [c for c in every_cut(len(units), stages) if max(held(units, c, pieces)) <= memory]
    assume(fitting)
    best = min((max(stage_seconds(units, c, speed)), crossing(units, c)) for c in fitting)
    found = partition(units, stages, bytes_per_second=speed, pieces=pieces, memory=memory)
    assert found in fitting
    assert (max(stage_seconds(units, found, speed)), crossing(units, found)) == pytest.approx(best)


@given(UNITS, st.data(), SPEEDS, st.sampled_from([0.1, 0.5]))
def test_slack_is_given_away_for_the_fewest_bytes_only(
    units: list[PartitionUnit], data: st.DataObject, speed: float, slack: float
) -> None:
    stages = data.draw(st.integers(1, len(units)))
    cuts = [(max(stage_seconds(units, c, speed)), crossing(units, c)) for c in every_cut(len(units), stages)]
    fastest, bytes_then = min(cuts)
    fewest = min(c for s, c in cuts if s <= fastest * (1 + slack) * (1 + 1e-12))
    found = partition(units, stages, bytes_per_second=speed, slack=slack)
    assert max(stage_seconds(units, found, speed)) <= fastest * (1 + slack) * (1 + 1e-9)
    assert crossing(units, found) == fewest
    if fewest == bytes_then:
        assert max(stage_seconds(units, found, speed)) == pytest.approx(fastest)


def test_later_stages_hold_fewer_micro_batches() -> None:
    units = [PartitionUnit(1.0, activations=10.0) for _ in range(6)]
    assert partition(units, 3, pieces=8) == (0, 2, 4)
    assert partition(units, 3, pieces=8, memory=40.0) == (0, 1, 3)  # 3 · 10, 2 · 20, 1 · 30


def test_memory_that_no_cut_fits_is_answered_with_what_the_fittest_needs() -> None:
    units = [PartitionUnit(1.0, parameters=10.0) for _ in range(4)]
    with pytest.raises(LayoutError, match=r"into 2 stages fits 15 bytes.*needs 20\. Give more memory"):
        partition(units, 2, memory=15.0)


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_as_many_stages_as_there_are_units_at_most_are_made(stages: int) -> None:
    with pytest.raises(LayoutError, match=f"{stages} stages were found"):
        partition([PartitionUnit(1.0)] * 3, stages)


def test_long_sequences_are_cut_where_few_bytes_cross_and_almost_as_fast() -> None:
    count, stages = 4 * POSITIONS, 16
    units = [PartitionUnit(1.0 + k % 3, crossing=float(k % 4 != 0)) for k in range(count)]
    found = partition(units, stages, slack=0.05)
    total = sum(u.seconds for u in units)
    assert crossing(units, found) == 0
    assert max(stage_seconds(units, found)) <= 1.05 * (total / stages + 2 * total / POSITIONS)
    assert len(set(found)) == stages


def test_long_sequences_with_all_work_in_one_place_are_cut_into_as_many_stages() -> None:
    units = [PartitionUnit(1.0 if k == 900 else 0.0, crossing=float(k)) for k in range(3 * POSITIONS)]
    found = partition(units, 8)
    assert len(found) == 8
    assert crossing(units, found) == sum(range(1, 8))


@given(UNITS, st.data())
def test_the_least_longest_stretch_is_that_of_the_best_cut(units: list[PartitionUnit], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(units)))
    best = min(max(stage_seconds(units, c)) for c in every_cut(len(units), stages))
    assert least_longest([u.seconds for u in units], stages) == pytest.approx(best)
    assert least_longest([u.seconds for u in units], len(units) + 1) == math.inf


def test_stages_that_are_alike_share_their_table_of_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[float, int]] = []
    table = _Costs.seconds_of

    def counted(self: _Costs, slowness: float, alive: int, memory: float) -> object:
        made.append((slowness, alive))
        return table(self, slowness, alive, memory)

    monkeypatch.setattr(_Costs, "seconds_of", counted)
    units = [PartitionUnit(1.0, 1.0, 1.0, 1.0)] * 64
    partition(units, 32, pieces=2, memory=100.0)
    assert sorted(made) == [(1.0, 1), (1.0, 2)]  # the last stage holds one micro-batch, the others two
