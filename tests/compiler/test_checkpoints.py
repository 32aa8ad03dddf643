"""``torch.utils.checkpoint`` in a user's model saves memory in a plan as it does in eager PyTorch."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from actorflow_compiler.compile import capture_step
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.graph.graph import Graph, Node, merge_equal
from actorflow_compiler.plan.variant import PLAIN
from actorflow_scheduler.timeline import simulate
from models import CASES, DEEP_GPT
from trained import Layout, request_of, train_eagerly, train_planned

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


Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]
KEPT = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def products_are_kept(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Gated(nn.Module):
    """A layer whose norm changes one of its own values in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Samples × 8 → the same."""
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        found: Tensor = x + self.down(F.silu(gate) * value)
        return found


class Layers(nn.Module):
    """Layers, each computed again but for what ``contexts`` keep."""

    def __init__(self, contexts: Contexts) -> None:
        super().__init__()
        self.contexts = contexts
        self.first, self.head = nn.Linear(64, 8), nn.Linear(8, 10)
        self.second = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Pixels float32[n, 64] → the logits of ten digits."""
        x = self.first(x)
        for layer in self.second:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts)
        found: Tensor = self.head(x)
        return found


CONTEXTS: dict[str, Contexts] = {
    "policy": partial(create_selective_checkpoint_contexts, products_are_kept),
    "list": partial(create_selective_checkpoint_contexts, list(KEPT)),
    "all again": noop_context_fn,
}


SELECTIVE_LAYOUTS = LAYOUTS | {"data 2": Layout(2, 2, variant=PLAIN)}


@pytest.mark.parametrize("layout", SELECTIVE_LAYOUTS)
@pytest.mark.parametrize("contexts", ["policy", "list"])
def test_a_selective_checkpoint_trains_as_in_eager_pytorch(contexts: str, layout: str) -> None:
    case = replace(CASES["mlp"], make=lambda: Layers(CONTEXTS[contexts]))
    expected, parameters = train_eagerly(case, [16] * 2, 1)
    losses, found, _ = train_planned(case, SELECTIVE_LAYOUTS[layout], [16] * 2)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)


def test_a_selective_checkpoint_keeps_what_it_says_and_computes_the_rest_again() -> None:
    again = {}
    for name, contexts in CONTEXTS.items():
        case = replace(CASES["mlp"], make=lambda contexts=contexts: Layers(contexts))
        again[name] = Counter(n.op for n in capture_step(request_of(case, Layout(1), 16)[0]).graph.nodes if n.again)
    products = {str(op) for op in KEPT}
    assert again["policy"] == again["list"]
    assert not products & set(again["policy"])
    assert again["policy"]["aten.silu.default"] == again["all again"]["aten.silu.default"] == 3
    assert products & set(again["all again"])


def test_a_node_that_is_kept_gives_what_its_equals_gave() -> None:
    def split(first: int, second: int) -> Node:
        return Node("aten.aminmax.default", (Ref(0),), (), (first, second))

    metas = {v: Meta((), "float32") for v in range(3)}
    graph = merge_equal(Graph((), (split(1, -1), split(-1, 2)), metas, (1, 2), ()))
    assert [n.outs for n in graph.nodes] == [(1, 2)]
    assert graph.results == (1, 2)
