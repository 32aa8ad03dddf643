"""Picking the elements of target classes, whole and in parts, and the maxima of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actorflow_compiler.core.sbp import Split
from actorflow_compiler.custom_ops.split_classes import OPS, amax_blocks, listed, parts_on, pick, pick_backward
from actorflow_compiler.signatures import local_op, signatures
from signature_checks import instance
from signature_samples import f, n


def test_each_part_picks_what_it_has_and_the_parts_add_up() -> None:
    x, target = f(5, 7), torch.tensor([0, 6, 3, -100, 2])
    whole = pick(x, target, 1, -100, 0, 7)
    assert torch.equal(whole, torch.stack([x[0, 0], x[1, 6], x[2, 3], x.new_zeros(()), x[4, 2]]))
    parts = [pick(x[:, lo:hi], target, 1, -100, lo, 7) for lo, hi in ((0, 3), (3, 6), (6, 7), (7, 7))]
    assert torch.equal(torch.stack(parts).sum(0), whole)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_the_gradient_lies_where_the_elements_were_picked(dtype: torch.dtype) -> None:
    x, target = f(4, 6, 3).requires_grad_(), n(4, 3, below=6)
    target[0, 1] = 5
    grad = f(4, 3)
    (expected,) = torch.autograd.grad(x.gather(1, target.unsqueeze(1)).squeeze(1), x, grad)
    assert torch.equal(pick_backward(grad, target.to(dtype), 6, 1, -100, 0, 6), expected)
    parts = [pick_backward(grad, target.to(dtype), hi - lo, 1, -100, lo, 6) for lo, hi in ((0, 4), (4, 4), (4, 6))]
    assert torch.equal(torch.cat(parts, 1), expected)


def test_a_class_that_is_ignored_is_not_picked_even_if_there_is_one_of_its_number() -> None:
    x, target = f(3, 4), torch.tensor([1, 2, 1])
    assert pick(x, target, 1, 1, 0, 4).tolist() == [0.0, float(x[1, 2]), 0.0]
    assert pick_backward(torch.ones(3), target, 4, 1, 1, 0, 4).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("target", [7, -1])
@pytest.mark.parametrize(("first", "size"), [(0, 7), (0, 3), (3, 4)])
def test_a_target_that_is_no_class_is_refused_by_every_part(target: int, first: int, size: int) -> None:
    targets = torch.tensor([0, target, -100])
    with pytest.raises(RuntimeError, match="out of bounds"):
        pick(f(3, size), targets, 1, -100, first, 7)
    with pytest.raises(RuntimeError, match="out of bounds"):
        pick_backward(f(3), targets, size, 1, -100, first, 7)


def test_maxima_of_blocks_are_those_of_the_parts_of_a_split() -> None:
    x = f(2, 8)
    assert torch.equal(amax_blocks(x, 1, (3,)), torch.stack([x[:, :3].amax(1), x[:, 3:6].amax(1), x[:, 6:].amax(1)], 1))
    assert torch.equal(amax_blocks(x, 1, ()), x.amax(1, keepdim=True))
    nested = amax_blocks(x[:, :6], 1, (2, 2))  # 6 over 2, and each 3 over 2: not as 6 over 4
    assert torch.equal(nested[:, 1:3], torch.stack([x[:, 2], x[:, 3:5].amax(1)], 1))


def test_maxima_of_devices_with_weights_are_repeated_so_that_each_has_its_own() -> None:
    x = f(2, 8)
    first, last = x[:, :6].amax(1), x[:, 6:].amax(1)
    assert torch.equal(amax_blocks(x, 1, listed([(3, 1)])), torch.stack([first, first, first, last], 1))
    nested = amax_blocks(x, 1, listed([(3, 1), 2]))
    halves = x[:, :3].amax(1), x[:, 3:6].amax(1), x[:, 6], x[:, 7]
    assert torch.equal(nested, torch.stack([halves[i] for i in (0, 0, 0, 1, 1, 1, 2, 3)], 1))
    assert parts_on(listed([(3, 1), 2]), 0) == (0, 3, 2)
    assert parts_on((0, 3, *listed([(2, 1)])), 0) == (0, 6)
    assert parts_on(listed([(3, 1), 2]), 1) == (2,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_the_maximum_of_an_empty_block_is_less_than_any_other(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 2).to(dtype)
    found = amax_blocks(x, 1, (3,))
    assert torch.equal(found.amax(1, keepdim=True), x[:, :1])
    least = {torch.float32: -torch.inf, torch.int64: torch.iinfo(torch.int64).min, torch.bool: False}
    assert found[0, 2] == least[dtype]


def test_maxima_are_split_only_over_as_many_devices_as_there_are_blocks() -> None:
    call = instance("actorflow.amax_blocks", [f(4, 7), 1, (2, 3)]).call
    assert Split(1) in [s.outs[0] for s in signatures(call, 2)]
    assert Split(1) not in [s.outs[0] for s in signatures(call, 3)]
    split, rows = (next(s for s in signatures(call, 2) if s.outs == (Split(d),)) for d in (1, 0))
    assert local_op(call, split, 2, 0)[1][2] == (3,)
    assert local_op(call, rows, 2, 0)[1][2] == (2, 3)
    weighted = instance("actorflow.amax_blocks", [f(4, 7), 1, listed([(2, 1), 3])]).call
    assert Split(1) not in [s.outs[0] for s in signatures(weighted, 2)]
    split = next(s for s in signatures(weighted, (2, 1)) if s.outs == (Split(1),))
    assert [local_op(weighted, split, (2, 1), i)[1][2] for i in range(2)] == [(0, 2, 3), (3,)]


ARGUMENTS = {
    "pick": [f(3, 4, 2), n(3, 2, below=4), 1, -100, 0, 4],
    "pick_backward": [f(3, 2), n(3, 2, below=4), 4, 1, -100, 0, 4],
    "amax_blocks": [f(3, 4), 1, [3, 2]],
    "amax_blocks by weights": [f(3, 4), 1, [0, 2, -2, 3, 1, 2]],
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_trace_knows_what_the_op_of_a_plan_makes(case: str) -> None:
    name = case.split()[0]
    traced = getattr(torch.ops.actorflow, name)
    expected = OPS[name](*ARGUMENTS[case])
    assert torch.equal(traced(*ARGUMENTS[case]), expected)
    shape = traced(*(a.to("meta") if isinstance(a, Tensor) else a for a in ARGUMENTS[case]))
    assert (shape.shape, shape.dtype) == (expected.shape, expected.dtype)
