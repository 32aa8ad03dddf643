"""ZeRO splits the dim of a variable whose parts are gathered soonest, beside what other mesh axes split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actorflow_compiler.core.hardware import CPU_CORE, Hardware, Link
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.hints.constrain import Wish
from actorflow_compiler.infer.zero_split import zero_split

NODES = replace(CPU_CORE, node_size=4, inside=Link(100 * CPU_CORE.bytes_per_s, CPU_CORE.latency_s))


def mesh(*sizes: int) -> Placement:
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes).tolist()
    return placement("cpu", ranks)


@pytest.mark.parametrize(
    ("shape", "sizes", "axis", "beside", "wanted"),
    [
        ((8, 8), (2,), 0, (None,), Split(0)),
        ((7, 8), (2,), 0, (None,), Split(1)),
        ((5, 7), (3,), 0, (None,), Split(1)),  # neither divides: the larger one
        ((2,), (3,), 0, (None,), None),
        ((0, 4), (2,), 0, (None,), Split(1)),
        ((8, 8), (2, 2), 0, (None, Split(0)), Split(1)),
        ((8, 8), (2, 2), 0, (None, Split(1)), Split(0)),
        ((8, 8), (2, 2), 0, (None, B), Split(0)),
        ((1 << 18,), (2, 2), 0, (None, Split(0)), Split(0, 2)),  # there is no other dim: in blocks of the later axis
        (((1 << 18) + 2,), (2, 2), 0, (None, Split(0)), Split(0)),  # they would not be even
        ((1 << 17,), (2, 2), 0, (None, Split(0)), None),  # … and few elements: not worth messages across groups
        ((1 << 17,), (2, 2), 1, (Split(0), None), Split(0)),
        ((8, 3), (2, 2), 0, (None, Split(0)), Split(0, 2)),  # the other dim would be far from even
        ((7, 101), (2, 2), 0, (None, Split(0)), Split(1)),  # nearly even
        ((12 << 16, 1), (2, 3), 0, (None, Split(0)), Split(0, 3)),
        ((8, 8), (2, 2), 1, (Split(0), None), Split(0)),  # an earlier axis leaves groups as they are
        ((8, 8), (2, 1), 0, (None, Split(0)), Split(0)),  # an axis of one device splits nothing
        ((12, 5), (2, 2), 0, (None, Split(0, 3)), Split(0, 6)),
        ((6, 5), (3, 2), 0, (None, Split(0, 3)), Split(1)),  # three blocks do not fit what would be left: 5 is not even
        ((4, 8, 8), (2, 2, 2), 0, (None, Split(0), Split(1)), Split(2)),
        ((512, 1024), (2, 2, 2), 0, (None, Split(0), Split(1)), Split(0, 2)),  # both are split: the first
    ],
    ids=str,
)
def test_the_dim_that_costs_least_is_split(
    shape: tuple[int, ...], sizes: tuple[int, ...], axis: int, beside: Wish, wanted: Split | None
) -> None:
    assert zero_split(beside, shape, axis, mesh(*sizes), CPU_CORE) == wanted


@pytest.mark.parametrize(("hardware", "wanted"), [(CPU_CORE, Split(0)), (NODES, Split(1))], ids=["one link", "nodes"])
def test_of_dims_that_are_split_already_it_is_the_one_whose_groups_are_joined_fast(
    hardware: Hardware, wanted: Split
) -> None:
    where = mesh(2, 2, 2)  # the first axis is between nodes, the others are in them
    assert zero_split((Split(0), None, Split(1)), (512, 512), 1, where, hardware) == Split(0)
    assert zero_split((None, Split(0), Split(1)), (510, 510), 0, where, hardware) == Split(0)
    inside = placement("cpu", [[[0, 4], [1, 5]], [[2, 6], [3, 7]]])  # the last axis is between nodes
    assert zero_split((None, Split(1), Split(0)), (510, 510), 0, inside, hardware) == wanted
    assert zero_split((None, Split(1), Split(0)), (512, 512), 0, inside, hardware) == Split(0, 2)  # no group is joined


def test_devices_with_weights_are_as_even_as_their_weights() -> None:
    where = Placement("cpu", (0, 1), (2,), ((2, 1),))
    assert zero_split((None,), (8, 9), 0, where, CPU_CORE) == Split(1)
