"""Random ops on global tensors give the same numbers under every layout, and again where a state is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import actorflow as flow
from actorflow.testing.thread_ranks import ThreadRanks

LINE = flow.placement("cpu", [0, 1, 2, 3])
MESH = flow.placement("cpu", [[0, 1], [2, 3]])
S, B, P = flow.sbp.split, flow.sbp.broadcast, flow.sbp.partial_sum
LAYOUTS = [(LINE, B), (LINE, S(0)), (LINE, S(1)), (LINE, P), (MESH, (S(1), S(0))), (MESH, (P, B))]

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.abs().clamp(max=1)),
    "normal_": lambda x: x.clone().normal_(2.0, 3.0),
    "uniform_": lambda x: torch.nn.init.uniform_(x.clone(), -1, 1),
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 50),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 3, replacement=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadRanks]:
    with ThreadRanks(4) as made:
        yield made


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", OPS)
def test_a_random_op_gives_the_same_under_every_layout(threads: ThreadRanks, name: str) -> None:
    values = torch.linspace(-2, 2, 30, dtype=torch.float64).view(5, 6)

    def on_a_rank(where: Any, sbp: Any) -> Tensor:
        flow.manual_seed(5)
        x = flow.tensor(values.tolist(), dtype=torch.float64, placement=where, sbp=sbp)
        return OPS[name](x).to_global(placement=LINE, sbp=B).to_local()

    expected = threads.run(lambda: on_a_rank(LINE, B))[0]
    for where, sbp in LAYOUTS:
        for found in threads.run(lambda where=where, sbp=sbp: on_a_rank(where, sbp)):
            torch.testing.assert_close(found, expected)


def test_one_device_alone_has_the_numbers_of_four(threads: ThreadRanks) -> None:
    def draw(ranks: list[int]) -> Tensor:
        flow.manual_seed(1)
        where = flow.placement("cpu", ranks)
        x = F.dropout(flow.randn(6, 4, placement=where, sbp=S(0)))
        return x.to_global(sbp=B).to_local()

    assert torch.equal(threads.run(lambda: draw([0, 1, 2, 3]))[0], draw([0]))


def test_a_checkpoint_drops_the_same_elements_when_it_computes_again() -> None:
    x = flow.ones(64, placement=flow.placement("cpu", [0]), sbp=B, requires_grad=True)
    y = checkpoint(lambda t: F.dropout(t * 2, 0.5), x, use_reentrant=False)
    y.sum().backward()
    kept = y.detach().to_local() != 0
    assert 0 < kept.sum() < 64
    assert x.grad is not None
    assert torch.equal(x.grad.to_local() != 0, kept)


def test_seeding_torch_draws_the_same_again() -> None:
    where = {"placement": flow.placement("cpu", [0]), "sbp": B}
    torch.manual_seed(3)
    first, second = flow.rand(5, **where).to_local(), flow.rand(5, **where).to_local()
    torch.manual_seed(3)
    assert torch.equal(flow.rand(5, **where).to_local(), first)
    assert not torch.equal(first, second)
