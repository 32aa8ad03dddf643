"""Boxing keeps every value, between any two layouts, and moves no more than its table says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actorflow_compiler.boxing import Hop, bytes_moved, device_shape, held, route
from actorflow_compiler.layout_ops import carve
from actorflow_compiler.placement import Placement, placement
from actorflow_compiler.sbp import B, NdSbp, P, PartialSum, Sbp, Split

ENTRIES: list[Sbp] = [B, P, Split(0), Split(1), Split(0, 2)]


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
            for row in mesh.movedim(axis, -1).reshape(-1, where.hierarchy[axis]).tolist():
                terms = [torch.randint(-9, 9, parts[row[0]].shape).to(whole.dtype) for _ in row[1:]]
                parts[row[0]] = parts[row[0]] - sum(terms, torch.zeros_like(parts[row[0]]))
                for device, term in zip(row[1:], terms, strict=True):
                    parts[device] = term
    return parts


def joined(parts: list[Tensor], shape: torch.Size, where: Placement, sbp: NdSbp) -> Tensor:
    """The whole tensor, every copy of which must be the same."""
    found: dict[tuple[int, ...], Tensor] = {}
    mesh = torch.arange(where.size).reshape(where.hierarchy)
    copies = [range(n) if entry == B else [None] for n, entry in zip(where.hierarchy, sbp, strict=True)]
    for at in torch.cartesian_prod(*[torch.tensor([-1 if c is None else c for c in r]) for r in copies]).reshape(
        -1, len(copies)
    ):
        chosen = mesh[tuple(slice(None) if c < 0 else int(c) for c in at)].reshape(-1).tolist()
        whole = torch.zeros(shape, dtype=parts[0].dtype)
        for device in chosen:
            elements = held(shape, sbp, where, device)
            grid = tuple(
                torch.from_numpy(e).view([-1 if d == i else 1 for i in range(len(shape))])
                for d, e in enumerate(elements)
            )
            whole.index_put_(grid, parts[device], accumulate=True)
        found[tuple(int(c) for c in at)] = whole
    first, *others = found.values()
    for other in others:
        assert torch.equal(first, other)
    return first


def follow(hop: Hop, parts: list[Tensor], shape: torch.Size) -> tuple[list[Tensor], int]:
    """Carry out one hop; the new parts and the elements that crossed from device to device."""
    if hop.kind == "all_reduce":
        out, crossed = list(parts), 0
        for group in hop.groups:
            devices = [hop.source.index(r) for r in group]
            total = torch.stack([parts[d] for d in devices]).sum(0)
            crossed += 2 * (len(devices) - 1) * total.numel()
            for d in devices:
                out[d] = total.clone()
        return out, crossed
    out, crossed = [], 0
    for t, row in enumerate(hop.parts):
        part = torch.zeros(device_shape(shape, hop.target_sbp, hop.target, t), dtype=parts[0].dtype)
        for s, boxes in enumerate(row):
            for box in boxes:
                piece = carve(parts[s], box.source.start, box.source.size)
                place = carve(part, box.target.start, box.target.size)
                place.copy_(place + piece if hop.add else piece)
                if hop.source.ranks[s] != hop.target.ranks[t]:
                    crossed += piece.numel()
                    assert hop.kind != "local"
        out.append(part)
    return out, crossed


def box(whole: Tensor, source: Placement, a: NdSbp, target: Placement, b: NdSbp) -> int:
    """Box a tensor and check it; the elements that were moved."""
    parts, moved = spread(whole, source, a), 0
    for hop in route(whole.shape, source, a, target, b):
        parts, crossed = follow(hop, parts, whole.shape)
        moved += crossed
    assert [tuple(p.shape) for p in parts] == [device_shape(whole.shape, b, target, t) for t in range(target.size)]
    assert torch.equal(joined(parts, whole.shape, target, b), whole)
    return moved


@pytest.mark.parametrize("other", [False, True], ids=["same devices", "other devices"])
@pytest.mark.parametrize("b", ENTRIES, ids=str)
@pytest.mark.parametrize("a", ENTRIES, ids=str)
def test_no_more_moves_than_the_table_says(a: Sbp, b: Sbp, other: bool) -> None:
    whole = torch.randint(-99, 99, (8, 4)).double()
    source, target = placement("cpu", [0, 1]), placement("cpu", [2, 3] if other else [0, 1])
    moved = box(whole, source, (a,), target, (b,))
    assert moved <= bytes_moved(a, b, whole.numel(), 2, 2, not other) + 1e-9


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 7)).map(lambda s: (2 * s[0], s[1])),
    st.sampled_from(ENTRIES),
    st.sampled_from(ENTRIES),
    st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
)
def test_any_two_placements_and_uneven_parts_keep_the_value(
    shape: tuple[int, int], a: Sbp, b: Sbp, source: list[int], target: list[int]
) -> None:
    whole = torch.randint(-99, 99, shape).double()
    box(whole, placement("cpu", source), (a,), placement("cpu", target), (b,))


MESHES = [placement("cpu", [[0, 1], [2, 3]]), placement("cpu", [[4, 5, 6], [7, 0, 1]]), placement("cpu", [3, 2])]


@given(st.data(), st.sampled_from(MESHES), st.sampled_from(MESHES))
def test_meshes_keep_the_value(data: st.DataObject, source: Placement, target: Placement) -> None:
    entries = st.sampled_from([B, P, Split(0), Split(1)])
    a = tuple(data.draw(entries) for _ in source.hierarchy)
    b = tuple(data.draw(entries) for _ in target.hierarchy)
    box(torch.randint(-99, 99, (12, 7)).double(), source, a, target, b)
