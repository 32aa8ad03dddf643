"""``torch.utils.checkpoint`` in a user's model saves memory in a plan as it does in eager PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.graph.graph import Graph, Node, merge_equal
from actorflow_compiler.plan.variant import PLAIN
from actorflow_scheduler.timeline import simulate
from models import DEEP_GPT
from trained import Layout, train_eagerly, train_planned

LAYOUTS = {"one device": Layout(1, 4, variant=PLAIN), "pipeline 2": Layout(2, 4, pipeline=True, variant=PLAIN)}
PLAIN_GPT = DEEP_GPT  # of which a checkpoint keeps much less


def checkpointed_loss(model: nn.Module, *batch: Tensor) -> Tensor:
    """The loss of a GPT each of whose blocks is a checkpoint, which leaves out the block's own hooks."""
    forward = {block: block.forward for block in model.blocks}
    for block, run in forward.items():
        block.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
    try:
        return PLAIN_GPT.loss(model, *batch)
    finally:
        for block in forward:
            del block.forward


@pytest.mark.parametrize("layout", [pytest.param("one device", marks=pytest.mark.slow), "pipeline 2"])
def test_a_checkpointed_model_keeps_less_and_trains_alike(layout: str) -> None:
    expected, parameters = train_eagerly(PLAIN_GPT, [16] * 3, 1)
    plans = {}
    for name, case in {"plain": PLAIN_GPT, "checkpoint": replace(PLAIN_GPT, loss=checkpointed_loss)}.items():
        losses, found, plans[name] = train_planned(case, LAYOUTS[layout], [16] * 3)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
        torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)
    peaks = {name: simulate(plan, 1, CPU_CORE).peak_bytes for name, plan in plans.items()}
    assert peaks["checkpoint"][0] < 0.6 * peaks["plain"][0]
    moved = {name: dict(plan.summary.moved) for name, plan in plans.items()}
    assert moved["checkpoint"] == moved["plain"]  # each block is computed again where it was computed


def test_a_node_that_is_kept_gives_what_its_equals_gave() -> None:
    def split(first: int, second: int) -> Node:
        return Node("aten.aminmax.default", (Ref(0),), (), (first, second))

    metas = {v: Meta((), "float32") for v in range(3)}
    graph = merge_equal(Graph((), (split(1, -1), split(-1, 2)), metas, (1, 2), ()))
    assert [n.outs for n in graph.nodes] == [(1, 2)]
    assert graph.results == (1, 2)
