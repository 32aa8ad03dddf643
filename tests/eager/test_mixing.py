"""Plain tensors beside global ones: what torch or a global module makes counts as whole, others are errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import LayoutError
from eager.ranks import PAIR, B, S, on, spread, value

HELD, INDEX = torch.ones(5), torch.tensor([0, 1])
OUTSIDE: dict[str, Callable[[Tensor], Any]] = {
    "a variable": lambda x: x + HELD,
    "a temporary": lambda x: x + torch.ones(5),
    "an argument": lambda x: torch.add(x, torch.ones(5)),
    "an index": lambda x: x[INDEX],
    "a new index": lambda x: x[torch.tensor([0, 1])],
    "an item of a list": lambda x: torch.cat([x, torch.ones(1, 5)]),
    "in place": lambda x: x.mul_(HELD),
    "a copy": lambda x: x.copy_(torch.ones(4, 5)),
    "a weight": lambda x: F.linear(x, torch.ones(3, 5)),
    "a factor": lambda x: torch.einsum("ij,j->i", x, HELD),
    "a target": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
    "of a module": lambda x: nn.Linear(5, 2)(x),
}
INSIDE: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: x * 2 + 1.5,
    "no dims": lambda x: x + torch.tensor(2.0),
    "a list as index": lambda x: x[[0, 1]][:, [1, 2, 0]],
    "a mask of an op": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "a constant of an op": lambda x: torch.quantile(x, 0.3),
    "classes": lambda x: F.one_hot(x.long()),
    "made by torch's Python": lambda x: torch.masked.var(x, 0, mask=x > 3, unbiased=True),
    "values": lambda x: x[x > 3],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_plain_tensor_from_outside_is_an_error_that_shows_the_fix(two: ThreadRanks, name: str) -> None:
    with pytest.raises(LayoutError, match=r"write x.to_global\(placement, sbp\)"):
        two.run(lambda: OUTSIDE[name](spread(torch.arange(20.0).view(4, 5), PAIR, S(0))))


@pytest.mark.parametrize("name", INSIDE)
def test_numbers_and_what_torch_makes_inside_of_an_op_count_as_whole(two: ThreadRanks, name: str) -> None:
    wanted = INSIDE[name](torch.arange(20.0).view(4, 5))
    made = on(two, lambda: value(INSIDE[name](spread(torch.arange(20.0).view(4, 5), PAIR, S(0)))))
    torch.testing.assert_close(made, wanted, equal_nan=True)


def test_lists_of_numbers_that_compare_equal_are_calls_of_their_own(two: ThreadRanks) -> None:
    with torch.library._scoped_library("mixing", "DEF") as library:
        library.define("weighted(Tensor x, Scalar[] w) -> Tensor")
        library.impl("weighted", lambda x, w: x * w[0] + w[1], "CompositeExplicitAutograd")
        library.impl("weighted", lambda x, w: x * w[0] + w[1], "Meta")
        x = torch.arange(4)
        for weights in ([1, 2], [1, 2.0], [1, True]):
            wanted = torch.ops.mixing.weighted(x, weights)
            made = on(two, lambda w=weights: torch.ops.mixing.weighted(spread(x, PAIR, B), w))
            assert made.dtype is wanted.dtype
            torch.testing.assert_close(made.to_local(), wanted)


class _Positions(nn.Module):
    """Makes plain tensors in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 5)
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if fail:
            raise ValueError("no")
        positions = torch.arange(x.shape[0])
        mask = torch.ones(x.shape[0], 5).tril()
        return self.inner(x + self.table(positions)) * mask


def test_what_a_global_module_makes_in_its_forward_counts_as_whole(two: ThreadRanks) -> None:
    model = _Positions()
    x = torch.randn(4, 5)
    wanted = model(x).detach()

    def on_a_rank() -> Any:
        made = flow.to_global(_copy(model), PAIR, B)
        out = made(spread(x, PAIR, S(0)))
        out.sum().backward()
        with pytest.raises(ValueError, match="no"):
            made(spread(x, PAIR, S(0)), fail=True)
        with pytest.raises(LayoutError, match="plain tensor"):  # the forward is over, however it ended
            out + torch.ones(4, 5)
        return value(out), made.table.weight.grad.sbp

    out, sbp = on(two, on_a_rank)
    torch.testing.assert_close(out, wanted)
    assert sbp == (B,)


def _copy(model: _Positions) -> _Positions:
    made = _Positions()
    made.load_state_dict(model.state_dict())
    return made
