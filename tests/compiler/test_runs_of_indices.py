"""Runs of indices are the sets that they stand for, and their ranges ascend and do not touch."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow_compiler.core.runs import (
    Runs,
    difference,
    intersection,
    length,
    position,
    position_of_each,
    selection,
    union,
)

RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6)
RUNS = RANGES.map(union)


def members(runs: Runs) -> list[int]:
    return [index for lo, hi in runs for index in range(lo, hi)]


def whole(runs: Runs) -> bool:
    """Whether no range is empty, and a gap lies between each and the next."""
    return all(lo < hi for lo, hi in runs) and all(a[1] < b[0] for a, b in itertools.pairwise(runs))


@given(RANGES)
def test_a_union_has_what_is_in_any_range(ranges: list[tuple[int, int]]) -> None:
    found = union(ranges)
    assert members(found) == sorted({index for lo, hi in ranges for index in range(lo, hi)})
    assert whole(found)


@given(RUNS, RUNS)
def test_runs_are_intersected_and_subtracted_as_sets(a: Runs, b: Runs) -> None:
    common, rest = intersection(a, b), difference(a, b)
    assert members(common) == sorted({*members(a)} & {*members(b)})
    assert members(rest) == sorted({*members(a)} - {*members(b)})
    assert whole(common)
    assert whole(rest)
    assert length(a) == length(common) + length(rest) == len(members(a))


@given(RUNS, st.data())
def test_positions_in_runs_are_counted_over_their_gaps(runs: Runs, data: st.DataObject) -> None:
    indices = members(runs)
    assert [position(runs, index) for index in indices] == [*range(len(indices))]
    assert position_of_each(runs, indices) == [*range(len(indices))]
    assert position_of_each(runs, indices[1::2]) == [*range(len(indices))][1::2]
    with pytest.raises(AssertionError):
        position(runs, 20)
    with pytest.raises(AssertionError, match="20 is not in"):
        position_of_each(runs, [20])
    starts = data.draw(st.lists(st.integers(0, len(indices)), max_size=4))
    ranges = [(start, data.draw(st.integers(0, len(indices) - start))) for start in starts]
    assert members(selection(runs, ranges)) == [index for start, n in ranges for index in indices[start : start + n]]
