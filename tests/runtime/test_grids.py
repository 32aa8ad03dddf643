"""Boxes at regular distances are moved as one strided view, and what arrives is the same, element by element."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorflow.transport import group_memory
from actorflow.transport.memory import Switchboard
from actorflow.transport.parcels import Parcels, plain_room
from actorflow.transport.redistribution import cut, cut_like, run_of, split_run
from actorflow_compiler.boxing.routes import Hop, HopKind, route
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P, Sbp, Split, numel
from actorflow_compiler.plan.grids import Grid, grids
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Exchange, TensorSpec
from actorflow_compiler.plan.region import held
from fewer import fewer
from runtime.meetings import Meeting, Part


def one_by_one(tensor: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    return [tensor[tuple(slice(lo, lo + n) for lo, n in zip(b.start, b.size, strict=True))] for b in boxes]


def boxes_of(grid: Grid) -> list[Box]:
    found = []
    for index in itertools.product(*map(range, grid.counts)):
        start = list(grid.start)
        for i, step in zip(index, grid.steps, strict=True):
            start = [at + i * by for at, by in zip(start, step, strict=True)]
        found.append(Box(tuple(start), grid.size))
    return found


@st.composite
def box_lists(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """A shape, and boxes in it that are a product of lines in each dim, some of them moved, left out or repeated."""
    shape, lines = [], []
    for _ in range(draw(st.integers(0, 3))):
        line, at = [], draw(st.integers(0, 2))
        size, gap = draw(st.integers(0, 3)), draw(st.integers(0, 2))
        for _ in range(draw(st.integers(1, 4))):
            odd = draw(st.integers(0, 9))
            line.append((at, size + (odd == 0)))
            at += size + (odd == 0) + gap + (odd == 1)
        lines.append(line)
        shape.append(at + draw(st.integers(0, 2)))
    boxes = [Box(tuple(lo for lo, _ in pick), tuple(n for _, n in pick)) for pick in itertools.product(*lines)]
    order = draw(st.sampled_from(("as they are", "shuffled", "some", "twice")))
    if order == "shuffled":
        boxes = draw(st.permutations(boxes))
    elif order == "some":
        boxes = [box for box in boxes if draw(st.booleans())]
    elif order == "twice":
        boxes = [box for box in boxes for _ in range(2)]
    return tuple(shape), tuple(boxes)


@settings(max_examples=fewer(300), deadline=None)
@given(box_lists(), st.booleans())
def test_grids_have_the_elements_of_their_boxes_in_order(
    drawn: tuple[tuple[int, ...], tuple[Box, ...]], turned: bool
) -> None:
    shape, boxes = drawn
    found = grids(boxes)
    assert [box for grid in found for box in boxes_of(grid)] == list(boxes)
    tensor = torch.arange(numel(shape)).reshape(shape)
    if turned:  # the same numbers in other places of the memory, behind others
        back = tuple(reversed(range(len(shape))))
        behind = torch.cat([torch.full((7,), -1), tensor.permute(back).reshape(-1)])[7:]
        tensor = behind.reshape(tuple(reversed(shape))).permute(back)
    wanted = torch.cat([piece.reshape(-1) for piece in one_by_one(tensor, boxes)] or [torch.empty(0, dtype=torch.long)])
    views = cut(tensor, boxes)
    assert torch.equal(run_of(tensor, boxes), wanted)
    assert [tuple(view.shape) for view in views] == [grid.shape for grid in found]
    # what is written to a view comes to its boxes and to nothing else
    places = torch.zeros_like(tensor)
    for place, piece in zip(cut(places, boxes), split_run(wanted, boxes), strict=True):
        place.copy_(piece)
    expected = torch.zeros_like(tensor)
    for place, piece in zip(one_by_one(expected, boxes), one_by_one(tensor, boxes), strict=True):
        place.copy_(piece)
    assert torch.equal(places, expected)
    # boxes that overlap would be added once instead of twice if they were in one view
    for place in cut(places, boxes):
        place.add_(1)
    for place in one_by_one(expected, boxes):
        place.add_(1)
    assert torch.equal(places, expected)


@given(box_lists())
def test_no_two_boxes_of_a_grid_overlap(drawn: tuple[tuple[int, ...], tuple[Box, ...]]) -> None:
    shape, boxes = drawn
    for grid in grids(boxes):
        if grid.counts:
            counts = torch.zeros(shape, dtype=torch.int64)
            for box in one_by_one(counts, boxes_of(grid)):
                box.add_(1)
            assert int(counts.max()) == 1


def test_a_split_in_blocks_of_rows_and_columns_is_one_grid() -> None:
    rows, columns = 512, 8
    boxes = tuple(Box((2 * i, 32 * j + 16), (1, 16)) for i in range(rows) for j in range(columns))
    (grid,) = grids(boxes)
    assert grid == Grid((0, 16), (1, 16), (rows, columns), ((2, 0), (0, 32)))
    assert grids(boxes) is grids(boxes)


def test_a_view_of_a_conjugate_or_a_negative_is_one() -> None:
    boxes = (Box((0, 0), (1, 1)), Box((0, 2), (1, 1)), Box((1, 0), (1, 1)), Box((1, 2), (1, 1)))
    number = torch.arange(6).reshape(2, 3) * (1 + 2j)
    wanted = torch.tensor([0, 2, 3, 5]) * (1 - 2j)
    assert torch.equal(run_of(number.conj(), boxes), wanted)
    assert torch.equal(run_of(number.conj().imag, boxes), wanted.imag)


def test_boxes_of_one_member_in_another_order_than_at_the_other_are_placed_as_they_are_listed() -> None:
    there = tuple(Box((i,), (1,)) for i in (0, 2, 4, 1))  # one grid and a box
    here = tuple(Box((i,), (1,)) for i in (3, 2, 1, 0))  # none
    assert [piece.tolist() for piece in cut_like(torch.arange(5), there, here)] == [[0], [2], [4], [1]]
    assert [piece.tolist() for piece in cut_like(torch.arange(5), here, there)] == [[[3], [2], [1]], [0]]


def collective_of(hop: Hop, rank: int) -> Collective:
    """A rank's part in a hop of all ranks."""
    ranks = hop.source.ranks
    send = tuple(tuple(copy.source for copy in hop.parts[other][rank]) for other in ranks)
    receive = tuple(tuple(copy.target for copy in hop.parts[rank][other]) for other in ranks)
    kind = CollectiveKind.REDUCE_SCATTER if hop.add else CollectiveKind.ALL_TO_ALL
    return Collective(kind, 0, ranks, (Exchange(send, receive, hop.add),), plane="shared")


def by_parcels(parts: dict[int, Part]) -> list[Tensor]:
    """What ranks get that pack flat buffers."""
    left: dict[int, list[Tensor]] = {}  # by rank: what it has for each other one

    def put(rank: int, coming: Tensor, leaving: Tensor, come: list[int], to: list[int]) -> None:
        coming.zero_()
        left[rank] = list(torch.split(leaving, to))

    def take(rank: int, coming: Tensor, leaving: Tensor, come: list[int], to: list[int]) -> None:
        torch.cat([left[other][rank] for other in parts], out=coming)
        assert [left[other][rank].numel() for other in parts] == come

    for way in (put, take):
        outs = [
            Parcels.of(comm, rank, specs).exchange(
                tensors, plain_room, lambda *buffers, rank=rank, way=way: way(rank, *buffers)
            )[0]
            for rank, (comm, tensors, specs) in parts.items()
        ]
    return outs


def by_memory(parts: dict[int, Part]) -> list[Tensor]:
    """What ranks get that are threads of a process."""
    board = Switchboard()
    with ThreadPoolExecutor(len(parts)) as pool:
        found = [pool.submit(board.plane(rank).collective, *part) for rank, part in parts.items()]
        return [one.result()[0] for one in found]


def by_shared_memory(parts: dict[int, Part]) -> list[Tensor]:
    """What ranks get that share memory."""
    found = Meeting({rank: [part] for rank, part in parts.items()}, random.Random(0)).run()
    return [found[rank][0][0] for rank in parts]


LAYOUTS: tuple[Sbp, ...] = (
    B,
    P,
    Split(0),
    Split(1),
    Split(0, 2),
    Split(0, 4),
    Split(1, 3),
    Split(1, 6),
    Split(0, 2, 2),
)


@pytest.mark.matrix(times=2)
@pytest.mark.parametrize("slot", [192, 1 << 23], ids=["in ranges", "at once"])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("target", [s for s in LAYOUTS if s != P], ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_an_exchange_gives_each_rank_its_part_whichever_way_it_goes(
    source: Sbp, target: Sbp, parts: int, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_memory, "LONGEST", slot)
    shape, place = (8, 12), Placement("cpu", tuple(range(parts)), (parts,))
    whole = torch.arange(96.0).reshape(shape)

    def part_of(sbp: Sbp, rank: int) -> Tensor:
        if sbp == P:
            return whole * (2.0 if rank == 0 else -1.0 if rank == 1 else 0.0)
        i, j = held(shape, (sbp,), place, rank)
        return whole[torch.from_numpy(i)][:, torch.from_numpy(j)].contiguous()

    here = [part_of(source, rank) for rank in range(parts)]
    for hop in route(shape, place, (source,), place, (target,)):
        wanted = [part_of(hop.target_sbp[0], rank) for rank in range(parts)]
        if hop.kind not in (HopKind.ALL_REDUCE, HopKind.LOCAL):
            specs = [TensorSpec(tuple(want.shape), "float32", "") for want in wanted]
            ready = {rank: (collective_of(hop, rank), [here[rank]], [specs[rank]]) for rank in range(parts)}
            for way in (by_parcels, by_memory, by_shared_memory):
                for out, want in zip(way(ready), wanted, strict=True):
                    assert torch.equal(out, want), way.__name__
        here = wanted
