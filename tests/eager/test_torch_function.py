"""A function of torch that is called on the parts gives what its ops give one by one, and so do its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import actorflow as flow
from actorflow.eager.current import comparing_ops
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import LayoutError
from eager.ranks import MESH, PAIR, B, P, S, check_equal, on, spread, value

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "linear": lambda x, y: F.linear(x, y[0], y[1, :, 0]),
    "linear, twice the same": lambda x, y: F.linear(x, x[1]) + F.linear(y[0], y[0]),
    "matmul": lambda x, y: torch.matmul(x, y.transpose(1, 2)),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None], is_causal=True),
    "cross_entropy": lambda x, y: F.cross_entropy(x, torch.softmax(y, 1)),
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=([2], [2])),
    "similarity": lambda x, y: F.cosine_similarity(x, y, dim=2),
    "outer": lambda x, y: torch.outer(x.flatten(), y[0, 0]),
}


@pytest.fixture(autouse=True)
def _nothing_is_learned(two: ThreadRanks, four: ThreadRanks) -> None:
    """Forget which functions run op by op: other modules may have called them so in this process."""
    for comm in (*two._comms, *four._comms):
        comm.stepwise.clear()
        comm.stepwise_kinds.clear()


def _inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_on_the_parts_is_the_ops_one_by_one(two: ThreadRanks, four: ThreadRanks, name: str) -> None:
    for layouts in itertools.product([B, S(0), S(2), P], repeat=2):
        for _ in range(2):  # op by op, then as it was learned
            check_equal(two, FUNCTIONS[name], _inputs(), PAIR, layouts)
    for _ in range(2):
        check_equal(four, FUNCTIONS[name], _inputs(), MESH, ([S(0), B], [B, S(1)]))


def _linear(x: Any, w: Any, b: Any) -> tuple[Tensor, Any]:
    """A call that was learned before, and the name of its node."""
    for _ in range(2):
        made = F.linear(x, w, b)
    return made, type(made.grad_fn).__name__


@pytest.mark.parametrize(
    ("x", "w", "b", "result", "gradients"),
    [
        (S(0), B, B, "S(0)", ("S(0)", "P", "P")),  # data parallel
        (B, S(0), S(0), "S(2)", ("P", "S(0)", "S(0)")),  # columns of the weight
        (B, B, B, "B", ("B", "B", "B")),
    ],
)
def test_what_nobody_has_to_move_is_one_call_and_gradients_lie_as_parts_do(
    two: ThreadRanks, x: Any, w: Any, b: Any, result: str, gradients: tuple[str, ...]
) -> None:
    def run() -> tuple[str, str, list[str]]:
        leaves = [
            spread(torch.randn(*size, requires_grad=True), PAIR, sbp)
            for size, sbp in (((2, 4, 4), x), ((4, 4), w), ((4,), b))
        ]
        given = [t * 1 for t in leaves]  # gradients of leaves lie as these do
        made, node = _linear(*given)
        found = torch.autograd.grad(made.sum(), given)
        return node, str(made.sbp[0]), [str(g.sbp[0]) for g in found]

    assert on(two, run) == ("_PartwiseFunctionBackward", result, list(gradients))


def test_what_has_to_be_moved_goes_op_by_op(two: ThreadRanks) -> None:
    def run() -> str:
        x, w, b = (spread(torch.randn(4, 4, requires_grad=True), PAIR, S(1)) for _ in range(3))
        return _linear(x, w, b[0])[1]

    assert on(two, run) != "_PartwiseFunctionBackward"


def test_gradients_of_gradients(two: ThreadRanks) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 4, 4).double(), torch.randn(4, 4).double(), torch.randn(4).double()

    def twice(*given: Tensor) -> list[Tensor]:
        made = F.linear(*given).tanh()
        first = torch.autograd.grad(made.square().sum(), given, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), given)]

    wanted = twice(*(t.clone().requires_grad_() for t in (x, w, b)))

    def run() -> list[Tensor]:
        given = [spread(t.clone().requires_grad_(), PAIR, sbp) for t, sbp in ((x, S(0)), (w, B), (b, B))]
        assert _linear(*given)[1] == "_PartwiseFunctionBackward"
        return [value(t.detach()) for t in twice(*given)]

    for made, want in zip(on(two, run), wanted, strict=True):
        torch.testing.assert_close(made, want.detach())


def test_a_graph_can_be_kept_and_is_gone_otherwise(two: ThreadRanks) -> None:
    def run() -> None:
        x, w, b = (spread(torch.ones(*s, requires_grad=True), PAIR, B) for s in ((4, 4), (4, 4), (4,)))
        made, _ = _linear(x, w, b)
        made.sum().backward(retain_graph=True)
        made.sum().backward()
        assert float(w.grad[0, 0]) == 8.0
        with pytest.raises(RuntimeError, match="second time"):
            made.sum().backward()

    on(two, run)


def test_a_change_of_what_the_backward_pass_needs_is_noticed(two: ThreadRanks) -> None:
    def run() -> None:
        x, w, b = (spread(torch.ones(*s, requires_grad=True), PAIR, B) for s in ((4, 4), (4, 4), (4,)))
        made, _ = _linear(x, w, b)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()
        made, _ = _linear(x, w, b)
        with torch.no_grad():
            b.add_(1)  # is not needed
        made.sum().backward()
        for _ in range(2):
            made = torch.einsum("ij,j->i", x, b).softmax(0)
        for _ in range(2):
            made = F.softmin(made, 0)
        assert type(made.grad_fn).__name__ == "_PartwiseFunctionBackward"
        made.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()

    on(two, run)


def test_results_can_be_changed_hooked_and_asked_for_their_gradients(two: ThreadRanks) -> None:
    def use(x: Tensor, w: Tensor, b: Tensor) -> list[float]:
        made, _ = _linear(x, w, b)
        seen: list[float] = []
        made.register_hook(lambda g: seen.append(float(g[0, 0])))
        made.retain_grad()
        changed = made * 1
        changed.mul_(3)
        (changed.sum() + torch.autograd.grad(made.sum(), w, retain_graph=True)[0].sum()).backward()
        return [*seen, float(made.grad[0, 0]), float(b.grad[0])]

    sizes = ((4, 4), (4, 4), (4,))

    def run() -> list[float]:
        return use(*(spread(torch.ones(*s, requires_grad=True), PAIR, B) for s in sizes))

    assert on(two, run) == use(*(torch.ones(*s, requires_grad=True) for s in sizes))


def test_gradients_of_two_tensors_are_two_memories(two: ThreadRanks) -> None:
    def run() -> tuple[float, float]:
        x, w, b = (spread(torch.ones(*s, requires_grad=True), PAIR, B) for s in ((4,), (4, 4), (4,)))
        made, _ = _linear(x, w, b)
        given = made.detach().clone()
        (gradient,) = torch.autograd.grad(made, b, given)
        gradient.mul_(0)
        return float(given[0]), float(gradient[0])

    assert on(two, run) == (5.0, 0.0)


def test_checkpointing_and_the_check_of_each_op_see_the_ops(two: ThreadRanks) -> None:
    def run() -> tuple[str, str, Tensor, Tensor]:
        x, w, b = (spread(torch.ones(*s, requires_grad=True), PAIR, B) for s in ((4, 4), (4, 4), (4,)))
        made, _ = _linear(x, w, b)
        with comparing_ops():
            node = type(F.linear(x, w, b).grad_fn).__name__
        inside: list[str] = []

        def body(x: Tensor) -> Tensor:
            out = F.linear(x, w, b)
            inside.append(type(out.grad_fn).__name__)
            return out.tanh()

        (recomputed,) = torch.autograd.grad(checkpoint(body, x, use_reentrant=False).sum(), w)
        (usual,) = torch.autograd.grad(made.tanh().sum(), w)
        return node, inside[0], value(recomputed), value(usual)

    node, inside, recomputed, usual = on(two, run)
    assert "_PartwiseFunctionBackward" not in (node, inside)
    torch.testing.assert_close(recomputed, usual)


def test_mixed_precision_goes_op_by_op(two: ThreadRanks) -> None:
    def run() -> tuple[torch.dtype, torch.dtype]:
        x, w, b = (spread(torch.ones(*s), PAIR, B) for s in ((4, 4), (4, 4), (4,)))
        for _ in range(2):
            made = F.linear(x, w, b)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return made.dtype, F.linear(x, w, b).dtype

    assert on(two, run) == (torch.float32, torch.bfloat16)


def test_a_result_that_shares_memory_with_an_operand_stays_a_view(two: ThreadRanks) -> None:
    def run() -> Tensor:
        for _ in range(3):
            x = flow.zeros(4, 4, placement=PAIR, sbp=S(0))
            x.flatten()
            x.reshape(2, 8).add_(1)
        return value(x)

    torch.testing.assert_close(on(two, run), torch.ones(4, 4))


def test_a_tensor_is_split_where_a_global_tensor_says(two: ThreadRanks) -> None:
    x = torch.arange(12.0).view(6, 2)

    def run() -> list[list[Tensor]]:
        given = spread(x, PAIR, S(0))
        where, count = spread(torch.tensor([2, 3]), PAIR, S(0)), spread(torch.tensor(4), PAIR, B)
        named = torch.tensor_split(given, tensor_indices_or_sections=where)
        return [[value(t) for t in made] for made in (given.tensor_split(where), given.tensor_split(count), named)]

    by_index, by_count, by_name = on(two, run)
    for made, wanted in ((by_index, x.tensor_split([2, 3])), (by_count, x.tensor_split(4)), (by_name, by_index)):
        for part, want in zip(made, wanted, strict=True):
            torch.testing.assert_close(part, want)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch does not have it")
def test_losses_that_are_computed_in_chunks_have_gradients(two: ThreadRanks) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    target, seed = torch.tensor([0, 4, 2, 1]), torch.randn(4)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)

    def losses(x: Tensor, w: Tensor, target: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        made = F.linear_cross_entropy(x, w, target, reduction="none", options=options)
        return made.detach(), *torch.autograd.grad(made, (x, w), seed)

    def run() -> list[Tensor]:
        given = [spread(t, PAIR, sbp) for t, sbp in ((x, S(0)), (w, S(1)), (target, S(0)), (seed, B))]
        return [value(t) for t in losses(*given)]

    for found, wanted in zip(on(two, run), losses(x, w, target, seed), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_rows_need_no_offsets_where_they_are_of_one_size(two: ThreadRanks, mode: str) -> None:
    torch.manual_seed(0)
    rows, table = torch.randint(10, (5, 5)), torch.randn(10, 4, requires_grad=True)

    def bags(rows: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        made = F.embedding_bag(rows, table, mode=mode)
        return made.detach(), *torch.autograd.grad(made.square().sum(), table)

    def run() -> list[Tensor]:
        with pytest.raises(LayoutError, match="plain tensor of shape"):
            F.embedding_bag(rows, spread(table, PAIR, B), mode=mode)
        return [value(t) for t in bags(spread(rows, PAIR, S(0)), spread(table, PAIR, S(0)))]

    for found, wanted in zip(on(two, run), bags(rows, table), strict=True):
        torch.testing.assert_close(found, wanted)
