"""OneFlow's ``global_view``: trees of global tensors, and a scope of new ones; and older names of ``to_global``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.eager.current import current
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow.utils.global_view import current_global_mode, global_mode, to_global, to_local
from actorflow_compiler.core.errors import LayoutError
from eager.ranks import PAIR, B, S, on, value

ONE = flow.placement("cpu", [1])


def test_a_function_of_tree_and_tensor_says_how_each_lies(two: ThreadRanks) -> None:
    state = {"weight": torch.ones(4, 2), "steps": torch.tensor(3), "name": "x"}

    def on_a_rank() -> Any:
        made = to_global(state, PAIR, lambda tree, t: S(0) if t is tree["weight"] else B)
        assert (made["weight"].sbp, made["steps"].sbp, made["name"]) == ((S(0),), (B,), "x")
        parts = to_local(made, copy=True)
        assert parts["weight"].data_ptr() != made["weight"].to_local().data_ptr()
        assert to_local(made)["weight"].data_ptr() == made["weight"].to_local().data_ptr()
        return value(made["weight"]), parts["weight"].shape

    whole, shape = on(two, on_a_rank)
    assert (tuple(whole.shape), tuple(shape)) == ((8, 2), (4, 2))


def test_ranks_outside_of_the_placement_may_give_nothing(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        learnt = torch.ones(2, dtype=torch.float64, requires_grad=True)
        tree = {"a": [torch.arange(3), (learnt, 5)], "b": torch.ones(3, 4)} if current().rank == 1 else None
        made = to_global(tree, ONE, lambda _, t: S(1) if t.dim() == 2 else B)
        assert tuple(made["b"].shape) == (3, 4)
        assert made["a"][1][1] == 5
        assert made["a"][1][0].requires_grad
        return [value(t.detach().to_global(PAIR, B)) for t in (made["a"][0], made["a"][1][0])]

    for found in two.run(on_a_rank):
        assert [t.tolist() for t in found] == [[0, 1, 2], [1.0, 1.0]]
        assert found[1].dtype is torch.float64


def test_in_a_mode_new_tensors_are_global(two: ThreadRanks) -> None:
    def on_a_rank() -> Tensor:
        assert not current_global_mode().is_enabled
        with global_mode(True, placement=PAIR, sbp=S(0)):
            mode = current_global_mode()
            assert (mode.is_enabled, mode.placement, mode.sbp) == (True, PAIR, (S(0),))
            flow.manual_seed(2)
            made = flow.randn(4, 3, device="cpu") + flow.linspace(0, 1, 4)[:, None]
            assert made.sbp == (S(0),)
            assert flow.ones(4, placement=PAIR, sbp=B).sbp == (B,)
            assert flow.zeros_like(torch.ones(2)).is_local
            with global_mode(False):
                assert flow.ones(4).is_local
            assert flow.full((2,), 3).is_global
        assert flow.ones(4).is_local
        flow.manual_seed(2)
        again = value(flow.randn(4, 3, placement=PAIR, sbp=B))
        torch.testing.assert_close(value(made), again + torch.linspace(0, 1, 4)[:, None])
        return value(made)

    first, second = two.run(on_a_rank)
    assert torch.equal(first, second)


def test_in_a_job_tensors_with_a_placement_are_whole() -> None:
    here = flow.placement("cpu", [0])

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Tensor:
        with global_mode(True, placement=here, sbp=B):
            x = x + flow.ones(4) + flow.arange(4)
        return x + flow.linspace(0, 3, 4, placement=here, sbp=S(0)) + flow.tensor([1.0], placement=here, sbp=B)

    assert step(torch.zeros(4)).tolist() == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("check_meta", [True, False])
def test_of_copies_that_differ_the_first_ranks_counts(two: ThreadRanks, check_meta: bool) -> None:
    def on_a_rank() -> Tensor:
        mine = torch.full((3,), float(current().rank))
        return mine.to_global(PAIR, B, check_meta=check_meta).to_local()  # type: ignore[attr-defined]

    assert [found.tolist() for found in two.run(on_a_rank)] == [[0.0] * 3] * 2


def test_older_names_do_what_the_newer_ones_do(two: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x: Any = torch.ones(2)
        made = x.to_consistent(placement=PAIR, sbp=S(0))
        assert (made.is_consistent, x.is_consistent, tuple(made.shape)) == (True, False, (4,))
        layer: Any = torch.nn.Linear(2, 2)
        assert layer.to_consistent(PAIR, B).weight.is_global

    two.run(on_a_rank)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: global_mode(True), "None was found where the placement of global_mode was expected"),
    (lambda: global_mode(True, PAIR), "None was found where the sbp of global_mode"),
    (lambda: global_mode(False, PAIR, B), "neither was expected"),
    (lambda: global_mode(PAIR, B), r"global_mode\(True, placement=…, sbp=…\) was expected"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_mode_that_makes_no_sense_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
