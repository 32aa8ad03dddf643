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
    "as_tensor": lambda m, **where: m.as_tensor(np.arange(20).reshape(5, 4), dtype=torch.float64, **where),
    "tril_indices": lambda m, **where: m.tril_indices(4, 4, -1, **where),
    "triu_indices": lambda m, **where: m.triu_indices(row=4, col=3, dtype=torch.int32, **where),
    "new_zeros": lambda m, **where: SOME.new_zeros(5, 4, **where),
    "new_ones": lambda m, **where: SOME.new_ones((5, 4), dtype=torch.float32, **where),
    "new_full": lambda m, **where: SOME.new_full((5, 4), 3, **where),
    "new_tensor": lambda m, **where: SOME.new_tensor([[1, 2], [3, 4]], **where),
    "eye with columns": lambda m, **where: m.eye(5, 7, dtype=torch.float64, **where),
}
SOME = torch.ones(1, dtype=torch.float64)
RANGES: dict[str, Callable[..., Tensor]] = {
    "arange": lambda m, **where: m.arange(11, **where),
    "arange in steps": lambda m, **where: m.arange(20, 3, -4, **where),
    "arange of fractions": lambda m, **where: m.arange(0.1, 3, 0.1, **where),
    "arange as floats": lambda m, **where: m.arange(2, 9, dtype=torch.float64, **where),
    "linspace": lambda m, **where: m.linspace(0.3, 9, 11, **where),
    "linspace by name": lambda m, **where: m.linspace(start=5, end=-5, steps=7, dtype=torch.float64, **where),
    "logspace": lambda m, **where: m.logspace(0, 3, 9, base=2.0, **where),
    "hann_window": lambda m, **where: m.hann_window(9, **where),
    "hamming_window": lambda m, **where: m.hamming_window(8, periodic=False, **where),
    "blackman_window": lambda m, **where: m.blackman_window(8, dtype=torch.float64, **where),
    "bartlett_window": lambda m, **where: m.bartlett_window(8, False, **where),
    "kaiser_window": lambda m, **where: m.kaiser_window(8, True, 3.0, **where),
    "arange by name": lambda m, **where: m.arange(start=1, end=30, step=3, **where),
}
RANDOM: dict[str, Callable[..., Tensor]] = {
    "rand": lambda **where: flow.rand(5, 6, **where),
    "randn": lambda **where: flow.randn(5, 6, dtype=torch.float64, **where),
    "normal": lambda **where: flow.normal(2.0, 3.0, (5, 6), **where),
    "normal by name": lambda **where: flow.normal(mean=-1.0, std=0.5, size=(5, 6), dtype=torch.float64, **where),
    "randint_like": lambda **where: flow.randint_like(torch.ones(5, 6), 3, 50, **where),
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


def test_a_permutation_is_the_one_that_torch_draws(threads: ThreadRanks) -> None:
    torch.manual_seed(3)
    expected = torch.randperm(11), torch.randperm(4, dtype=torch.int32)

    def on_a_rank(where: Placement, sbp: Any) -> tuple[Tensor, Tensor]:
        flow.manual_seed(3)
        first = flow.randperm(11, placement=where, sbp=sbp)
        return whole(first), whole(flow.randperm(4, dtype=torch.int32, placement=where, sbp=sbp))

    for where, sbp in ((LINE, B), (LINE, S(0)), (PAIR, S(0)), (LINE, P), (MESH, [P, S(0)])):
        for found in threads.run(lambda where=where, sbp=sbp: on_a_rank(where, sbp)):
            for mine, torchs in zip(found, expected, strict=True):
                assert mine.dtype == torchs.dtype
                assert torch.equal(mine, torchs)


def test_a_normal_is_a_scaled_randn(threads: ThreadRanks) -> None:
    def on_a_rank() -> tuple[Tensor, Tensor]:
        flow.manual_seed(3)
        normal = flow.normal(2.0, 3.0, 5, 6, placement=LINE, sbp=S(0))
        flow.manual_seed(3)
        return whole(normal), whole(flow.randn(5, 6, placement=LINE, sbp=S(1)) * 3.0 + 2.0)

    torch.testing.assert_close(*threads.run(on_a_rank)[0])


def test_what_is_new_like_a_global_tensor_lies_as_it_does_unless_told_otherwise(threads: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x = flow.zeros(4, 6, dtype=torch.float64, placement=LINE, sbp=S(1))
        moved = x.new_ones(8, placement=PAIR, sbp=S(0))  # type: ignore[call-overload]
        assert (moved.placement, moved.sbp, moved.dtype) == (PAIR, (S(0),), x.dtype)
        other = x.new_full((4, 6), 2, sbp=S(0))  # type: ignore[call-arg]
        assert (other.placement, other.sbp, other.dtype) == (LINE, (S(0),), x.dtype)
        assert x.new_empty((4, 6), placement=PAIR).sbp == (S(1),)  # type: ignore[call-overload]
        data = x.new_tensor([1, 2, 3])
        assert (data.placement, data.sbp, data.dtype) == (LINE, (B,), x.dtype)
        assert whole(data + x[0, :3]).tolist() == [1, 2, 3]

    threads.run(on_a_rank)


def test_data_that_differ_between_ranks_are_no_global_tensor(threads: ThreadRanks) -> None:
    def values() -> None:
        flow.tensor([current().rank // 2], placement=LINE, sbp=B)

    def shapes() -> None:
        flow.as_tensor([0.5] * (1 + current().rank // 3), placement=PAIR, sbp=S(0))

    def outside() -> Tensor:
        return whole(flow.tensor([float(current().rank % 2)], placement=PAIR, sbp=B))

    with pytest.raises(CallError, match=r"flow.tensor was given other data on rank 2 .* than on rank 0"):
        threads.run(values)
    with pytest.raises(CallError, match=r"on rank 3 \(float32\[2\]\) than on rank 1 \(float32\[1\]\)"):
        threads.run(shapes)
    assert [found.tolist() for found in threads.run(outside)] == [[1.0]] * 4


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


@pytest.mark.parametrize("name", [
    "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "randint_like",
])  # fmt: skip
def test_tensors_like_others_lie_as_they_do_unless_told_otherwise(threads: ThreadRanks, name: str) -> None:
    make = getattr(flow, name)
    extra = (7,) if name in ("full_like", "randint_like") else ()

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
        (lambda: flow.linspace(0, 1, 5, sbp=S(0)), r"flow.linspace: sbp=S\(0\) was found without a placement"),
        (lambda: flow.hann_window(5, placement=LINE, sbp=S(1)), r"S\(1\) was found for flow.hann_window of"),
        (lambda: flow.randperm(5, placement=LINE, sbp=B, device="cpu"), "device=cpu was found beside placement"),
        (lambda: flow.normal(torch.ones(3), 1.0, placement=LINE, sbp=B), "flow.normal: a tensor was found as mean or"),
        (lambda: torch.ones(3).new_ones(4, sbp=S(0)), r"flow.Tensor.new_ones: sbp=S\(0\) was found without a place"),  # type: ignore[call-overload]
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
