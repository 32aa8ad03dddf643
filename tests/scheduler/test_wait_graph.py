"""Cycles of who waits for whom: found where there are any, and none is shorter."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow_scheduler.wait_graph import shortest_cycle

graphs = st.dictionaries(st.integers(0, 6), st.lists(st.integers(0, 6), unique=True, max_size=4), max_size=7)


def is_acyclic(waits: dict[int, list[int]]) -> bool:
    try:
        TopologicalSorter(waits).prepare()
    except CycleError:
        return False
    return True


def walks(waits: dict[int, list[int]], length: int) -> set[tuple[int, int]]:
    """From where to where there is a way of some length."""
    found = {(node, node) for node in waits}
    for _ in range(length):
        found = {(start, other) for start, node in found for other in waits.get(node, ())}
    return found


@given(waits=graphs)
def test_what_is_found_is_a_cycle_and_none_is_shorter(waits: dict[int, list[int]]) -> None:
    cycle = shortest_cycle(waits)
    assert bool(cycle) != is_acyclic(waits)
    assert all(then in waits[node] for node, then in pairwise([*cycle, *cycle[:1]]))
    assert len(set(cycle)) == len(cycle)
    for shorter in range(1, len(cycle)):
        assert not any(start == end for start, end in walks(waits, shorter))


@given(waits=graphs)
def test_it_begins_with_the_first_that_is_in_a_cycle_so_short(waits: dict[int, list[int]]) -> None:
    cycle = shortest_cycle(waits)
    back = {start for start, end in walks(waits, len(cycle)) if start == end}
    assert cycle[:1] == [node for node in waits if node in back and cycle][:1]


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ({}, []),
        ({0: [0]}, [0]),
        ({0: [1], 1: []}, []),
        ({0: [1], 1: [2], 2: [3], 3: [1]}, [1, 2, 3]),
        ({2: [0], 0: [1], 1: [2]}, [2, 0, 1]),
        ({0: [1, 2], 1: [2], 2: [3], 3: [0, 2]}, [2, 3]),
    ],
)
def test_examples(waits: dict[int, list[int]], expected: list[int]) -> None:
    assert shortest_cycle(waits) == expected


def test_hundreds_that_wait_for_all_before_them_are_looked_through_at_once() -> None:
    """One pass over the edges shows that there is no cycle; a search from each of them would take minutes."""
    assert shortest_cycle({node: range(node) for node in range(500)}) == []
