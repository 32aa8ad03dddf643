"""Boxing keeps every value, between any two layouts, and moves no more than its table says."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actorflow_compiler.boxing.routes import Hop, busiest_bytes, bytes_bound, bytes_moved, bytes_of, route
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import B, NdSbp, P, PartialSum, Sbp, Split, parse_nd, show
from actorflow_compiler.custom_ops.layout import carve
from actorflow_compiler.plan.region import device_shape, held

PLAIN: list[Sbp] = [B, P, Split(0), Split(1)]
ENTRIES = [*PLAIN, Split(0, 2)]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def spread(whole: Tensor, where: Placement, sbp: NdSbp) -> list[Tensor]:
    """The parts of a tensor on all devices; terms of sums are random, but add up."""
    parts = []
    for device in range(where.size):
        part = whole
        for dim, elements in enumerate(held(whole.shape, sbp, where, device)):
            part = part.index_select(dim, torch.from_numpy(elements))
        parts.append(part.clone())
    mesh = torch.arange(where.size).reshape(where.hierarchy)
    for axis, entry in enumerate(sbp):
        if isinstance(entry, PartialSum):
            others = [list(range(n)) for k, n in enumerate(where.hierarchy) if k != axis]
            copies: dict[tuple[int, ...], list[Tensor]] = {}  # devices that hold copies hold the same terms
            for at in itertools.product(*others):
                row = [int(mesh[(*at[:axis], i, *at[axis:])]) for i in range(where.hierarchy[axis])]
                left = [s for k, s in enumerate(sbp) if k != axis]
                alike = tuple(-1 if s == B else c for s, c in zip(left, at, strict=True))
                if alike not in copies:
                    terms = [torch.randint(-9, 9, parts[row[0]].shape).to(whole.dtype) for _ in row[1:]]
                    copies[alike] = [parts[row[0]] - sum(terms, torch.zeros_like(parts[row[0]])), *terms]
                for device, term in zip(row, copies[alike], strict=True):
                    parts[device] = term.clone()
    return parts


def joined(parts: list[Tensor], shape: torch.Size, where: Placement, sbp: NdSbp) -> Tensor:
    """The whole tensor, every copy of which must be the same."""
    found: list[Tensor] = []
    mesh = torch.arange(where.size).reshape(where.hierarchy)
    copies = [list(range(n)) if entry == B else [None] for n, entry in zip(where.hierarchy, sbp, strict=True)]
    for at in itertools.product(*copies):
        chosen = mesh[tuple(slice(None) if c is None else c for c in at)].reshape(-1).tolist()
        whole = torch.zeros(shape, dtype=parts[0].dtype)
        for device in chosen:
            grid = tuple(
                torch.from_numpy(e).view([-1 if d == i else 1 for i in range(len(shape))])
                for d, e in enumerate(held(shape, sbp, where, device))
            )
            if grid:
                whole.index_put_(grid, parts[device], accumulate=True)
            else:
                whole += parts[device]
        found.append(whole)
    for other in found[1:]:
        assert torch.equal(found[0], other)
    return found[0]


def follow(hop: Hop, parts: list[Tensor], shape: torch.Size) -> list[Tensor]:
    """Carry out one hop, and check what it says of itself; the new parts."""
    at_source = dict(zip(hop.source.ranks, parts, strict=True))
    if hop.groups:
        assert hop.kind in COLLECTIVES
        assert sorted(r for g in hop.groups for r in g) == sorted(hop.source.ranks) == sorted(hop.target.ranks)
        assert all(len(g) > 1 and list(g) == sorted(g) for g in hop.groups)
    else:
        assert hop.kind in ("local", "send")
    crossed = 0
    out = []
    if hop.kind == "all_reduce":
        assert hop.source == hop.target
        for rank in hop.target.ranks:
            group = next(g for g in hop.groups if rank in g)
            out.append(torch.stack([at_source[r] for r in group]).sum(0))
        crossed = sum(2 * (len(g) - 1) * at_source[g[0]].numel() for g in hop.groups)
    else:
        for t, row in enumerate(hop.parts):
            to = hop.target.ranks[t]
            part = torch.zeros(device_shape(shape, hop.target_sbp, hop.target, t), dtype=parts[0].dtype)
            filled = torch.zeros_like(part)
            for s, boxes in enumerate(row):
                for box in boxes:
                    piece = carve(parts[s], box.source.start, box.source.size)
                    carve(part, box.target.start, box.target.size).add_(piece)
                    carve(filled, box.target.start, box.target.size).add_(1)
                    if hop.source.ranks[s] != to:
                        crossed += piece.numel()
                        assert not hop.groups or any(to in g and hop.source.ranks[s] in g for g in hop.groups)
            assert hop.add or (filled <= 1).all()  # placed boxes do not overlap
            out.append(part)
    assert crossed == hop.elements
    assert (hop.kind == "local") <= (crossed == 0)
    return out


def box(whole: Tensor, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> tuple[Hop, ...]:
    """Box a tensor, check its value and the bytes that were moved."""
    parts = spread(whole, source, a)
    hops = route(whole.shape, source, a, target, b)
    for hop in hops:
        parts = follow(hop, parts, whole.shape)
    assert [tuple(p.shape) for p in parts] == [device_shape(whole.shape, b, target, t) for t in range(target.size)]
    assert torch.equal(joined(parts, whole.shape, target, b), whole)
    if hops:
        assert (hops[-1].target, hops[-1].target_sbp) == (target, b)
    bound = bytes_bound(whole.shape, 8, source, a, target, b)
    assert bytes_of(hops, 8) <= bound + 1e-6, f"{show(a)} → {show(b)}: {[(h.kind, h.elements) for h in hops]}"
    return hops


def numbers(*shape: int) -> Tensor:
    """Whole numbers that tell elements apart; their sums are exact."""
    return torch.arange(math.prod(shape)).reshape(shape).double() + 100


@pytest.mark.parametrize("other", [False, True], ids=["same devices", "other devices"])
@pytest.mark.parametrize("b", ENTRIES, ids=str)
@pytest.mark.parametrize("a", ENTRIES, ids=str)
def test_on_one_axis_the_bytes_are_those_of_the_table(a: Sbp, b: Sbp, other: bool) -> None:
    source, target = placement("cpu", [0, 1]), placement("cpu", [2, 3, 4] if other else [0, 1])
    hops = box(numbers(12, 6), source, (a,), target, (b,))
    table = bytes_moved(a, b, 12 * 6 * 8, source.size, target.size, not other)
    assert bytes_bound((12, 6), 8, source, (a,), target, (b,)) == table
    assert bytes_of(hops, 8) == table


HIERARCHIES = [(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (3, 2), (1, 4), (4, 2), (2, 1, 2), (2, 2, 2)]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12]), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], where: Placement) -> NdSbp:
    """A layout that fits: splits in blocks and units, of a dim that is split already, over more devices than it has."""
    entries: list[Sbp] = [B, P, *(Split(d) for d in range(len(shape)))]
    entries += [Split(d, blocks) for d, n in enumerate(shape) for blocks in (2, 3) if n % blocks == 0]
    entries += [Split(d, 1, 2) for d, n in enumerate(shape) if n % 2 == 0]
    found = tuple(draw(st.sampled_from(entries)) for _ in where.hierarchy)
    try:
        for device in range(where.size):
            device_shape(shape, found, where, device)
    except LayoutError:  # blocks of what another axis has cut
        return tuple(Split(s.dim) if isinstance(s, Split) else s for s in found)
    return found


@st.composite
def meshes(draw: st.DrawFn, devices: int | None = None) -> Placement:
    """Up to eight of ten ranks in any order, on one to three axes, which share equally or by weights."""
    fitting = [h for h in HIERARCHIES if devices is None or math.prod(h) == devices]
    hierarchy = draw(st.sampled_from(fitting))
    ranks = tuple(draw(st.permutations(range(10)))[: math.prod(hierarchy)])
    some = st.tuples(*(st.tuples(*[st.sampled_from([1, 2, 5])] * n) for n in hierarchy))
    weights = draw(st.one_of(st.just(()), some))
    return Placement("cpu", ranks, hierarchy, weights)


@given(st.data(), SHAPES, meshes())
def test_on_one_mesh_every_pair_keeps_the_value_within_the_bytes(
    data: st.DataObject, shape: tuple[int, ...], where: Placement
) -> None:
    box(numbers(*shape), where, data.draw(layouts(shape, where)), where, data.draw(layouts(shape, where)))


RELATIONS = ["any", "disjoint", "subset", "other order", "other mesh", "other weights"]


@given(st.data(), SHAPES, meshes(), st.sampled_from(RELATIONS))
def test_between_two_placements_every_pair_keeps_the_value_within_the_bytes(
    data: st.DataObject, shape: tuple[int, ...], source: Placement, relation: str
) -> None:
    target = data.draw(meshes(source.size if relation.startswith("other") else None))
    if relation == "disjoint":
        target = replace(target, ranks=tuple(r + 10 for r in target.ranks))
    elif relation == "subset":
        ranks = data.draw(st.sets(st.sampled_from(source.ranks), min_size=1).map(tuple))
        target = Placement("cpu", ranks, (len(ranks),))
    elif relation == "other order":
        target = replace(source, ranks=tuple(data.draw(st.permutations(source.ranks))))
    elif relation == "other mesh":
        target = Placement("cpu", source.ranks, target.hierarchy, target.weights)
    elif relation == "other weights":
        target = Placement("cpu", source.ranks, source.hierarchy)
    box(numbers(*shape), source, data.draw(layouts(shape, source)), target, data.draw(layouts(shape, target)))


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (1, 6)], ids=str)
@pytest.mark.parametrize("other", [False, True], ids=["same devices", "other devices"])
def test_every_pair_on_two_axes(shape: tuple[int, ...], other: bool) -> None:
    source = placement("cpu", [[0, 1], [2, 3]])
    target = placement("cpu", [[3, 4, 5], [6, 7, 0]]) if other else source
    for a, b in itertools.product(itertools.product(PLAIN, repeat=2), repeat=2):
        box(numbers(*shape), source, a, target, b)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_pair_on_three_axes() -> None:
    where = placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    for a, b in itertools.product(itertools.product(PLAIN, repeat=3), repeat=2):
        box(numbers(8, 5), where, a, where, b)


MESH = placement("cpu", [[0, 1, 2], [3, 4, 5]])
CUBE = placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])


@pytest.mark.parametrize(
    ("where", "a", "b", "kinds", "groups"),
    [
        (MESH, "[P,B]", "[B,B]", ["all_reduce"], ((0, 3), (1, 4), (2, 5))),
        (MESH, "[P,P]", "[B,B]", ["all_reduce"], ((0, 1, 2, 3, 4, 5),)),
        (MESH, "[P,S(0)]", "[B,S(0)]", ["all_reduce"], ((0, 3), (1, 4), (2, 5))),
        (MESH, "[P,B]", "[S(0),B]", ["reduce_scatter"], ((0, 3), (1, 4), (2, 5))),
        (MESH, "[P,S(0)]", "[S(1),S(0)]", ["reduce_scatter"], ((0, 3), (1, 4), (2, 5))),
        (MESH, "[S(0),P]", "[S(0),S(0)]", ["reduce_scatter"], ((0, 1, 2), (3, 4, 5))),
        (MESH, "[P,B]", "[B,S(0)]", ["local", "all_reduce"], ((0, 3), (1, 4), (2, 5))),
        (MESH, "[S(0),B]", "[B,B]", ["all_gather"], ((0, 3), (1, 4), (2, 5))),
        (MESH, "[S(0),S(0)]", "[S(0),B]", ["all_gather"], ((0, 1, 2), (3, 4, 5))),
        (MESH, "[P,S(0)]", "[P,B]", ["all_gather"], ((0, 1, 2), (3, 4, 5))),
        (MESH, "[B,S(0)]", "[B,S(1)]", ["all_to_all"], ((0, 1, 2), (3, 4, 5))),
        (MESH, "[B,S(0)]", "[S(1),S(0)]", ["local"], ()),
        (MESH, "[S(0),B]", "[P,B]", ["local"], ()),
        (CUBE, "[P,S(0),P]", "[B,S(0),B]", ["all_reduce"], ((0, 1, 4, 5), (2, 3, 6, 7))),
        (CUBE, "[S(1),P,S(0)]", "[S(1),B,S(0)]", ["all_reduce"], ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)  # fmt: skip
def test_a_collective_runs_within_the_groups_of_the_axes_that_change(
    where: Placement, a: str, b: str, kinds: list[str], groups: tuple[tuple[int, ...], ...]
) -> None:
    hops = box(numbers(12, 12), where, parse_nd(a), where, parse_nd(b))
    assert [hop.kind for hop in hops] == kinds
    assert sorted(hops[-1].groups) == sorted(groups)


@pytest.mark.parametrize(
    ("a", "b", "times"),  # the bound in sizes of the tensor
    [
        ("[P,B]", "[B,B]", 3 * 2),
        ("[P,S(0)]", "[B,S(0)]", 2),
        ("[P,S(0)]", "[B,B]", 2 + 2 * 2),
        ("[S(0),B]", "[B,B]", 3),
        ("[B,B]", "[S(0),S(1)]", 0),
        ("[S(0),B]", "[S(1),P]", 3 / 2),
        ("[S(0),S(0)]", "[B,S(0)]", 2 + 3),  # by way of [S(0),B] and [B,B], as the inner split would mean other rows
    ],
)
def test_on_a_mesh_the_bound_is_that_of_the_cheapest_order_of_axes(a: str, b: str, times: float) -> None:
    assert bytes_bound((12, 12), 4, MESH, parse_nd(a), MESH, parse_nd(b)) == pytest.approx(times * 12 * 12 * 4)


def test_across_placements_the_bound_counts_terms_and_copies() -> None:
    elsewhere = placement("cpu", [[6, 7], [8, 9], [10, 11]])
    assert bytes_bound((5,), 1, MESH, (P, B), elsewhere, (Split(0), B)) == 5 * (2 - 1 + 2)
    assert bytes_bound((5,), 1, MESH, (P, P), elsewhere, (B, B)) == 5 * (6 - 1 + 6)
    assert bytes_bound((5,), 1, MESH, (B, Split(0)), elsewhere, (P, Split(0))) == 5


def test_sums_are_taken_before_and_slices_before_that_when_several_axes_change() -> None:
    hops = box(numbers(6, 6), MESH, (P, Split(0)), MESH, (B, B))
    assert [hop.kind for hop in hops] == ["all_reduce", "all_gather"]
    assert hops[0].elements == 3 * 2 * 6 * 6 // 3
    hops = box(numbers(6, 6), MESH, (B, P), MESH, (Split(1), B))
    assert [hop.kind for hop in hops] == ["local", "all_reduce"]
    assert hops[1].elements == 2 * (2 * 2) * 6 * 6 // 2


def test_a_rank_that_two_placements_share_is_sent_only_what_it_lacks() -> None:
    source, target = placement("cpu", [0, 1, 2]), placement("cpu", [2, 1, 5])
    assert bytes_of(box(numbers(9), source, (Split(0),), target, (Split(0),)), 1) == 6  # rank 1 keeps its three
    assert bytes_of(box(numbers(9), source, (B,), target, (B,)), 1) == 9  # to rank 5
    assert bytes_of(box(numbers(9), source, (Split(0),), target, (B,)), 1) == 6 + 6 + 9
    assert bytes_of(box(numbers(), source, (P,), target, (B,)), 1) == 2 + 2  # summed on a rank of both


def test_copies_share_the_work_of_sending() -> None:
    (hop,) = box(numbers(4), placement("cpu", [0, 1]), (B,), placement("cpu", [2, 3]), (B,))
    assert [[bool(parts) for parts in row] for row in hop.parts] == [[True, False], [False, True]]
    (hop,) = box(numbers(6, 6), MESH, (Split(0), B), placement("cpu", [6, 7, 8]), (B,))
    senders = {s for row in hop.parts for s, parts in enumerate(row) if parts}
    assert senders == set(range(6))


def test_a_sum_for_another_placement_is_taken_by_all_its_devices() -> None:
    hops = box(numbers(1, 1, 4), placement("cpu", [0, 1]), (P,), placement("cpu", [2]), (B,))
    assert [hop.kind for hop in hops] == ["reduce_scatter", "send"]
    assert all(any(part for part in row) for row in hops[0].parts)


def test_equal_boxes_are_one_object() -> None:
    where = placement("cpu", [0, 1, 2, 3])
    found = [
        box
        for (hop,) in (route((64, 8), where, (a,), where, (Split(1),)) for a in (Split(0, 16), Split(0, 8)))
        for part in itertools.chain(*hop.parts)
        for copied in part
        for box in (copied.source, copied.target)
    ]
    assert len({id(box) for box in found}) == len(set(found)) < len(found) / 2


@pytest.mark.parametrize("weights", [(3, 1), (1, 2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(("a", "b"), [("S(0)", "B"), ("P", "S(0)"), ("S(0)", "S(1)"), ("P", "B"), ("B", "S(0)")])
def test_the_busiest_device_has_the_bytes_that_its_share_makes(a: str, b: str, weights: tuple[int, ...]) -> None:
    where = placement("cpu", list(range(len(weights))), weights)
    (source,), (target,) = parse_nd(a), parse_nd(b)
    hops = box(numbers(12, 12), where, (source,), where, (target,))
    sent, received = [0] * where.size, [0] * where.size
    for hop in hops:
        for t, row in enumerate(hop.parts):
            for s, boxes in enumerate(row):
                if s != t:
                    sent[s] += sum(math.prod(box.source.size) for box in boxes)
                    received[t] += sum(math.prod(box.source.size) for box in boxes)
    busiest = max(*sent, *received) if (a, b) != ("P", "B") else 12 * 12 * 2 * (where.size - 1) / where.size
    (parts,) = where.axes
    assert busiest_bytes(source, target, 12 * 12, parts, parts, True) == pytest.approx(busiest)
