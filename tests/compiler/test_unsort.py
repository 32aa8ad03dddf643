"""What is sorted, worked on row by row and put back is done without the sort; anything else stays as it is."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actorflow_compiler.capture.unsort import unsort
from actorflow_compiler.custom_ops.grouped_mm import grouped_mm, grouped_mm_weight
from actorflow_compiler.cutting.redundant import RedundantOp, redundancy_notes
from graphs import graph_of, run

TOKENS, CHOICES, EXPERTS, WIDTH, INNER = 6, 2, 4, 8, 16  # widths that torch's grouped product takes


def order(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which expert each of the sorted rows has, where the rows come from, and where the rows of each expert end."""
    sorted_, places = torch.sort(chosen.view(-1))
    counts = torch.histc(sorted_.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return sorted_, places, counts.cumsum(0, dtype=torch.int32)


def back(y: Tensor, places: Tensor) -> Tensor:
    inverse = torch.empty_like(places)
    inverse[places] = torch.arange(len(places))
    return y[inverse].view(TOKENS, CHOICES, WIDTH).sum(1)


def experts(x: Tensor, chosen: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """As most libraries do it."""
    number, places, ends = order(chosen)
    h = torch.relu(F.grouped_mm(x[places // CHOICES], up, offs=ends) + bias[number])
    return back(F.grouped_mm(h, down, offs=ends), places)


def experts_added_up(x: Tensor, chosen: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """The rows are added where they belong, and the ends are looked up."""
    number, places, _ = order(chosen)
    ends = torch.searchsorted(number, torch.arange(EXPERTS), right=True).to(torch.int32)
    token = places // CHOICES
    h = torch.tanh(F.grouped_mm(x[token], up, offs=ends) + bias[number])
    return torch.zeros_like(x).index_put((token,), F.grouped_mm(h, down, offs=ends), accumulate=True)


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, EXPERTS - 1, (TOKENS, CHOICES), generator=generator)  # the last expert has nothing to do
    shapes = (TOKENS, WIDTH), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH), (EXPERTS, INNER)
    x, up, down, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)  # as torch wants them
    return x, chosen, up, down, bias


def gradients(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def run(x: Tensor, chosen: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, *weights)]
        y = function(leaves[0], chosen, *leaves[1:])
        return (y, *torch.autograd.grad(y.square().sum(), leaves))

    return run


@pytest.mark.parametrize("function", [experts, experts_added_up])
def test_experts_and_their_gradients_need_no_sort(function: Callable[..., Tensor]) -> None:
    graph = graph_of(gradients(function), *inputs())
    ops = [n.op for n in graph.nodes]
    assert ops.count("actorflow.grouped_mm") == 4
    assert ops.count("actorflow.grouped_mm_weight") == 2
    assert not {"aten.sort.default", "aten._grouped_mm.default", "aten.histc.default"} & set(ops)
    expected = gradients(function)(*inputs())
    for found, wanted in zip(run(graph, *inputs()), expected, strict=True):
        assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()


def test_a_sort_whose_order_is_a_result_stays() -> None:
    def step(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        found, places = keys.sort()
        return found, x[places] * 2

    given = torch.randn(5, 3), torch.randn(5)
    graph = graph_of(step, *given)
    assert "aten.sort.default" in [n.op for n in graph.nodes]
    torch.testing.assert_close(run(graph, *given), list(step(*given)))


def test_rows_that_depend_on_each_other_stay_sorted() -> None:
    def step(x: Tensor, keys: Tensor) -> Tensor:
        _, places = keys.sort()
        inverse = torch.empty_like(places)
        inverse[places] = torch.arange(len(places))
        return (x[places] * 3).cumsum(0)[inverse]

    given = torch.randn(5, 3), torch.randn(5)
    graph = graph_of(step, *given)
    assert "aten.cumsum.default" in [n.op for n in graph.nodes]
    torch.testing.assert_close(run(graph, *given)[0], step(*given))


def test_a_graph_without_a_sort_is_left_alone() -> None:
    graph = graph_of(lambda x: x.exp().sum(), torch.randn(4))
    assert unsort(graph) is graph


def test_rows_of_groups_that_are_elsewhere_are_zero_and_the_parts_add_up() -> None:
    x, chosen, up, _, _ = inputs()
    group, rows = chosen.view(-1), x.repeat_interleave(CHOICES, 0)
    whole = grouped_mm(rows, up, group, 0, EXPERTS)
    torch.testing.assert_close(whole, torch.stack([r @ up[g] for r, g in zip(rows, group, strict=True)]))
    parts = [grouped_mm(rows, up[a:b], group, a, EXPERTS) for a, b in ((0, 1), (1, 4))]
    assert (parts[0][group != 0] == 0).all()
    torch.testing.assert_close(parts[0] + parts[1], whole)
    weight = grouped_mm_weight(rows, whole, group, 0, EXPERTS, EXPERTS)
    torch.testing.assert_close(weight[1:], grouped_mm_weight(rows, whole, group, 1, 3, EXPERTS))
    assert (weight[EXPERTS - 1] == 0).all()


def test_the_ops_that_repeat_most_work_are_named() -> None:
    found = {RedundantOp("aten.mm.default", "head", True): 5.0, RedundantOp("aten.bmm.default", "", False): 10.0}
    assert redundancy_notes(found, 100.0) == (
        "15.0% of all FLOPs are done more than once: 10.0% by aten.bmm.default, which nothing splits; "
        "5.0% by aten.mm.default (head)",
    )
    assert redundancy_notes({}, 100.0) == ()
