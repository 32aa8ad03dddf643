"""What is made with a placement is what torch makes, in parts; random ones are the same under any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.eager.current import current
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.eager.layout import local_shape
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import CallError, LayoutError
from actorflow_compiler.core.placement import Placement

LINE = flow.placement("cpu", [0, 1, 2, 3])
MESH = flow.placement("cpu", [[0, 1], [2, 3]])
PAIR = flow.placement("cpu", [1, 3])
S, B, P = flow.sbp.split, flow.sbp.broadcast, flow.sbp.partial_sum
LAYOUTS = [
    (LINE, S(0)), (LINE, S(-1)), (LINE, B), (LINE, P), (MESH, (S(0), S(1))), (MESH, [P, S(0)]), (PAIR, S(1)), (PAIR, P)
]  # fmt: skip


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadRanks]:
    with ThreadRanks(4) as made:
        yield made


def whole(x: Tensor) -> Tensor:
    assert isinstance(x, GlobalTensor)
    assert x._local.shape == local_shape(x._spec.layout, tuple(x.shape), current().rank)
    every = Placement("cpu", (0, 1, 2, 3), (4,))
    return x.to_global(placement=every, sbp=B).to_local()


MADE: dict[str, Callable[..., Tensor]] = {
    "tensor": lambda m, **where: m.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 1, 2], [3, 4, 5]], **where),
    "tensor of floats": lambda m, **where: m.tensor(np.arange(20.0).reshape(5, 4), dtype=torch.float32, **where),
    "zeros": lambda m, **where: m.zeros(5, 6, **where),
    "ones": lambda m, **where: m.ones((5, 6), dtype=torch.int64, **where),
    "full": lambda m, **where: m.full((5, 6), 2.5, **where),
    "full of integers": lambda m, **where: m.full((5, 6), 7, **where),
    "eye": lambda m, **where: m.eye(5, **where),
    "eye with columns": lambda m, **where: m.eye(5, 7, dtype=torch.float64, **where),
}
RANGES: dict[str, Callable[..., Tensor]] = {
    "arange": lambda m, **where: m.arange(11, **where),
    "arange in steps": lambda m, **where: m.arange(20, 3, -4, **where),
    "arange of fractions": lambda m, **where: m.arange(0.1, 3, 0.1, **where),
    "arange as floats": lambda m, **where: m.arange(2, 9, dtype=torch.float64, **where),
    "arange by name": lambda m, **where: m.arange(start=1, end=30, step=3, **where),
}
RANDOM: dict[str, Callable[..., Tensor]] = {
    "rand": lambda **where: flow.rand(5, 6, **where),
    "randn": lambda **where: flow.randn(5, 6, dtype=torch.float64, **where),
    "randint": lambda **where: flow.randint(-3, 100, (5, 6), **where),
    "randint without low": lambda **where: flow.randint(100, size=(5, 6), dtype=torch.int32, **where),
}


@pytest.mark.parametrize(("where", "sbp"), LAYOUTS, ids=str)
def test_every_constructor_makes_what_torch_makes(threads: ThreadRanks, where: Placement, sbp: Any) -> None:
    for name, make in MADE.items():
        expected = make(torch)
        for found in threads.run(lambda make=make: whole(make(flow, placement=where, sbp=sbp))):
            assert found.dtype == expected.dtype, name
            assert torch.equal(found, expected), name
    if not any(entry in (S(1), S(-1)) for entry in (sbp if isinstance(sbp, list | tuple) else (sbp,))):
        for name, make in RANGES.items():
            expected = make(torch)
            for found in threads.run(lambda make=make: whole(make(flow, placement=where, sbp=sbp))):
                assert found.dtype == expected.dtype, name
                assert torch.equal(found, expected), name


@pytest.mark.parametrize("name", RANDOM)
def test_random_tensors_are_the_same_under_every_layout(threads: ThreadRanks, name: str) -> None:
    def on_a_rank(where: Placement, sbp: Any) -> tuple[Tensor, Tensor]:
        flow.manual_seed(3)
        first = RANDOM[name](placement=where, sbp=sbp)
        return whole(first), whole(RANDOM[name](placement=where, sbp=sbp))

    expected, second = threads.run(lambda: on_a_rank(LINE, B))[0]
    assert not torch.equal(expected, second)
    for where, sbp in LAYOUTS:
        for found in threads.run(lambda where=where, sbp=sbp: on_a_rank(where, sbp)):
            assert torch.equal(found[0], expected)
            assert torch.equal(found[1], second)


def test_random_numbers_have_the_distribution_of_their_name(threads: ThreadRanks) -> None:
    def on_a_rank() -> tuple[Tensor, Tensor, Tensor]:
        flow.manual_seed(0)
        where = {"placement": LINE, "sbp": S(0)}
        return tuple(
            whole(x)
            for x in (flow.rand(20_000, **where), flow.randn(20_000, **where), flow.randint(5, (20_000,), **where))
        )  # type: ignore[return-value]

    uniform, normal, integers = threads.run(on_a_rank)[0]
    assert 0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03
    assert integers.unique().tolist() == [0, 1, 2, 3, 4]


def test_ranks_with_different_random_numbers_are_told_so() -> None:
    def on_a_rank() -> None:
        generator = torch.Generator().manual_seed(current().rank // 3)
        flow.rand(3, placement=LINE, sbp=B, generator=generator)

    with (
        ThreadRanks(4) as new,
        pytest.raises(CallError, match="generators of rank 0 and rank 3 are in different states"),
    ):
        new.run(on_a_rank)


@pytest.mark.parametrize("name", ["zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like"])
def test_tensors_like_others_lie_as_they_do_unless_told_otherwise(threads: ThreadRanks, name: str) -> None:
    make = getattr(flow, name)
    extra = (7,) if name == "full_like" else ()

    def on_a_rank() -> None:
        x = flow.zeros(4, 6, dtype=torch.float64, placement=LINE, sbp=S(1))
        same = make(x, *extra)
        assert (same.placement, same.sbp, same.shape, same.dtype) == (LINE, (S(1),), x.shape, x.dtype)
        other = make(x, *extra, sbp=S(0))
        assert (other.placement, other.sbp, other.shape, other.dtype) == (LINE, (S(0),), x.shape, x.dtype)
        moved = make(torch.zeros(4, 6), *extra, placement=PAIR, sbp=B, dtype=torch.float32)
        assert (moved.placement, moved.dtype) == (PAIR, torch.float32)
        if name == "full_like":
            assert torch.equal(whole(moved), torch.full((4, 6), 7.0))

    threads.run(on_a_rank)


def test_without_a_placement_they_are_torchs_own() -> None:
    for name, make in {**MADE, **RANGES}.items():
        found = make(flow)
        assert type(found) is Tensor, name
        assert torch.equal(found, make(torch)), name
    torch.manual_seed(0)
    expected = torch.randn(3), torch.rand(2, 2), torch.randint(5, (3,)), torch.rand_like(torch.ones(2))
    torch.manual_seed(0)
    found = flow.randn(3), flow.rand(2, 2), flow.randint(5, (3,)), flow.rand_like(torch.ones(2))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gradients_can_be_asked_for(threads: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x = flow.ones(4, placement=LINE, sbp=S(0), requires_grad=True)
        assert x.requires_grad
        assert x.is_leaf

    threads.run(on_a_rank)


def test_placements_are_made_of_lists_ranges_and_arrays(threads: ThreadRanks) -> None:
    assert flow.placement("cpu", range(4)) == LINE
    assert flow.placement("cpu", np.arange(4).reshape(2, 2)) == MESH
    assert flow.placement("cpu", torch.tensor([[0, 1], [2, 3]])) == MESH
    assert flow.placement("cpu", [range(2), (2, 3)]) == MESH
    assert flow.placement(type="cpu", ranks=[[[0], [1]]]).hierarchy == (1, 2, 1)
    assert isinstance(LINE, flow.placement)
    assert not isinstance([0, 1], flow.placement)
    assert flow.placement.all("cpu") == flow.placement("cpu", [0])
    assert threads.run(lambda: flow.placement.all("cpu")) == [LINE] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flow.zeros(4, sbp=S(0)), r"flow.zeros: sbp=S\(0\) was found without a placement"),
        (lambda: flow.zeros(4, placement=LINE), "a placement was found without an sbp"),
        (lambda: flow.zeros(4, placement=MESH, sbp=S(0)), "has 2 mesh axes, so 2 were expected"),
        (lambda: flow.zeros(4, placement=LINE, sbp=(S(0), B)), "2 sbp entries were found .* so 1 was expected"),
        (lambda: flow.zeros(4, placement=LINE, sbp=S(1)), r"S\(1\) was found for flow.zeros of shape \(4,\)"),
        (lambda: flow.zeros(4, placement=LINE, sbp="S(0)"), "'S\\(0\\)' was found where the sbp"),
        (lambda: flow.zeros(4, placement=[0, 1], sbp=S(0)), "was found where the placement"),
        (lambda: flow.zeros(4, placement=LINE, sbp=S(0), device="cuda"), "device=cuda was found beside placement"),
        (lambda: flow.zeros(4, placement=flow.placement("cpu", [0, 9]), sbp=S(0)), "rank 9 .* ranks 0 … 3"),
        (lambda: flow.placement("cpu"), "without ranks"),
        (lambda: flow.placement("cpu", ["a"]), "'a' was found among the ranks"),
        (lambda: flow.placement("cpu", [[0, 1], [2]]), "rectangular"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_why(
    threads: ThreadRanks, make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        threads.run(make)
