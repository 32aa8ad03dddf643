"""A tensor that goes from one layout to another by comm stays the same tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorflow.eager.current import current
from actorflow.eager.layout import NOWHERE, Layout, local_shape
from actorflow.eager.redistribution import hop_steps, redistribute
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.boxing.routes import bytes_of, route
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import B, P, Split, numel, parse_nd
from compiler.test_boxing import joined, spread
from fewer import fewer

PLACES = ([0, 1], [1, 0], [2], [1, 2, 3], [0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[0], [2]])
DTYPES = (torch.float64, torch.int64, torch.complex64, torch.uint8)


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadRanks]:
    with ThreadRanks(4) as made:
        yield made


def layout(text: str) -> Layout:
    """``"S(0) on [0,1]"``."""
    sbp, _, ranks = text.partition(" on ")
    return Layout(placement("cpu", eval(ranks)), parse_nd(sbp))


def boxed(threads: ThreadRanks, whole: Tensor, source: Layout, target: Layout) -> list[Tensor]:
    """The new parts on the ranks of the target, in its order."""
    old = dict(zip(source.placement.ranks, spread(whole, source.placement, source.sbp), strict=True))
    before = {rank: part.clone() for rank, part in old.items()}

    def on_a_rank() -> Tensor:
        comm = current()
        local = old.get(comm.rank, torch.empty(0, dtype=whole.dtype))
        out = redistribute(local, tuple(whole.shape), source, target, comm)
        assert out.shape == local_shape(target, tuple(whole.shape), comm.rank)
        assert out.dtype == whole.dtype
        assert out.is_contiguous()
        return out

    parts = threads.run(on_a_rank)
    for rank, part in before.items():
        assert torch.equal(part, old[rank]), "a redistribute changed what it was given"
    return [parts[rank] for rank in target.placement.ranks]


@st.composite
def layouts(draw: st.DrawFn, rank: int) -> Layout:
    where = placement("cpu", draw(st.sampled_from(PLACES)))
    entries = [B, P, *(Split(d) for d in range(rank)), *([Split(0, 2)] if rank else [])]
    return Layout(where, tuple(draw(st.sampled_from(entries)) for _ in where.hierarchy))


@given(st.data())
@settings(max_examples=fewer(150))
def test_any_pair_of_layouts_keeps_the_value(threads: ThreadRanks, data: Any) -> None:
    shape = data.draw(st.sampled_from([(), (1,), (5,), (4, 6), (2, 3, 4), (6, 1), (0, 3), (8, 8)]))
    even = [n % 4 == 0 for n in shape]
    source, target = data.draw(layouts(len(shape))), data.draw(layouts(len(shape)))
    if shape and not even[0]:  # blocks that do not fit are an error, which another test shows
        plain = {Split(0, 2): Split(0)}
        source, target = (Layout(x.placement, tuple(plain.get(e, e) for e in x.sbp)) for x in (source, target))
    whole = torch.randint(-9, 9, shape).to(data.draw(st.sampled_from(DTYPES)))
    parts = boxed(threads, whole, source, target)
    assert torch.equal(joined(parts, whole.shape, target.placement, target.sbp), whole)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float16])
def test_sums_of_every_dtype_are_those_of_torch(threads: ThreadRanks, dtype: torch.dtype) -> None:
    terms = [torch.tensor([1, 0, 1, 0]).to(dtype), torch.tensor([1, 0, 0, 1]).to(dtype)]
    pair = Placement("cpu", (0, 1), (2,))

    def on_a_rank() -> Tensor:
        comm = current()
        local = terms[comm.rank] if comm.rank < 2 else torch.empty(0, dtype=dtype)
        return redistribute(local, (4,), Layout(pair, (P,)), Layout(pair, (B,)), comm)

    first, second, *outside = threads.run(on_a_rank)
    assert torch.equal(first, terms[0] + terms[1])
    assert torch.equal(second, first)
    assert all(part.shape == NOWHERE and part.dtype == dtype for part in outside)


def test_a_large_sum_is_made_in_two_steps_and_equal_on_every_rank(threads: ThreadRanks) -> None:
    line = Placement("cpu", (0, 1, 2, 3), (4,))
    terms = [torch.randn(30_001) for _ in range(4)]
    parts = threads.run(
        lambda: redistribute(terms[current().rank], (30_001,), Layout(line, (P,)), Layout(line, (B,)), current())
    )
    torch.testing.assert_close(parts[0], sum(terms, torch.zeros(())))
    assert all(torch.equal(parts[0], part) for part in parts[1:])


def test_half_precision_terms_are_added_up_in_single_precision(threads: ThreadRanks) -> None:
    line = Placement("cpu", (0, 1, 2, 3), (4,))
    terms = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0, 1.0)]  # 256 + 1 is 256 in bfloat16
    for target in (B, Split(0)):
        parts = threads.run(
            lambda target=target: redistribute(
                terms[current().rank], (1,), Layout(line, (P,)), Layout(line, (target,)), current()
            )
        )
        assert parts[0].item() == 260.0


def test_a_box_of_a_transposed_part_is_right(threads: ThreadRanks) -> None:
    line = Placement("cpu", (0, 1, 2, 3), (4,))
    whole = torch.arange(32.0).view(4, 8)
    parts = threads.run(
        lambda: redistribute(
            whole.t()[current().rank * 2 : current().rank * 2 + 2],
            (8, 4),
            Layout(line, (Split(0),)),
            Layout(line, (Split(1),)),
            current(),
        )
    )
    assert torch.equal(torch.cat(parts, 1), whole.t())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("S(0) on [0,1,2,3]", "B on [0,1,2,3]"),
        ("P on [0,1,2,3]", "S(0) on [0,1,2,3]"),
        ("S(0) on [0,1]", "B on [2,3]"),
        ("S(0) on [0,1]", "S(0) on [0,1,2,3]"),
        ("[P,S(0)] on [[0,1],[2,3]]", "[S(1),B] on [[0,1],[2,3]]"),
        ("P on [0,1]", "S(0) on [1,2]"),
    ],
)
def test_what_a_box_moves_is_what_boxing_has_planned(source: str, target: str) -> None:
    shape, a, b = (8, 4), layout(source), layout(target)
    moved = 0
    for rank in range(4):
        for step in hop_steps(shape, a, b, rank):
            if step.kind == "all_reduce":
                part = numel(local_shape(a, shape, rank))
                moved += 2 * (len(step.ranks) - 1) * part // len(step.ranks)
            moved += sum(step.counts)
    assert moved == bytes_of(route(shape, a.placement, a.sbp, b.placement, b.sbp), 1)


def test_a_split_that_does_not_fit_is_an_error_on_every_rank(threads: ThreadRanks) -> None:
    from actorflow_compiler.core.errors import LayoutError

    line = Placement("cpu", (0, 1, 2, 3), (4,))
    with pytest.raises(LayoutError, match=r"S\(0,2\) does not fit a dimension of 5"):
        threads.run(
            lambda: redistribute(torch.ones(5), (5,), Layout(line, (B,)), Layout(line, (Split(0, 2),)), current())
        )
