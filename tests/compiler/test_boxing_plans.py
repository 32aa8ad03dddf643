"""Boxing as workers carry it out: any layouts one after the other, in plans that coalesce what they can."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.boxing.routes import bytes_bound
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import B, NdSbp, P, Sbp, Split
from boxed_plans import Layouts, boxed_plan
from comms import communications
from fewer import fewer
from models import CASES
from trained import Layout, train_eagerly, train_planned

WORLD = 8
HIERARCHIES = [(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 1, 2), (2, 2, 2)]
EVERYWHERE = Placement("cpu", tuple(range(WORLD)), (WORLD,))


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], Layouts]:
    """A shape and three layouts on meshes, of which two may have the same placement."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3)))
    found: Layouts = []
    for step in range(3):
        if step and draw(st.booleans()):
            where = found[-1][0]
        else:
            hierarchy = draw(st.sampled_from(HIERARCHIES))
            ranks = draw(st.permutations(range(WORLD)))[: math.prod(hierarchy)]
            where = Placement("cpu", tuple(ranks), hierarchy)
        entries: list[Sbp] = [B, *(Split(d) for d in range(len(shape))), *([P] if step else [])]
        sbp: NdSbp = tuple(draw(st.sampled_from(entries)) for _ in where.hierarchy)
        found.append((where, sbp))
    return shape, found


@settings(max_examples=fewer(8))
@given(st.lists(chains(), min_size=8, max_size=8))
def test_workers_keep_the_values_and_move_no_more_than_the_table_says(
    drawn: list[tuple[tuple[int, ...], Layouts]],
) -> None:
    plan = boxed_plan(WORLD, drawn)
    values = {f"v{i}": torch.randn(shape, dtype=torch.float64) for i, (shape, _) in enumerate(drawn)}
    with LocalCluster(plan, variables=values) as cluster:
        results = cluster.run()
    for value, result in zip(values.values(), results, strict=True):
        torch.testing.assert_close(result, -value, rtol=1e-12, atol=1e-12)
    bound = 0.0
    for shape, layouts in drawn:
        for source, target in zip(layouts, [*layouts[1:], (EVERYWHERE, (B,))], strict=True):
            bound += bytes_bound(shape, 8, *source, *target)
    assert sum(c.nbytes for c in communications(plan)) <= bound


CUBE = placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
NESTED = {r"first\.weight": (None, Split(0), Split(1)), r"second\.weight": (Split(0), None, Split(0))}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("hints", [{}, NESTED], ids=["data", "nested splits"])
def test_a_mesh_of_three_axes_trains_as_one_device_does(hints: dict[str, tuple[Sbp | None, ...]]) -> None:
    expected, parameters = train_eagerly(CASES["mlp"], [12] * 3, 1)
    losses, found, _ = train_planned(CASES["mlp"], Layout(8, mesh=CUBE, hints=hints), [12] * 3)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)


def test_gathers_and_scatters_along_one_axis_of_a_mesh_leave_as_one_for_each_group() -> None:
    mesh = placement("cpu", [[0, 1], [2, 3]])
    weights = [((4 + i, 6), [(mesh, (Split(1), Split(0))), (mesh, (Split(1), B))]) for i in range(5)]
    sums = [((8, 3 + i), [(mesh, (B, B)), (mesh, (B, P)), (mesh, (B, Split(0)))]) for i in range(3)]
    found = communications(boxed_plan(4, [*weights, *sums], "float32"))
    gathers = [c for c in found if c.kind == "all_gather" and c.phase == "forward"]
    assert {c.ranks for c in gathers} == {(0, 1), (2, 3)}
    assert len(gathers) == 10
    assert len({c.number for c in gathers}) == 2
    assert sum(c.nbytes for c in gathers) == sum(4 * (4 + i) * 6 for i in range(5))
    scatters = [c for c in found if c.kind == "reduce_scatter"]
    assert {c.ranks for c in scatters} == {(0, 1), (2, 3)}
    assert len(scatters) == 6
    assert len({c.number for c in scatters}) == 2
    assert sum(c.nbytes for c in scatters) == 2 * sum(4 * 8 * (3 + i) for i in range(3))
