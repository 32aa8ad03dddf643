"""Ranks that have made a tensor in different ways learn of it when they exchange it; what one does alone is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import actorflow as flow
from actorflow.eager.current import comparing_ops, current
from actorflow.eager.lineage import _codes, code_of_value
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.placement import Placement

LINE, FIRST, LAST = Placement("cpu", (0, 1), (2,)), Placement("cpu", (0,), (1,)), Placement("cpu", (1,), (1,))
ROWS = {"placement": LINE, "sbp": flow.sbp.split(0)}
WHOLE = {"placement": LINE, "sbp": flow.sbp.broadcast}


@pytest.fixture(scope="module")
def ranks() -> Iterator[ThreadRanks]:
    with ThreadRanks(2) as made:
        yield made


def me() -> int:
    return current().rank


def of_weights(loss: Callable[[Tensor], Tensor]) -> float:
    w = flow.ones(4, 2, **WHOLE).requires_grad_()
    loss(w * flow.ones(4, 2, **ROWS)).backward()
    assert w.grad is not None
    return w.grad.sum().item()


def by_steps(rate: float, kind: Any = torch.optim.SGD, **options: Any) -> float:
    w = flow.ones(4, **ROWS).requires_grad_()
    optimizer = kind([w], lr=rate, **options)
    for _ in range(2):
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step()
    return w.sum().item()


def changed(change: Callable[[Any], Any], **where: Any) -> float:
    x: Any = torch.nn.Parameter(flow.ones(4, 4, **(where or ROWS)), requires_grad=False)
    change(x)
    return x.to_global(sbp=flow.sbp.split(1)).sum().item()


def drawn(seed: int) -> float:
    state = current().generator
    assert state is not None
    before = state.get_state()
    for _ in range(5):
        F.dropout(flow.ones(4, **ROWS))  # what is drawn is compared at the 1st, 2nd, 4th, 8th … time
    state.manual_seed(seed)
    found = F.dropout(flow.ones(64, **ROWS))
    state.set_state(before)
    return found.sum().item()


def by_autograd(factor: int) -> float:
    w = flow.ones(4, 2, **WHOLE).requires_grad_()
    (g,) = torch.autograd.grad((w * flow.ones(4, 2, **ROWS) * factor).sum(), [w])
    return g.sum().item()


# each gives the same on both ranks for one number, and must not give two values for two
DIFFER: dict[str, Callable[[int], Any]] = {
    "a constructor's size": lambda n: flow.ones(2 + n, **ROWS).sum().item(),
    "a constructor's value": lambda n: flow.full((4,), n, **ROWS).sum().item(),
    "the ends of arange": lambda n: flow.arange(n, 4.0 + n, **ROWS).sum().item(),
    "an end of linspace": lambda n: flow.linspace(0, 1 + n, 5, **ROWS).sum().item(),
    "a bound of random numbers": lambda n: flow.randint(0, 5 + n, (4,), **ROWS).sum().item(),
    "a factor": lambda n: (flow.ones(4, **ROWS) * (1 + n)).sum().item(),
    "a float": lambda n: (flow.ones(4, **ROWS) * (0.5 + n)).sum().item(),
    "a negative dim": lambda n: flow.ones(4, 4, 4, **ROWS).cumsum(-1 - n).square().sum().item(),
    "a probability": lambda n: F.dropout(flow.ones(64, **ROWS), 0.1 + 0.5 * n).sum().item(),
    "an op": lambda n: (flow.ones(4, **ROWS).exp() if n else flow.ones(4, **ROWS).sin()).sum().item(),
    "a function": lambda n: [F.gelu, F.silu][n](flow.ones(4, **ROWS)).sum().item(),
    "an argument of a function": lambda n: F.gelu(flow.ones(4, **ROWS), approximate=["none", "tanh"][n]).sum().item(),
    "the reduction of a loss": lambda n: of_weights(lambda x: x.sum() if n else x.mean()),
    "a rate": lambda n: by_steps(0.25 + 0.25 * n),
    "a value written by a mask": lambda n: flow.ones(4, **ROWS).masked_fill_(flow.ones(4, **ROWS) > 0, n).sum().item(),
    "a value written into a column": lambda n: changed(lambda x: x.__setitem__((slice(None), 1), 2.0 + n)),
    "a row that is written to": lambda n: changed(lambda x: x.__setitem__(n, 5.0), **WHOLE),
    "a row of another rank that is written to": lambda n: changed(lambda x: x[3 * n].zero_()),
    "a part that is added to": lambda n: changed(lambda x: x.narrow(1, n, 1).add_(1)),
    "a change through a view of a view": lambda n: changed(lambda x: x[1:][n][2:].mul_(3), **WHOLE),
    "a change past autograd": lambda n: changed(lambda x: x.data.mul_(2 + n)),
    "a change of what was detached": lambda n: changed(lambda x: x.detach().mul_(2 + n)),
    "a list of indices": lambda n: flow.rand(4, 4, **WHOLE)[[0, n]].to_global(sbp=flow.sbp.split(1)).sum().item(),
    "an imaginary part": lambda n: (
        (flow.ones(4, **ROWS) * complex(0, 1 + n)).abs().to_global(sbp=flow.sbp.split(0)).sum().item()
    ),
    "a large float": lambda n: (flow.ones(4, **ROWS) * (1e7 * (1 + n))).sum().item(),
    "infinity": lambda n: flow.ones(4, **ROWS).clamp_(max=[2.0, float("inf")][n]).sum().item(),
    "a plain number": lambda n: (flow.ones(4, **ROWS) * torch.tensor(1 + n)).sum().item(),
    "a seed": drawn,
    "a rate of Adam": lambda n: by_steps(0.001 * (1 + n), torch.optim.Adam),
    "a rate of a fused optimizer": lambda n: by_steps(0.001 * (1 + n), torch.optim.AdamW, fused=True),
    "momentum": lambda n: by_steps(0.1, momentum=0.5 + 0.25 * n),
    "a number of times": lambda n: sum([flow.ones(4, **ROWS)] * (1 + n), start=flow.zeros(4, **ROWS)).sum().item(),
    "a gradient's factor": lambda n: by_autograd(1 + n),
    "one of several outputs": lambda n: flow.rand(4, 4, **ROWS).chunk(2, 1)[n].sum().item(),
}


@pytest.mark.parametrize("what", DIFFER)
def test_ranks_that_have_made_a_tensor_in_different_ways_are_told(ranks: ThreadRanks, what: str) -> None:
    make = DIFFER[what]
    one, other = ranks.run(lambda: make(1))
    assert one == other
    with pytest.raises(CallError, match="exchange tensors that they have made in different ways") as told:
        ranks.run(lambda: make(me()))
    assert "ACTORFLOW_CHECK_MISMATCH=1" in str(told.value)
    assert {line.split(" is in ")[0].strip() for line in str(told.value).splitlines()[1:]} == {"rank 0", "rank 1"}


def test_in_the_checking_mode_the_number_that_differs_is_shown(ranks: ThreadRanks) -> None:
    def factor() -> None:
        with comparing_ops():
            _ = flow.ones(4, **ROWS) * (2 + me())

    with pytest.raises(CallError, match="about to run different ops") as told:
        ranks.run(factor)
    assert [line.rpartition("; ")[2] for line in str(told.value).splitlines()[1:]] == ["2)", "3)"]

    def size() -> None:
        with comparing_ops():
            flow.ones(2 + me(), **ROWS)

    with pytest.raises(CallError, match=r"rank 1: flow\.ones\(1\): float32\[3\]"):
        ranks.run(size)

    def before() -> None:
        x = flow.ones(4, **ROWS) * (2 + me())
        with comparing_ops():
            x.relu()

    with pytest.raises(CallError, match="made in different ways, before ops were compared"):
        ranks.run(before)


# ---- what a rank does for itself


def trained(first: Callable[[Tensor, Tensor], Any]) -> list[float]:
    """Gradients and results of a small model; ``first`` is called on rank 0 only, and exchanges nothing."""
    w, b = (flow.ones(*s, **WHOLE).requires_grad_() for s in ((4, 2), (2,)))
    x = flow.randn(4, 2, **ROWS)
    seen = []
    for _ in range(3):
        if me() == 0:
            first(w, x)
        y = F.layer_norm(F.gelu(w * x + b), [2]).square().clone()
        y.mean().backward()
        assert w.grad is not None
        seen += [w.grad.sum().item(), y.sum().item(), (w.grad + 1).to_global(sbp=flow.sbp.split(1)).sum().item()]
    return seen


def seen_by_a_hook(w: Tensor, x: Tensor) -> None:
    kept: list[Tensor] = []
    w.register_hook(kept.append)  # who keeps a gradient makes autograd copy it


def looked_at(w: Tensor, x: Tensor) -> None:
    """Hooks make views of what they are given, and those of saved tensors let nothing run on the parts at once."""
    module = torch.nn.Sequential(torch.nn.GELU(), torch.nn.LayerNorm(2, elementwise_affine=False))
    module.register_full_backward_hook(lambda *a: None)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        module(x.detach().requires_grad_()).sum().backward()


ALONE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "computes with them": lambda w, x: (w * x + 5, F.gelu(w * x), F.layer_norm((w * x).detach(), [2])),
    "goes backward": lambda w, x: F.layer_norm(F.gelu(x.detach().clone().requires_grad_() * 2), [2]).sum().backward(),
    "keeps gradients": seen_by_a_hook,
    "prints them": lambda w, x: (str(w), repr(x), w.to_local().sum().item()),
    "copies them": lambda w, x: (w.detach().clone().mul_(5), x.clone().add_(w)),
    "counts in large floats": lambda w, x: (x * 1e7, w * float(2**20)),
    "changes copies": lambda w, x: (w.detach().clone()[0].mul_(3), x.clone().data.zero_()),
    "looks at its modules": looked_at,
    "drops nothing of them": lambda w, x: (F.dropout(x, 0.0), F.dropout(w, 0.5, training=False)),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_a_rank_computes_for_itself_concerns_no_other(ranks: ThreadRanks, what: str) -> None:
    def on_a_rank(first: Callable[[Tensor, Tensor], Any]) -> list[float]:
        flow.manual_seed(3)
        return trained(first)

    expected = ranks.run(lambda: on_a_rank(lambda w, x: None))
    assert ranks.run(lambda: on_a_rank(ALONE[what])) == expected


def test_an_op_that_may_draw_and_does_not_is_the_same_at_each_call(ranks: ThreadRanks) -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def on_a_rank() -> list[int]:
        F.dropout(flow.ones(4, **ROWS))  # a number was drawn before
        q, k, v = (flow.ones(2, 2, 3, 4, **ROWS) for _ in range(3))
        return [op(q, k, v)[0]._lineage for _ in range(3)]

    for found in ranks.run(on_a_rank):
        assert len({*found}) == 1


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "x + y": lambda x, y: x + y,
    "x - 2": lambda x, y: x - 2,
    "2 / x": lambda x, y: 2 / x,
    "x * 0.5": lambda x, y: x * 0.5,
    "x ** 2": lambda x, y: x**2,
    "-x": lambda x, y: -x,
    "x @ y": lambda x, y: x @ y.t(),
    "x > y": lambda x, y: (x > y).to(torch.float32),
    "view": lambda x, y: x.view(2, 2, 4),
    "same view": lambda x, y: x.view(4, 4),
    "row": lambda x, y: x[1],
    "column": lambda x, y: x[:, 1],
    "slice": lambda x, y: x[1:3],
    "all of it": lambda x, y: x[:],
    "mask": lambda x, y: x.masked_fill(y > 0, 1.0),
    "chunk": lambda x, y: x.chunk(2, 1)[1],
    "unbind": lambda x, y: x.unbind(1)[2],
    "permute": lambda x, y: x.permute(1, 0).contiguous(),
    "expand": lambda x, y: x.unsqueeze(0).expand(3, 4, 4),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, y]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "sum": lambda x, y: x.sum(1, keepdim=True),
    "mean": lambda x, y: x.mean(),
    "max": lambda x, y: x.max(1).values,
    "topk": lambda x, y: x.topk(2, 1)[0],
    "cumsum": lambda x, y: x.cumsum(0),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "linear": lambda x, y: F.linear(x, y, y[0]),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "softmax": lambda x, y: x.softmax(1),
    "layer norm": lambda x, y: F.layer_norm(x, [4]),
    "mse loss": lambda x, y: F.mse_loss(x, y),
    "cross entropy": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "attention": lambda x, y: F.scaled_dot_product_attention(x.view(1, 4, 4), y.view(1, 4, 4), y.view(1, 4, 4)),
    "in place": lambda x, y: x.clone().add_(y).mul_(2).clamp_(max=1.0),
    "in place on a view": lambda x, y: [z := x.clone(), z[:, 1].add_(1), z[2].zero_()][0],
    "of data": lambda x, y: [z := x.clone(), z.data.mul_(3)][0],
    "to float64": lambda x, y: x.double(),
    "to another layout": lambda x, y: x.to_global(sbp=flow.sbp.broadcast) + 1,
    "zeros like": lambda x, y: torch.zeros_like(x) + x.new_ones(4, 4),
    "copied over": lambda x, y: torch.empty_like(x).copy_(y),
}


def test_a_lineage_says_nothing_of_how_a_call_was_carried_out() -> None:
    def lineages(call: Callable[[Any, Any], Any]) -> list[int]:
        found = []
        for again in range(8):
            x, y = (flow.full((4, 4), 0.5 + n, **(ROWS if again % 2 else WHOLE)) for n in range(2))
            x, y = (t.to_global(**ROWS).requires_grad_(again in (2, 5)) for t in (x, y))
            x, y = (t if again in (2, 5) else t.detach() for t in (x, y))
            keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
            with keep if again in (4, 5) else nullcontext(), torch.set_grad_enabled(again in (2, 5)):
                x, y = (t * 1 for t in (x, y))  # no leaves, which are not changed in place
                made = call(x, y)
            found.append((again % 2, made._lineage))
        return [len({lineage for odd, lineage in found if odd == which}) for which in range(2)]

    for name, call in CALLS.items():
        with ThreadRanks(2) as ranks:  # of whose tensors nothing is cached
            assert ranks.run(lambda call=call: lineages(call)) == [[1, 1]] * 2, name  # type: ignore[misc]


def test_a_value_that_is_overwritten_is_forgotten(ranks: ThreadRanks) -> None:
    def on_a_rank() -> float:
        x = flow.empty(4, **ROWS)
        if me() == 0:
            x.fill_(7)
        x.zero_()
        if me() == 1:
            x.mul_(3)
        x.copy_(flow.ones(4, **ROWS))
        return x.sum().item()

    assert ranks.run(on_a_rank) == [4.0, 4.0]


def test_ranks_outside_of_a_placement_may_stand_in_for_its_tensors(ranks: ThreadRanks) -> None:
    def on_a_rank() -> float:
        h = flow.ones(2, 4, placement=FIRST, sbp=flow.sbp.broadcast)
        h = (h * 2 + 1).relu() if me() == 0 else flow.empty(2, 4, placement=FIRST, sbp=flow.sbp.broadcast)
        y = h.to_global(placement=LAST, sbp=flow.sbp.broadcast) * 3
        return (y.to_global(**WHOLE) + 1).to_global(sbp=flow.sbp.split(0)).sum().item()

    assert ranks.run(on_a_rank) == [80.0, 80.0]


def test_activation_checkpointing_goes_back_as_without(ranks: ThreadRanks) -> None:
    def on_a_rank(again: bool) -> float:
        def block(x: Tensor) -> Tensor:
            return F.gelu(x * flow.ones(4, 2, **ROWS)).sum()

        return of_weights(lambda x: checkpoint(block, x, use_reentrant=False) if again else block(x))

    assert ranks.run(lambda: on_a_rank(True)) == ranks.run(lambda: on_a_rank(False))


def test_hooks_of_one_rank_change_nothing_of_the_lineages_of_a_model(ranks: ThreadRanks) -> None:
    def on_a_rank(hooks: bool) -> list[float]:
        w = flow.ones(4, 2, **WHOLE).requires_grad_()
        gelu = torch.nn.GELU()
        if hooks and me() == 0:
            gelu.register_full_backward_hook(lambda *a: None)
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with keep if hooks and me() == 0 else nullcontext():
            y = F.layer_norm(gelu(w * flow.ones(4, 2, **ROWS)), [2])
        y.square().sum().backward()
        assert w.grad is not None
        return [y.exp().sum().item(), (w.grad + 1).to_global(sbp=flow.sbp.split(1)).sum().item()]

    assert ranks.run(lambda: on_a_rank(True)) == ranks.run(lambda: on_a_rank(False))


def test_a_function_of_one_tensor_twice_is_none_of_two(ranks: ThreadRanks) -> None:
    def on_a_rank() -> float:
        x, y = flow.ones(4, 2, **ROWS), flow.zeros(4, 2, **ROWS)
        if me() == 0:
            F.mse_loss(x, x, reduction="none")
        return F.mse_loss(x, y * 3, reduction="none").sum().item()

    assert ranks.run(on_a_rank) == [8.0, 8.0]


def test_numbers_that_were_computed_may_differ_in_their_last_bits(ranks: ThreadRanks) -> None:
    def on_a_rank() -> float:
        norm = 1.2345678901 + me() * 2e-16
        return (flow.ones(4, **ROWS) / norm * float("nan")).isnan().sum().item()

    assert ranks.run(on_a_rank) == [4, 4]


def test_values_have_codes_that_differ_where_python_hashes_do_not() -> None:
    values = [
        -1, -2, 0, 1, 2, 0.1, 0.2, -0.5, "none", "tanh", torch.float32, torch.float64, [-1], [-2], (3, 4), [4, 3],
        1e7, 2e7, float("inf"), -float("inf"), 1j, 2j,
    ]  # fmt: skip
    assert len({code_of_value(v) for v in values}) == len(values)
    number = code_of_value(10**8)
    _codes.clear()
    code_of_value(1e8)
    assert code_of_value(10**8) == number, "what a rank has computed with before makes no difference"
    assert code_of_value(1 / 3) == code_of_value(2 / 3) == code_of_value(float("nan")) == code_of_value({})
