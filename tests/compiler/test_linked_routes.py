"""Between nodes values cross in parts, which are gathered inside of them: what moves, what it is, and what trains."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.boxing import linked_routes
from actorflow_compiler.boxing.aligned import NotAlignedError, aligned_route
from actorflow_compiler.boxing.linked_routes import LinkedRoutes, seconds_in_parts
from actorflow_compiler.boxing.routes import Hop, HopKind
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import CPU_CORE, Hardware, Link
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import B, NdSbp, P, Sbp, Split
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import place
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler.forecast import forecast
from boxed_plans import Layouts, boxed_plan
from comms import communications
from compiler.test_boxing import ENTRIES, follow, joined, numbers, spread
from models import CASES
from trained import Layout, plan_of, train_eagerly, train_planned

SLOW, FAST = Link(1e6, 0.0), Link(1e12, 0.0)


def nodes_of(size: int) -> Hardware:
    """Nodes of that many ranks, between which it takes a million times as long as inside of them."""
    return Hardware(bytes_per_s=SLOW.bytes_per_s, latency_s=SLOW.latency_s, node_size=size, inside=FAST)


def stages(data: int, tensor: int) -> tuple[Placement, Placement]:
    """The meshes of two pipeline stages, the tensor axis inside of nodes."""
    size = data * tensor
    return tuple(Placement("cpu", tuple(range(k * size, (k + 1) * size)), (data, tensor)) for k in range(2))


def of_pairs(hop: Hop) -> Hop:
    """The hop with the copies of each pair of devices written out."""
    if hop.kind is HopKind.ALL_REDUCE:
        return hop
    parts = tuple(tuple(hop.pair(t, s) for s in range(hop.source.size)) for t in range(hop.target.size))
    return Hop(hop.kind, hop.source, hop.target, hop.target_sbp, hop.groups, parts, hop.add, hop.elements)


def check_carries(
    hops: Iterable[Hop], shape: tuple[int, ...], source: Placement, a: NdSbp, target: Placement, b: NdSbp
) -> None:
    """Carry out hops, which must take a value from one layout to the other."""
    whole = numbers(*shape)
    parts = spread(whole, source, a)
    for hop in hops:
        parts = follow(of_pairs(hop), parts, whole.shape)
    assert torch.equal(joined(parts, whole.shape, target, b), whole)


def between_nodes(hops: Iterable[Hop]) -> int:
    """The elements that ranks send to those of the other stage."""
    return sum(hop.elements for hop in hops if hop.kind is HopKind.SEND)


@st.composite
def crossings(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, NdSbp, NdSbp]:
    """A shape, a mesh for each of two stages, and a layout on each."""
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 8]), min_size=1, max_size=3)))
    data, tensor = draw(st.sampled_from([(1, 2), (1, 4), (2, 2), (3, 2), (2, 4)]))
    fitting: list[Sbp] = [e for e in ENTRIES if not isinstance(e, Split) or e.dim < len(shape)]
    a, b = ((draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting))) for _ in range(2))
    return shape, data, tensor, a, b


@given(crossings())
def test_a_value_crosses_whole_and_never_more_of_it_than_by_bytes_alone(
    crossing: tuple[tuple[int, ...], int, int, NdSbp, NdSbp],
) -> None:
    shape, data, tensor, a, b = crossing
    source, target = stages(data, tensor)
    try:
        plain = aligned_route(shape, source, a, target, b)
    except LayoutError:
        with pytest.raises(LayoutError):
            LinkedRoutes(nodes_of(tensor)).find(Meta(shape, "float64"), source, a, target, b)
        return
    hops = LinkedRoutes(nodes_of(tensor)).find(Meta(shape, "float64"), source, a, target, b)
    check_carries(hops, shape, source, a, target, b)
    assert (hops[-1].target, hops[-1].target_sbp) == (target, b)
    assert between_nodes(hops) <= between_nodes(plain)


@pytest.mark.parametrize(
    ("a", "kinds"),
    [
        (P, ["reduce_scatter", "send", "all_gather"]),
        (B, ["local", "send", "all_gather"]),
        (Split(1), ["send", "all_gather"]),
    ],
    ids=["partial sums", "copies", "parts"],
)
def test_what_a_stage_needs_whole_crosses_once_from_each_device_to_its_like(a: Sbp, kinds: list[str]) -> None:
    source, target = stages(2, 4)
    hops = LinkedRoutes(nodes_of(4)).find(Meta((16, 8), "float32"), source, (Split(0), a), target, (Split(0), B))
    assert [hop.kind for hop in hops] == kinds
    send = hops[-2]
    assert [[*send.sources(t)] for t in range(8)] == [[t] for t in range(8)]
    assert send.elements == 16 * 8
    assert all(max(group) - min(group) == 3 for group in hops[-1].groups)  # inside of a node of four


def test_terms_that_the_other_stage_needs_in_parts_are_reduced_to_what_each_device_sends_to_its_like() -> None:
    source, target = stages(1, 4)
    late = replace(nodes_of(4), latency_s=1e-5)
    hops = LinkedRoutes(late).find(Meta((8, 8), "float32"), source, (B, P), target, (B, Split(1)))
    assert [hop.kind for hop in hops] == ["reduce_scatter", "send"]
    assert [[*hops[1].sources(t)] for t in range(4)] == [[t] for t in range(4)]


@pytest.mark.parametrize(
    ("hardware", "shape"),
    [
        (CPU_CORE, (16, 8)),
        (nodes_of(16), (16, 8)),
        (nodes_of(4), (3, 5)),
        (replace(nodes_of(4), inside=Link(1e12, 1.0)), (16, 8)),
    ],
    ids=["one network", "both stages in a node", "no equal parts", "late inside of nodes"],
)
def test_a_value_crosses_as_bytes_alone_say_where_parts_save_no_time(
    hardware: Hardware, shape: tuple[int, ...]
) -> None:
    source, target = stages(2, 4)
    hops = LinkedRoutes(hardware).find(Meta(shape, "float32"), source, (Split(0), P), target, (Split(0), B))
    assert hops == aligned_route(shape, source, (Split(0), P), target, (Split(0), B))


def test_of_many_devices_what_becomes_a_partial_sum_is_found_without_all_their_pairs() -> None:
    """A bias that ZeRO splits along one axis, and that only the first device of another one adds."""
    place = Placement("cpu", tuple(range(1024)), (128, 8))
    hops = LinkedRoutes(nodes_of(8), 1 << 18).find(Meta((256,), "float32"), place, (Split(0), B), place, (B, P))
    assert [hop.kind for hop in hops] == ["all_gather", "local"]
    with pytest.raises(NotAlignedError):
        aligned_route((256,), place, (Split(0), B), place, (B, P), 1 << 18)


@given(crossings())
def test_what_becomes_a_partial_sum_keeps_its_value_on_the_way_of_many_devices(
    crossing: tuple[tuple[int, ...], int, int, NdSbp, NdSbp],
) -> None:
    shape, data, tensor, a, b = crossing
    source, _ = stages(data, tensor)
    with mock.patch.object(linked_routes, "MOST", 0):
        try:
            hops = LinkedRoutes(CPU_CORE).find(Meta(shape, "float64"), source, a, source, b)
        except LayoutError:
            return
    check_carries(hops, shape, source, a, source, b)


def test_what_parts_cost_is_their_way_between_nodes_and_what_moves_inside() -> None:
    near, far = Link(100.0, 0.5), Link(10.0, 2.0)
    assert seconds_in_parts(Split(0), Split(0), 80.0, 4, near, far) == pytest.approx(80 / 4 / 10 + 2)
    assert seconds_in_parts(B, B, 80.0, 4, near, far) == pytest.approx(80 / 4 / 10 + 2 + 60 / 100 + 0.5)
    assert seconds_in_parts(P, B, 80.0, 4, near, far) == pytest.approx(80 / 4 / 10 + 2 + 2 * (60 / 100 + 0.5))
    assert seconds_in_parts(B, P, 80.0, 4, near, far) == math.inf


def test_workers_keep_values_that_cross_in_parts() -> None:
    source, target = stages(2, 2)
    entries: list[Sbp] = [B, P, Split(0), Split(1)]
    chains: list[tuple[tuple[int, ...], Layouts]] = [
        ((4 + k, 8), [(source, (Split(0), B)), (source, (Split(0), a)), (target, (Split(0), b))])
        for k, (a, b) in enumerate((a, b) for a in entries for b in entries)
    ]
    plan = boxed_plan(8, chains, hardware=nodes_of(2))
    values = {f"v{i}": torch.randn(shape, dtype=torch.float64) for i, (shape, _) in enumerate(chains)}
    with LocalCluster(plan, variables=values) as cluster:
        results = cluster.run()
    for value, result in zip(values.values(), results, strict=True):
        torch.testing.assert_close(result, -value, rtol=1e-12, atol=1e-12)


def two_megatron_blocks() -> nn.Module:
    """Two blocks whose first product needs its operand whole, and whose second one gives partial sums."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2)), nn.Linear(64, 10)
    )


BLOCKS = replace(CASES["mlp"], make=two_megatron_blocks)
ON_NODES = Layout(
    4,
    4,
    {r"\d\.0\.weight": Split(0), r"\d\.2\.weight": Split(1), r"\d\.0\.bias": Split(0)},
    prepare=lambda model: place(model, {"0": placement("cpu", [0, 1]), "[12]": placement("cpu", [2, 3])}),
    goal=goal_of("tensor", None),
    hardware=replace(nodes_of(2), bytes_per_s=1e5),
    schedule="1f1b",
)


def sent(plan: Plan) -> int:
    """Bytes that cross from stage to stage in a step."""
    return sum(c.nbytes for c in communications(plan) if c.kind == "send")


def test_stages_on_nodes_train_as_one_device_and_send_each_activation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [16, 16]
    expected, parameters = train_eagerly(BLOCKS, sizes, 4)
    losses, found, plan = train_planned(BLOCKS, ON_NODES, sizes)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(LinkedRoutes, "_parts", lambda *_: None)  # by bytes alone
    whole = plan_of(BLOCKS, ON_NODES, 16)[0]
    assert sent(plan) < 0.6 * sent(whole)  # two devices that split tensors
    assert forecast(plan, ON_NODES.hardware).period < 0.7 * forecast(whole, ON_NODES.hardware).period
