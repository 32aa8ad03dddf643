"""What changes a global tensor in place changes its views and its base, as for plain tensors, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import actorflow as flow
from actorflow.eager.linked_views import LinkedView
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import LayoutError
from eager.ranks import MESH, PAIR, B, P, S, check_equal, on, spread, value


def _through_views(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1.0
    z.add_(y)
    z[0] = y[1]
    z[:, 1:3].mul_(2)
    z.view(-1)[3:7].add_(1.5)
    z.t()[2].fill_(3)
    z.view(2, 2, 6).permute(2, 0, 1)[1].mul_(0.5)
    z.narrow(0, 1, 3).sub_(1)
    z.select(1, 4).zero_()
    z.unsqueeze(0).squeeze(0).diagonal().mul_(-1)
    return z


def _through_lists_of_views(x: Tensor, y: Tensor) -> Tensor:
    z = x.detach() * 1.0
    z.split([1, 3])[1].sub_(y[1:])
    z.unbind(1)[4].zero_()
    z.chunk(2, 1)[1].mul_(3)
    return z


def _views_follow_their_base(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    flat, turned, middle, row = z.view(2, 12), z.t(), z[1:3], z[2]
    z.add_(y)
    z[2, 3] = 7
    return flat.sum() + turned[0].sum() * 2 + middle.sum(0) * 3 + row + flat.reshape(4, 6)[0]


def _ops_that_keep_what_they_change(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z.relu_().clamp_(max=1).pow_(2).addcmul_(x, y, value=0.5).addcdiv_(x, y.abs() + 1).lerp_(y, 0.25)
    z.masked_fill_(y > 1, 2.0).index_fill_(1, z.argmax(1)[:1], -1.0).copy_(z + y[0])
    z.scatter_(1, z.argmin(1, keepdim=True), 4.0).transpose_(0, 1).transpose_(0, 1)
    return F.relu(z, inplace=True)


@pytest.mark.parametrize(
    "function", [_through_views, _through_lists_of_views, _views_follow_their_base, _ops_that_keep_what_they_change]
)
def test_changes_in_place_reach_all_that_share_memory(two: ThreadRanks, function: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    needed = function in (_through_views, _views_follow_their_base)
    inputs = [torch.randn(4, 6, dtype=torch.float64, requires_grad=needed) for _ in range(2)]
    for layouts in ((B, S(0)), (S(0), S(1)), (S(1), B), (S(1), S(0)), (P, S(0))):
        check_equal(two, function, inputs, PAIR, layouts)


def test_changes_in_place_reach_their_base_on_a_mesh(four: ThreadRanks) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for layouts in (([S(0), S(1)], [B, S(0)]), ([S(1), P], [S(0), B])):
        check_equal(four, _through_views, inputs, MESH, layouts)


def test_a_change_in_place_keeps_the_layout(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        x, y = spread(torch.ones(4, 4), PAIR, S(0)), spread(torch.ones(4, 4), PAIR, S(1))
        part, storage = x._local, x._local.data_ptr()
        x += y
        x.softmax(0)
        x.mul_(y).clamp_(max=1.5)
        assert x._local is part
        assert x._local.data_ptr() == storage
        total = spread(torch.ones(4), PAIR, P).exp_()
        return x.sbp, value(x), total.sbp, value(total)

    sbp, x, total_sbp, total = on(two, on_a_rank)
    assert (sbp, total_sbp) == ((S(0),), (P,))
    torch.testing.assert_close(x, torch.full((4, 4), 1.5))
    torch.testing.assert_close(total, torch.ones(4).exp())


def test_a_view_shares_memory_where_the_layout_lets_it(two: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x = spread(torch.arange(16.0).view(4, 4), PAIR, S(0))
        for view in (x.t(), x.view(4, 2, 2), x[:, 1], x.unsqueeze(1), x.detach()):
            assert not isinstance(view, LinkedView)
            assert view._local.untyped_storage().data_ptr() == x._local.untyped_storage().data_ptr()
        assert isinstance(x[1], LinkedView)  # rank 0 has this row, rank 1 gets it

    two.run(on_a_rank)


def test_what_cannot_be_brought_to_its_base_is_an_error(two: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x = spread(torch.arange(16.0).view(4, 4), PAIR, S(0))
        x.unfold(0, 3, 3).mul_(2)

    with pytest.raises(LayoutError, match="cannot be brought to the tensor; change a clone"):
        two.run(on_a_rank)


def test_a_tensor_keeps_its_shape_and_its_kind(two: ThreadRanks) -> None:
    def resized() -> None:
        spread(torch.ones(4), PAIR, S(0)).resize_(8)

    def into_a_plain_one() -> None:
        torch.empty(2).copy_(spread(torch.ones(4), PAIR, S(0)))  # which is as large as a part

    with pytest.raises(LayoutError, match="another shape"):
        two.run(resized)
    with pytest.raises(LayoutError, match=r"x.to_local\(\)"):
        two.run(into_a_plain_one)


def test_running_statistics_move_as_on_one_device(two: ThreadRanks) -> None:
    torch.manual_seed(2)
    x = torch.randn(6, 3, 4, 4)
    plain = torch.nn.BatchNorm2d(3)
    wanted = plain(x)
    plain_conv = F.conv2d(x, torch.ones(2, 3, 3, 3))

    def on_a_rank() -> Any:
        norm = flow.to_global(torch.nn.BatchNorm2d(3), PAIR, B)
        made = norm(spread(x, PAIR, S(0)))
        conv = F.conv2d(spread(x, PAIR, S(0)), spread(torch.ones(2, 3, 3, 3), PAIR, B))
        return made.sbp, value(made), value(norm.running_mean), value(norm.running_var), conv.sbp, value(conv)

    sbp, made, mean, var, conv_sbp, conv = on(two, on_a_rank)
    assert sbp == conv_sbp == (S(0),)
    torch.testing.assert_close(made, wanted.detach())
    torch.testing.assert_close(mean, plain.running_mean)
    torch.testing.assert_close(var, plain.running_var)
    torch.testing.assert_close(conv, plain_conv)


@pytest.mark.matrix
@pytest.mark.parametrize("weights", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_short_floats_gives_torchs_dtypes_in_every_layout(
    two: ThreadRanks, dtype: torch.dtype, training: bool, weights: torch.dtype | None
) -> None:
    random = torch.Generator().manual_seed(0)
    x, seed = (torch.randn(8, 4, 3, 3, generator=random).to(dtype) for _ in range(2))
    weight, bias, mean, variance = (1 + torch.rand(4, generator=random).to(weights or dtype) for _ in range(4))

    def run(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, seed: Tensor
    ) -> tuple[Tensor, ...]:
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        made = F.batch_norm(x, mean, variance, weight, bias, training)
        return made, mean, variance, *torch.autograd.grad(made, leaves, seed)

    wanted = run(*(t.clone() for t in (x, weight, bias, mean, variance, seed)))

    def on_a_rank(sbp: Any) -> list[tuple[torch.dtype, torch.dtype, Tensor]]:
        whole = [spread(t, PAIR, B) for t in (weight, bias, mean, variance)]
        made = run(spread(x, PAIR, sbp), *whole, spread(seed, PAIR, sbp))
        return [(t.dtype, t.to_local().dtype, value(t.detach().double())) for t in made]

    for sbp in (B, S(0), S(1)):
        for (said, held, found), t in zip(on(two, partial(on_a_rank, sbp)), wanted, strict=True):
            assert (said, held) == (t.dtype, t.dtype)
            torch.testing.assert_close(found, t.detach().double(), rtol=2e-2, atol=2e-2)
