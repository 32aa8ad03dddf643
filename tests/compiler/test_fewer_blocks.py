"""A step with some of its repeated blocks left out is the step of a model that never had them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.compile import capture_step
from actorflow_compiler.graph.graph import InputKind
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.rewriting.fewer_blocks import find_blocks, with_fewer_blocks
from models import CASES, Case, small_gpt
from trained import Layout, request_of


def captured(case: Case, layout: Layout | None = None) -> Capture:
    return capture_step(request_of(case, layout or Layout(1), 8)[0])


def done(step: Capture) -> Counter[object]:
    """What ops a step does on what, and where, however values and blocks are numbered."""
    graph = step.graph
    return Counter(
        (
            n.op, n.phase, n.again, re.sub(r"\d+", "#", n.where),
            tuple(str(graph.metas[v]) for v in n.reads()), tuple(str(graph.metas[o]) for o in n.outs if o >= 0),
        )
        for n in graph.nodes
    )  # fmt: skip


def variables(step: Capture) -> list[tuple[str, str]]:
    """The kinds and shapes of the variables that a step has."""
    graph = step.graph
    inputs = (i for i in graph.inputs if i.kind == InputKind.VARIABLE)
    return sorted((step.kinds[i.name], str(graph.metas[i.value])) for i in inputs)


class Chain(nn.Module):
    """Blocks of pixels float32[n, 64] to the logits of ten digits."""

    def __init__(self, blocks: list[nn.Module], again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return self.head(x)


def layer(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))


CHAINS: dict[str, Callable[[int], nn.Module]] = {
    "layers": lambda n: Chain([layer() for _ in range(n)]),
    "computed again": lambda n: Chain([layer() for _ in range(n)], again=True),
    "running statistics": lambda n: Chain([normed() for _ in range(n)]),
    "two kinds by turns": lambda n: Chain([layer(32 if k % 2 else 16) for k in range(n)]),
    "another first": lambda n: Chain([layer(8), *(layer() for _ in range(n - 1))]),
}


@pytest.mark.parametrize(
    ("name", "keep"), [*((name, 4) for name in CHAINS if name != "two kinds by turns"), *((name, 6) for name in CHAINS)]
)
def test_a_step_with_fewer_blocks_is_that_of_a_model_with_fewer(name: str, keep: int) -> None:
    whole, short = (captured(replace(CASES["mlp"], make=lambda n=n: CHAINS[name](n))) for n in (10, keep))
    blocks = find_blocks(whole.graph)
    assert blocks.count == 10
    found = with_fewer_blocks(whole, blocks, keep)
    assert done(found) == done(short)
    assert variables(found) == variables(short)
    assert with_fewer_blocks(whole, blocks, 10).graph == whole.graph


def test_attention_and_gradients_that_are_marked_for_zero_are_no_hindrance() -> None:
    marked = Layout(2, prepare=lambda model: zero(model, stage=2))
    whole, short = (captured(replace(CASES["gpt"], make=lambda n=n: small_gpt(n)), marked) for n in (8, 4))
    found = with_fewer_blocks(whole, find_blocks(whole.graph), 4)
    assert done(found) == done(short)
    assert variables(found) == variables(short)


def test_a_norm_over_all_gradients_is_computed_of_those_that_are_left() -> None:
    whole = captured(replace(CASES["mlp"], make=lambda: CHAINS["layers"](8), clip=0.5))
    found = with_fewer_blocks(whole, find_blocks(whole.graph), 4)
    assert len(found.graph.nodes) < 0.8 * len(whole.graph.nodes)
    assert not [i.name for i in found.graph.inputs if re.search(r"blocks\.[34]\.", i.name)]


@pytest.mark.parametrize(
    "model",
    [
        lambda: Chain([layer(8 + k) for k in range(10)]),
        lambda: Chain([layer() for _ in range(5)]),
        lambda: Chain([shared := layer(), *[shared] * 9]),
    ],
    ids=["all are different", "too few", "one that is called often"],
)
def test_where_no_blocks_are_alike_none_is_left_out(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    whole = captured(replace(CASES["mlp"], make=model))
    blocks = find_blocks(whole.graph)
    assert blocks.count == 0
    assert with_fewer_blocks(whole, blocks, 4).graph is whole.graph or not blocks.runs
