"""Parts of the forward pass that the backward pass computes again: less is kept, and training stays what it was."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actorflow.auto_parallel.comparison import again_notes
from actorflow.auto_parallel.search import Choice, PlanSearch
from actorflow.auto_parallel.space import open_choices
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.compile import capture_step, fold_captured
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.ops import Meta, Phase, Ref
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.graph.graph import Graph, Input, InputKind, Node
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_compiler.rewriting.compute_again import compute_again
from actorflow_compiler.rewriting.model_parts import DividedModel, ModelPart, find_parts
from actorflow_compiler.values.variables import real_optimizer_state
from actorflow_scheduler.fewer_pieces import forecast_draft
from actorflow_scheduler.forecast import Forecast, forecast
from actorflow_scheduler.schedule import schedule
from models import CASES, DEEP_GPT, DROPOUT, NOISY, Case
from trained import Layout, request_of, train, train_eagerly

SIZE, STEPS = 8, 2


def checkpointed_loss(model: nn.Module, *batch: Tensor) -> Tensor:
    """The loss of a GPT whose first two blocks are the user's own checkpoints."""
    forward = {block: block.forward for block in model.blocks[:2]}
    for block, run in forward.items():
        block.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
    try:
        return DEEP_GPT.loss(model, *batch)
    finally:
        for block in forward:
            del block.forward


class TiedFrozen(nn.Module):
    """Pixels to logits, with one weight used twice and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.frozen, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.frozen.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.shared(self.frozen(self.shared(images).tanh()).relu()).sigmoid())
        return logits


MODELS = {
    "mlp": CASES["mlp"],
    "cnn": CASES["cnn"],
    "lstm": CASES["lstm"],
    "dropout": DROPOUT,
    "noisy": NOISY,
    "gpt": DEEP_GPT,
    "checkpoints": replace(DEEP_GPT, loss=checkpointed_loss),
    "tied": replace(
        CASES["mlp"],
        make=TiedFrozen,
        optimizer=lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3),
    ),
}
LAYOUTS = {
    "one device": Layout(1),
    "micro-batches": Layout(1, 2),
    "data 2": Layout(2),
    "data 2, micro-batches": Layout(2, 2),
    "pipeline 2": Layout(2, 4, pipeline=True),
    "pipeline 2 that keeps nothing": Layout(2, 4, pipeline=True, variant=Variant(recompute=True)),
    "ZeRO 3": Layout(2, 2, prepare=lambda model: zero(model, stage=3)),
}


@functools.cache
def expected(name: str, pieces: int) -> tuple[list[float], dict[str, Tensor]]:
    return train_eagerly(MODELS[name], [SIZE] * STEPS, pieces)


def computing_again(captured: Capture, share: float) -> Capture:
    """The step that computes a share of its parts again."""
    parts = find_parts(captured.graph)
    chosen = parts.order[: math.ceil(share * len(parts.order))]
    assert bool(chosen) == bool(share)
    return replace(captured, graph=compute_again(captured.graph, parts, chosen))


def planned(captured: Capture, request: StepRequest, layout: Layout) -> Plan:
    step = fold_captured(captured, request, runs=True)
    return schedule(step.cut if layout.variant is None else step.cut(layout.variant), CPU_CORE)


def trained(case: Case, layout: Layout, share: float) -> tuple[list[float], dict[str, Tensor]]:
    request, optimizer = request_of(case, layout, SIZE)
    plan = planned(computing_again(capture_step(request), share), request, layout)
    state = request.step.state
    values = {h.name: h.tensor.detach().clone() for h in state.held.values()} | real_optimizer_state(state)
    for v in plan.variables:
        values.setdefault(v.name, torch.zeros(v.shape, dtype=getattr(torch, v.dtype)))
    return train(case, plan, values, optimizer, [SIZE] * STEPS)


CHEAP = {("dropout", "data 2, micro-batches"), ("tied", "pipeline 2 that keeps nothing")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in CHEAP else pytest.mark.slow)
        for name in MODELS
        for layout in LAYOUTS
        if name not in ("lstm", "noisy", "tied") or "ipeline" not in layout or (name, layout) in CHEAP
    ],
)
def test_computing_parts_again_trains_as_the_same_plan_without(name: str, layout: str) -> None:
    case, laid = MODELS[name], LAYOUTS[layout]
    if laid.pipeline and name == "tied":
        case = replace(case, stages=("shared|frozen", "head"))
    plain = trained(case, laid, 0)
    for share in (1.0,) if (name, layout) in CHEAP else (0.5, 1.0):
        losses, state = trained(case, laid, share)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain[0]), rtol=1e-6, atol=0)
        torch.testing.assert_close(state, plain[1], rtol=1e-5, atol=1e-7)
    if name not in ("dropout", "noisy"):
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(expected(name, laid.micro_batches)[0]), rtol=2e-5, atol=1e-6
        )


@pytest.mark.parametrize("case", [CASES["gpt"], pytest.param(DEEP_GPT, marks=pytest.mark.slow)], ids=["2", "4"])
def test_the_more_parts_are_computed_again_the_less_is_kept(case: Case) -> None:
    layout = Layout(1)
    request, _ = request_of(case, layout, SIZE)
    captured = capture_step(request)
    found = [
        forecast(planned(computing_again(captured, share), request, layout), CPU_CORE) for share in (0.0, 0.5, 1.0)
    ]
    none, half, every = (sum(r.registers + r.workspace for r in one.ranks) for one in found)
    assert every < 0.55 * none
    assert every < half < none
    assert found[0].period < found[1].period < found[2].period < 1.4 * found[0].period


def test_parts_begin_where_least_is_handed_on_and_all_but_equal_ones_are_far_apart() -> None:
    request, _ = request_of(CASES["gpt"], Layout(1), SIZE)
    parts = find_parts(capture_step(request).graph)
    names = [part.name for part in parts.parts]
    assert names == sorted(names, key=names.index)
    assert any(name.startswith(("model.blocks.1", "blocks.1")) for name in names)
    hidden = SIZE * 32 * 32 * 4  # bytes of activations between blocks
    blocks = list(parts.parts[1:-1])
    assert all(part.kept - part.saved <= hidden for part in blocks)
    assert sorted(parts.order) == [k for k, part in enumerate(parts.parts) if part.saved > 0.01 * parts.kept]
    first, second = sorted(parts.order[:2])
    assert second - first > 1


def chain(updates: bool, random: bool = False) -> tuple[Graph, DividedModel]:
    """A graph x → a → b, of which the backward pass reads a and b."""
    op = "aten.bernoulli.default" if random else "aten.tanh.default"
    nodes = (
        Node(op, (Ref(0),), (), (2,), visit=0),
        Node("aten.add.Tensor", (Ref(2), Ref(1)), (), (3,), visit=0),
        Node("aten.mul.Tensor", (Ref(3), Ref(2)), (), (4,), phase=Phase.BACKWARD, visit=0),
        Node("aten.add.Tensor", (Ref(1), Ref(4)), (), (5,), phase=Phase.FORWARD if updates else Phase.OPTIMIZER),
    )
    inputs = (Input(0, "x", InputKind.BATCH), Input(1, "w", InputKind.VARIABLE))
    graph = Graph(inputs, nodes, {v: Meta((4,), "float32") for v in range(6)}, (4,), ((1, 5),))
    return graph, DividedModel((ModelPart(0, 32, 32),), (0,))


@pytest.mark.parametrize(
    ("made", "again"),
    [
        (lambda: chain(updates=False), ["aten.tanh.default", "aten.add.Tensor"]),
        (lambda: chain(updates=True), ["aten.tanh.default"]),  # what the forward pass changes may have moved on
        (lambda: chain(updates=False, random=True), ["aten.add.Tensor"]),  # other numbers would be drawn
    ],
    ids=["plain", "moving", "random"],
)
def test_ops_are_repeated_that_give_the_same_again(
    made: Callable[[], tuple[Graph, DividedModel]], again: list[str]
) -> None:
    graph, parts = made()
    assert compute_again(graph, parts, ()) is graph
    found = compute_again(graph, parts, (0,))
    assert [n.op for n in found.nodes if n.again] == again
    (read,) = (n for n in found.nodes if n.op == "aten.mul.Tensor")
    copied = {o for n in found.nodes if n.again for o in n.outs}
    assert len(copied & set(read.reads())) == len(again)


# ---- the choice


class Deep(nn.Module):
    """Pixels float32[n, 64] to logits through layers that keep far more than their parameters take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images.view(-1, 16, 4)
        for layer in self.layers:
            x = layer(x).tanh().exp().sigmoid()
        logits: Tensor = self.head(x.flatten(1))
        return logits


DEEP = replace(CASES["mlp"], make=Deep)


def chosen(budget: float | None) -> tuple[PlanSearch, Choice]:
    request, _ = request_of(DEEP, Layout(1, goal=goal_of("auto", budget)), 64)
    captured = capture_step(request)
    choices = open_choices(captured, request, micro_batches=False, budget=budget)
    search = PlanSearch(captured, request, choices, foreseen, budget, beside=False)
    return search, search.run()


def foreseen(captured: Capture, request: StepRequest, name: ScheduleName) -> tuple[Forecast, int]:
    return forecast_draft(fold_captured(captured, request).cut, CPU_CORE, None, name)


def test_one_device_computes_no_more_parts_again_than_its_memory_demands() -> None:
    free = chosen(None)[1]
    assert free.best.strategy.again == (0, 0)
    assert again_notes(free) == ()
    assert chosen(1.3 * free.best.nbytes)[1].best.strategy.again == (0, 0)
    search, choice = chosen(0.8 * free.best.nbytes)
    count, of = choice.best.strategy.again
    assert str(choice.best.strategy) == f"{count} of {of} parts computed again"
    assert choice.best.nbytes <= 0.8 * free.best.nbytes
    assert all(c.refused for c in choice.others if c.strategy.again < choice.best.strategy.again)
    assert any(n.again for n in choice.captured.graph.nodes)
    (note,) = again_notes(choice)
    assert note.startswith(f"the backward pass computes {count} of {of} parts of the forward pass again")
    assert all(search.parts.parts[k].name in note for k in search.parts.order[:count])
    with pytest.raises(LayoutError, match=f"{of} parts computed again"):
        chosen(0.1 * free.best.nbytes)
