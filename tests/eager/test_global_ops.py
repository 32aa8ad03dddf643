"""Plain PyTorch code gives on global tensors what it gives on plain ones, in every layout."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import actorflow as flow
from actorflow.eager import perform
from actorflow.eager.current import current
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import CallError, LayoutError
from eager.ranks import MESH, PAIR, B, P, S, check_equal, on, spread, value

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + 2 * y - 1,
    "matmul": lambda x, y: x @ y.t(),
    "softmax": lambda x, y: F.softmax(x, -1) * F.log_softmax(y, 0),
    "layer_norm": lambda x, y: F.layer_norm(x, (6,), y[0], y[1]),
    "cat": lambda x, y: torch.cat([x, y.flip(0)], 1),
    "reshape": lambda x, y: x.reshape(6, 4) @ y.view(4, 6),
    "index": lambda x, y: x[:, [0, 2]] + y[1:3, 1:3].repeat(2, 1) + x[1, 2],
    "cross_entropy": lambda x, y: F.cross_entropy(x + y, y.argmax(-1), label_smoothing=0.1),
    "statistics": lambda x, y: x.mean(0) + y.std(0) + torch.linalg.vector_norm(x),
    "split": lambda x, y: x.split([2, 4], 1)[1] + y.chunk(2, 1)[0].repeat(1, 2)[:, :4],
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "where": lambda x, y: torch.where(x > 0, x, y).cumsum(0),
    "sort": lambda x, y: x.sort(0).values + y.topk(2).values.sum(),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None], is_causal=True),
    "conv": lambda x, y: F.conv1d(x[:, None], y[:3, None, :3], padding=1),
    "no rule": lambda x, y: torch.logcumsumexp(x, 0) + torch.renorm(y, 2, 0, 1.0) + torch.kron(x[:2, :3], y[:2, :2]),
}


def _inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_the_same_under_every_pair_of_layouts(two: ThreadRanks, name: str) -> None:
    for layouts in itertools.product([B, S(0), S(1), P], repeat=2):
        check_equal(two, FUNCTIONS[name], _inputs(), PAIR, layouts)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", ["add", "matmul", "reshape", "cross_entropy", "index", "layer_norm"])
def test_a_function_is_the_same_on_a_mesh(four: ThreadRanks, name: str) -> None:
    for layouts in (([S(0), S(1)], [B, S(0)]), ([S(1), P], [S(0), S(0)]), ([P, P], [S(1), B])):
        check_equal(four, FUNCTIONS[name], _inputs(), MESH, layouts)


def test_operands_that_are_split_differently_are_redistributed(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        x, y = (spread(torch.arange(16.0).view(4, 4), PAIR, S(d)) for d in (0, 1))
        z = x + y
        return z.shape, z.sbp, value(z)

    shape, sbp, made = on(two, on_a_rank)
    assert shape == (4, 4)
    assert sbp in ((S(0),), (S(1),))
    torch.testing.assert_close(made, 2 * torch.arange(16.0).view(4, 4))


def test_uneven_and_missing_parts_are_right(four: ThreadRanks) -> None:
    x = torch.arange(15.0, dtype=torch.float64).view(5, 3).requires_grad_()
    line = flow.placement("cpu", [0, 1, 2, 3])
    for sbp in (S(0), S(1)):  # 2, 1, 1, 1 rows; 1, 1, 1, 0 columns
        check_equal(four, lambda t: (t @ t.t()).relu().sum(0) + t.mean(), [x], line, [sbp])


def test_sums_of_terms_pass_linear_ops_and_are_added_up_for_others(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        x = flow.ones(2, 2).to_global(PAIR, P)  # 2, as each rank has a term of 1
        return (x * 3).sbp, value(x * 3), x.exp().sbp != (P,), value(x.exp()), value(x * x), value(x + 1)

    linear, times, added, exp, square, plus = on(two, on_a_rank)
    assert linear == (P,)
    assert added
    torch.testing.assert_close(times, torch.full((2, 2), 6.0))
    torch.testing.assert_close(exp, torch.full((2, 2), 2.0).exp())
    torch.testing.assert_close(square, torch.full((2, 2), 4.0))
    torch.testing.assert_close(plus, torch.full((2, 2), 3.0))


def test_a_gradient_comes_to_the_layout_of_its_leaf(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        weight = spread(torch.ones(6, 3, requires_grad=True), PAIR, B)
        x = spread(torch.ones(4, 6), PAIR, S(0))
        (x @ weight).sum().backward()
        (x @ weight).sum().backward()
        return weight.grad.sbp, value(weight.grad), weight.grad._local

    sbp, grad, local = on(two, on_a_rank)
    assert sbp == (B,)
    torch.testing.assert_close(grad, torch.full((6, 3), 8.0))
    torch.testing.assert_close(local, grad)


def test_dropout_drops_the_same_elements_under_every_layout(two: ThreadRanks) -> None:
    def on_a_rank() -> list[Tensor]:
        found = []
        for sbp in (B, S(0), S(1)):
            flow.manual_seed(3)
            x = spread(torch.ones(8, 8), PAIR, sbp)
            found.append(value(F.dropout(x, 0.5) + torch.rand_like(x) + x.clone().normal_()))
        return found

    whole, *others = on(two, on_a_rank)
    assert whole.std() > 0
    for other in others:
        torch.testing.assert_close(other, whole)


def test_a_second_call_is_planned_already(two: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor, y: Tensor, rate: float) -> Tensor:
        return F.gelu(x @ y.t()).mul(rate).add_(1.0, alpha=rate).sum(0)

    planned: list[int] = []
    make_plan = perform.make_plan

    def counted(func: Any, args: Any, kwargs: Any, operands: Any, *rest: Any) -> Any:
        planned.append(operands[0]._spec.comm.rank)
        return make_plan(func, args, kwargs, operands, *rest)

    monkeypatch.setattr(perform, "make_plan", counted)

    def on_a_rank() -> tuple[int, int]:
        x, y = (spread(t.detach()[:3], PAIR, S(0)) for t in _inputs())
        step(x, y, 0.5)
        before = planned.count(current().rank)
        step(x, y, 0.25)
        return before, planned.count(current().rank)

    before, after = on(two, on_a_rank)
    assert before == after > 0


# ---- what is not an op


def test_values_are_read_whole_on_every_rank(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        x = spread(torch.arange(6.0).view(2, 3), PAIR, S(1))
        assert float(x.sum()) == 15.0
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert bool(torch.equal(x, x.clone()))
        return x.numpy(), np.asarray(x), f"{x.sum():.1f}", [row.shape for row in x], len(x)

    found, as_array, text, rows, length = on(two, on_a_rank)
    assert (found == np.arange(6.0).reshape(2, 3)).all()
    assert (as_array == found).all()
    assert (text, rows, length) == ("15.0", [(3,), (3,)], 2)


def test_printing_shows_layout_and_part_and_moves_nothing(two: ThreadRanks) -> None:
    def on_a_rank() -> str:
        x = spread(torch.arange(4.0).view(2, 2), PAIR, S(0))
        return repr(x) if current().rank == 0 else ""  # one rank alone may print

    text = on(two, on_a_rank)
    assert "[[0., 1.]]" in text
    assert "rank 0's part, shape=(2, 2), placement=cpu:[0,1], sbp=S(0)" in text


def test_a_copy_and_a_pickle_are_tensors_of_their_own(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        x = torch.nn.Parameter(spread(torch.ones(4, 2), PAIR, S(0)))
        again = copy.deepcopy(x)
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        with torch.no_grad():
            x.mul_(5)
        assert isinstance(again, torch.nn.Parameter)
        assert isinstance(loaded, torch.nn.Parameter)
        return again.sbp, value(again), loaded.sbp, value(loaded)

    copied_sbp, copied, loaded_sbp, loaded = on(two, on_a_rank)
    assert copied_sbp == loaded_sbp == (S(0),)
    torch.testing.assert_close(copied, torch.ones(4, 2))
    torch.testing.assert_close(loaded, torch.ones(4, 2))


def test_a_part_is_loaded_by_its_own_rank_only(two: ThreadRanks) -> None:
    def save() -> bytes:
        file = io.BytesIO()
        torch.save(spread(torch.ones(4), PAIR, S(0)), file)
        return file.getvalue()

    files = two.run(save)

    def load() -> None:
        torch.load(io.BytesIO(files[0]), weights_only=False)

    with pytest.raises(LayoutError, match="rank 1 has loaded rank 0's part"):
        two.run(load)


def test_a_device_is_a_matter_of_the_placement(two: ThreadRanks) -> None:
    def on_a_rank() -> Tensor:
        return spread(torch.ones(2), PAIR, B).to("cpu", torch.float64)

    assert on(two, on_a_rank).dtype == torch.float64
    with pytest.raises(LayoutError, match=r"write x\.to_global"):
        two.run(lambda: spread(torch.ones(2), PAIR, B).to("meta"))


MEMORY: dict[str, tuple[Callable[[Any], Any], str]] = {  # how it is reached → what is said
    "storage": (lambda x: x.untyped_storage(), r"no memory of its own.*x\.to_local\(\)\.untyped_storage"),
    "shared": (lambda x: x.share_memory_(), r"x\.to_local\(\)\.share_memory_"),
    "dlpack": (np.from_dlpack, r"x\.to_local\(\)\.__dlpack"),
    "each": (lambda x: x.apply_(lambda n: n + 1), r"x\.to_local\(\)\.apply_"),
    "array": (lambda x: x + np.ones(4), "NumPy's add was given a global tensor"),
    "other": (lambda x: np.ones(4) + x, "NumPy's add was given a global tensor"),
    "root": (np.sqrt, "NumPy's sqrt was given a global tensor"),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_that_of_parts(two: ThreadRanks, name: str) -> None:
    reach, told = MEMORY[name]
    with pytest.raises(LayoutError, match=told):
        two.run(lambda: reach(spread(torch.ones(4), PAIR, S(0))))


# ---- several placements


def test_an_op_runs_where_the_fewest_bytes_have_to_move_to(four: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        big = spread(torch.ones(8, 8), flow.placement("cpu", [0, 1]), S(0))
        small = spread(torch.arange(8.0), flow.placement("cpu", [2, 3]), S(0))
        made = big + small
        return made.placement, made._local.shape, value(made), value(small + big)

    placement, _, made, other = on(four, on_a_rank)
    assert placement == flow.placement("cpu", [0, 1])
    torch.testing.assert_close(made, torch.ones(8, 8) + torch.arange(8.0))
    torch.testing.assert_close(other, made)


def test_where_both_ways_cost_the_same_the_choice_is_spelled_out(four: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x, y = (spread(torch.ones(4), flow.placement("cpu", ranks), B) for ranks in ([0, 1], [2, 3]))
        x + y

    with pytest.raises(LayoutError, match=r'flow.placement\("cpu", \[0, 1\]\)\) or .*\[2, 3\]') as caught:
        four.run(on_a_rank)
    assert "operand 1 of aten.add.Tensor: float32[4] B on cpu:[2,3]" in str(caught.value)


def test_ranks_outside_of_a_placement_go_on_with_empty_parts(four: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        x = spread(torch.arange(6.0).view(2, 3).requires_grad_(), flow.placement("cpu", [1, 2]), S(0))
        y = (x.exp() @ x.t()).sum()
        y.backward()
        x.detach().add_(1)
        return y.item(), x.grad._local.shape, value(x.grad), x.to_local().shape

    plain = torch.arange(6.0).view(2, 3).requires_grad_()
    wanted = (plain.exp() @ plain.t()).sum()
    wanted.backward()
    found = four.run(on_a_rank)
    for item, _, grad, _ in found:
        assert item == pytest.approx(wanted.item())
        torch.testing.assert_close(grad, plain.grad)
    assert [tuple(part) for *_, part in found] == [(0,), (1, 3), (1, 3), (0,)]


def test_ranks_that_run_different_ops_are_told_apart(two: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x = spread(torch.ones(4, 4), PAIR, S(0))
        if current().rank == 0:
            x.to_global(sbp=B)
        else:
            x.to_global(sbp=S(1))

    with pytest.raises(CallError, match=r"rank 0.*\n.*rank 1"):
        two.run(on_a_rank)


def test_it_is_a_tensor_to_pytorch(two: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x = spread(torch.ones(4, 4), PAIR, S(0))
        assert isinstance(x, Tensor)
        assert isinstance(x, GlobalTensor)
        assert x.is_global
        assert not torch.ones(1).is_global
        assert (x.dim(), x.numel(), x.stride(), x.is_contiguous()) == (2, 16, (4, 1), True)
        assert x.t().stride() == (1, 4)
        with pytest.raises(AttributeError, match="plain tensor has no sbp"):
            torch.ones(1).sbp  # noqa: B018

    two.run(on_a_rank)


@pytest.mark.slow
def test_all_ranks_use_what_the_first_finds_out_about_an_op(two: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    rules_of = perform.rules_of
    monkeypatch.setattr(perform, "rules_of", lambda call: asked.append(current().rank) or rules_of(call))

    a, b, c = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def on_a_rank() -> Tensor:
        x, y, z = (spread(t, PAIR, S(0)) for t in (a, b, c))
        return value(torch.ops.aten._trilinear(x, y, z, [], [], [], [2]))

    torch.testing.assert_close(on(two, on_a_rank), torch.ops.aten._trilinear(a, b, c, [], [], [], [2]))
    assert asked == [0]


@pytest.mark.parametrize("layout", [B, S(0)])
@pytest.mark.parametrize("function", [torch.det, torch.logdet, torch.linalg.inv], ids=lambda f: f.__name__)
def test_matrices_that_lie_column_by_column_have_their_gradients(
    two: ThreadRanks, function: Callable[..., Any], layout: Any
) -> None:
    x = (torch.rand(3, 4, 4, dtype=torch.float64) / 8 + torch.eye(4)).mT.requires_grad_()
    check_equal(two, function, [x], PAIR, [layout])
