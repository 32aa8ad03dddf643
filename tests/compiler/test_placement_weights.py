"""Weights of placements: which are accepted, their lowest terms, how a dim is shared by them, how plans keep them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import actorflow as flow
from actorflow_compiler.boxing.routes import route
from actorflow_compiler.core.digest import digest_of
from actorflow_compiler.core.errors import LayoutError, PlanError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, Split, all_share, canonical, largest, share, smallest, spans
from actorflow_compiler.plan.plan import Plan, Result, Variable, VariableKind
from actorflow_compiler.plan.proto import from_bytes, to_bytes, to_proto
from actorflow_compiler.plan.region import device_shape

WEIGHTS = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)


@given(st.integers(0, 60), WEIGHTS)
def test_the_shares_are_a_contiguous_cut_within_one_of_what_the_weights_say(
    units: int, weights: tuple[int, ...]
) -> None:
    parts = [share(units, weights, i) for i in range(len(weights))]
    assert parts[0][0] == 0
    assert parts[-1][1] == units
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    sizes = [stop - start for start, stop in parts]
    for size, weight in zip(sizes, weights, strict=True):
        exact = units * weight / sum(weights)
        assert math.floor(exact) <= size <= math.ceil(exact)
    assert sizes[largest(weights)] == max(sizes)
    assert sizes[smallest(weights)] == min(sizes)
    assert all_share(units, weights) == all(sizes)


@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 5))
def test_equal_weights_share_as_no_weights_do(units: int, devices: int, weight: int) -> None:
    for index in range(devices):
        assert share(units, (weight,) * devices, index) == share(units, devices, index)


@given(st.integers(0, 60), WEIGHTS, st.integers(2, 5))
def test_a_common_factor_changes_no_share(units: int, weights: tuple[int, ...], factor: int) -> None:
    for index in range(len(weights)):
        assert share(units, tuple(factor * w for w in weights), index) == share(units, weights, index)


def test_the_largest_remainders_get_one_more() -> None:
    assert [share(10, (2, 1), i) for i in range(2)] == [(0, 7), (7, 10)]  # 6.67 and 3.33
    assert [share(5, (1, 2, 1), i) for i in range(3)] == [(0, 1), (1, 4), (4, 5)]  # 1.25, 2.5 and 1.25
    assert [share(1, (1, 1, 2), i) for i in range(3)] == [(0, 0), (0, 0), (0, 1)]
    assert [share(2, (3, 1), i) for i in range(2)] == [(0, 2), (2, 2)]  # 1.5 and 0.5: the first of equal remainders


def test_blocks_and_units_are_each_shared_by_weight() -> None:
    assert spans(18, Split(0, 3), (2, 1), 1) == ((4, 2), (10, 2), (16, 2))
    assert spans(16, Split(0, 1, 4), (3, 1), 0) == ((0, 12),)
    assert canonical(Split(0, 1, 4), 16, (3, 1)) == Split(0)  # four units by 3 and 1: plainly the same
    assert canonical(Split(0, 1, 4), 16, (2, 1)) == Split(0, 1, 4)  # 12 and 4, and plainly 11 and 5


def test_weights_are_kept_in_lowest_terms() -> None:
    assert flow.placement("cpu", [0, 1], weights=[4, 2]) == flow.placement("cpu", [0, 1], weights=(2, 1))
    assert flow.placement("cpu", [0, 1], weights=[3, 3]) == flow.placement("cpu", [0, 1])
    assert hash(flow.placement("cpu", [0, 1], weights=[3, 3])) == hash(flow.placement("cpu", [0, 1]))
    assert flow.placement("cpu", [4], weights=[7]) == flow.placement("cpu", [4])
    assert flow.placement("cpu", [0, 1], weights=[2, 1]) != flow.placement("cpu", [0, 1])
    assert flow.placement("cpu", [0, 1], weights=[2, 1]) != flow.placement("cpu", [1, 0], weights=[1, 2])
    for some in (np.array([4, 2]), torch.tensor([2, 1]), [np.int64(2), np.int32(1)], range(2, 0, -1)):
        assert flow.placement("cpu", [0, 1], weights=some).weights == ((2, 1),)


def test_those_of_a_mesh_are_products_along_its_axes() -> None:
    both = flow.placement("cpu", [[0, 1], [2, 3]], weights=[[6, 2], [3, 1]])
    assert both.weights == ((2, 1), (3, 1))
    assert both.axes == ((2, 1), (3, 1))
    one = flow.placement("cpu", [[0, 1], [2, 3]], weights=[[2, 2], [1, 1]])
    assert one.weights == ((2, 1), ())
    assert one.axes == ((2, 1), 2)
    assert flow.placement("cpu", [[0, 1], [2, 3]], weights=[[5, 5], [5, 5]]).weights == ()
    assert [device_shape((9, 8), (Split(0), Split(1)), both, i) for i in range(4)] == [(6, 6), (6, 2), (3, 6), (3, 2)]
    assert [device_shape((12,), (Split(0), Split(0)), both, i) for i in range(4)] == [(6,), (2,), (3,), (1,)]


def test_text_and_repr_show_weights_only_where_there_are_some() -> None:
    assert str(flow.placement("cpu", [0, 1])) == "cpu:[0,1]"
    assert str(flow.placement("cpu", [0, 1], weights=[4, 2])) == "cpu:[0,1]*[2,1]"
    assert str(flow.placement("cuda", [[0, 1], [2, 3]], weights=[[2, 2], [1, 1]])) == "cuda:[0,1,2,3](2,2)*[2,1]*[1,1]"
    assert repr(flow.placement("cpu", [0])) == "Placement(type='cpu', ranks=(0,), hierarchy=(1,))"
    weighted = flow.placement("cpu", [0, 1], weights=[2, 1])
    assert eval(repr(weighted), {"Placement": Placement}) == weighted


@pytest.mark.parametrize(
    ("ranks", "weights", "text"),
    [
        ([0, 1], [2, 0], r"the weight 0 .* 1 to 1,000,000"),
        ([0, 1], [2, -1], r"the weight -1 "),
        ([0, 1], [2, math.nan], r"the weight nan "),
        ([0, 1], [2, math.inf], r"the weight inf "),
        ([0, 1], [1.5, 1], r"the weight 1\.5 .* of 1\.5 and 1 make 3 and 2"),
        ([0, 1], [True, 1], r"the weight True "),
        ([0, 1], ["2", 1], r"the weight '2' "),
        ([0, 1], [None, 1], r"the weight None "),
        ([0, 1], [10**7, 1], r"the weight 10000000 "),
        ([0, 1], [2, 1, 1], r"with 3 in the place of 2; 2 weights"),
        ([0, 1], [2], r"with 1 in the place of 2"),
        ([0, 1], [], r"with 0 in the place of 2"),
        ([0, 1], "21", r"weights='21' .* one for each rank"),
        ([0, 1], 2, r"weights=2 "),
        ([0, 1], {0: 2, 1: 1}, r"one for each rank"),
        ([0, 1], [[2], [1]], r"nested as the ranks are"),
        ([[0, 1], [2, 3]], [2, 1, 2, 1], r"with 4 in the place of 2; 2 × 2 weights"),
        ([[0, 1], [2, 3]], [2, 1], r"nested as the ranks are"),
        ([[0, 1], [2, 3]], [[3, 1], [1, 1]], r"do not share alike everywhere; a product"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(ranks: Any, weights: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        flow.placement("cpu", ranks, weights=weights)


def plan_on(placement: Placement) -> Plan:
    variable = Variable(
        "w", (6, 4), "float32", placement, (Split(0),) * len(placement.hierarchy), VariableKind.PARAMETER
    )
    result = Result(0, (6,), "float32", placement, (B,) * len(placement.hierarchy))
    return Plan("weights", 4, 1, (), (), (), (variable,), (result,))


@pytest.mark.parametrize("weights", [None, [[2, 2], [1, 1]], [[1, 2], [1, 2]], [[6, 2], [3, 1]]], ids=str)
def test_a_plan_keeps_them_over_the_wire(weights: Any) -> None:
    plan = plan_on(flow.placement("cpu", [[0, 1], [2, 3]], weights=weights))
    assert from_bytes(to_bytes(plan)) == plan


def test_a_plan_without_weights_has_the_bytes_that_it_had() -> None:
    assert not to_proto(plan_on(flow.placement("cpu", [0, 1]))).variables[0].weights


@pytest.mark.parametrize("found", [[4, 2], [1, 1], [2], [2, 1, 1], [0, 1]], ids=str)
def test_weights_in_a_message_that_are_no_placement_s_are_refused(found: list[int]) -> None:
    message = to_proto(plan_on(flow.placement("cpu", [0, 1], weights=[2, 1])))
    message.variables[0].weights[:] = found
    with pytest.raises(PlanError):
        from_bytes(message.SerializeToString())


def test_digests_tell_weights_apart() -> None:
    plain = flow.placement("cpu", [0, 1])
    found = {digest_of(p) for p in (plain, flow.placement("cpu", [0, 1], weights=[2, 1]))}
    assert len(found) == 2
    assert digest_of(flow.placement("cpu", [0, 1], weights=[2, 2])) == digest_of(plain)


def test_from_weights_to_none_each_rank_gets_only_what_it_lacks() -> None:
    weighted, plain = flow.placement("cpu", [0, 1], weights=[3, 1]), flow.placement("cpu", [0, 1])
    (hop,) = route((8,), weighted, (Split(0),), plain, (Split(0),))
    assert hop.elements == 2  # of 6 and 2 to 4 and 4
    assert route((8,), weighted, (B,), plain, (B,))[0].elements == 0
    assert replace(weighted, weights=()) == plain
