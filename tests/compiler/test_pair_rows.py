"""Elements that are taken from each row by number are looked up along the rows, and so are their gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphs import graph_of, run


def one(x: Tensor, at: Tensor) -> Tensor:
    return x[torch.arange(len(x)), at]


def several(x: Tensor, at: Tensor) -> Tensor:
    return x[torch.arange(len(x))[:, None], torch.stack([at, at - 1], 1)]


def gradient(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def step(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = function(leaf, at)
        return y, torch.autograd.grad(y.square().sum(), leaf)[0]

    return step


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (5, 4, 2, 3)])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("take", [one, several])
def test_places_in_rows_become_a_gather(take: Callable[..., Tensor], backward: bool, shape: tuple[int, ...]) -> None:
    function: Callable[..., object] = gradient(take) if backward else take
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.tensor([3, -1, 0, 2, -3])
    graph = graph_of(function, *given)
    ops = {n.op for n in graph.nodes}
    assert "aten.gather.default" in ops
    assert not ops & {"aten.index.Tensor", "aten.index_put.default"}
    expected = function(*given)
    found = run(graph, *given)
    torch.testing.assert_close(found, list(expected) if isinstance(expected, tuple) else [expected])


def test_pairs_of_other_numbers_stay_as_they_are() -> None:
    given = torch.randn(5, 4), torch.tensor([3, 1, 0, 2])
    graph = graph_of(lambda x, at: x[torch.arange(4) + 1, at], *given)
    assert "aten.index.Tensor" in {n.op for n in graph.nodes}
    torch.testing.assert_close(run(graph, *given)[0], given[0][torch.arange(4) + 1, given[1]])


def test_numbers_that_are_expanded_are_no_index() -> None:
    given = torch.arange(5.0)

    def double(x: Tensor) -> Tensor:
        return torch.vmap(lambda t: t * 2.0)(x)  # of no dim each: the number is expanded to one for each

    torch.testing.assert_close(run(graph_of(double, given), given)[0], given * 2)
