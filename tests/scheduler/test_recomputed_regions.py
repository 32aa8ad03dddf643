"""What checkpoints compute again beside collectives is there for few of them at a time, and losses are the same."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.hints.hints import distribute, place
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler import portfolio
from actorflow_scheduler.cost import max_workspace_bytes
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.portfolio import Portfolio
from actorflow_scheduler.recomputed_regions import REGIONS
from actorflow_scheduler.schedule import schedule
from actorflow_scheduler.timeline import nanoseconds, simulate
from models import CASES
from trained import Layout, laid_of, train, train_eagerly

LAYERS, WIDTH, BATCH, STEPS = 6, 32, 64, 2
BUSY = replace(CPU_CORE, bytes_per_s=1e8)  # a link for which queues wait


class Layer(nn.Module):
    """Two products of which the second makes partial sums, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.up2, self.down2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.down2(torch.tanh(self.up2(x)))


class Checkpointed(nn.Module):
    """Pixels float32[n, 64] through checkpointed layers to the logits of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


CASE = replace(CASES["mlp"], make=Checkpointed)
SPLIT = {
    r".*up2?\.(weight|bias)": (None, Split(0)),
    r".*down2?\.weight": (None, Split(1)),
}


def layout(pieces: int) -> Layout:
    mesh = placement("cpu", [[0, 1]])
    return Layout(2, pieces, mesh=mesh, prepare=lambda m: distribute(m, SPLIT), hardware=BUSY)


@functools.cache
def planned(pieces: int, late: bool = True) -> Plan:
    step = laid_of(CASE, layout(pieces), BATCH)[0]
    if late:
        return schedule(step.cut(Variant()), BUSY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portfolio, "recomputed_late", lambda graph, run: ())
        return schedule(step.cut(Variant()), BUSY)


def most_layers(plan: Plan) -> int:
    """Of how many layers rank 0 holds what is computed again, at most, in the first micro-batch."""
    timeline = simulate(plan, 1, BUSY)
    held: list[tuple[float, int]] = []
    for register in plan.registers:
        makes, hidden = plan.actor(register.producer), {t.shape[-1] for t in register.tensors if t.shape}
        readers = [plan.actor(read.actor) for read in register.readers]
        if makes.rank == 0 and makes.kind == "backward" and makes.comm is None and 2 * WIDTH in hidden:
            again = all(r.kind == "backward" and r.comm is None for r in readers)
            first = [timeline.ends[r.id][0] for r in readers]
            if again and first:
                held += [(timeline.ends[makes.id][0], 1), (max(first), -1)]
    now = most = 0
    for _, change in sorted(held):
        now += change
        most = max(most, now)
    return most


def needed(plan: Plan) -> int:
    return simulate(plan, 2, BUSY).peak_bytes[0] + max_workspace_bytes(plan)[0]


@pytest.mark.parametrize("pieces", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_few_layers_are_computed_again_before_gradients_use_them(pieces: int) -> None:
    late, early = planned(pieces), planned(pieces, late=False)
    assert most_layers(early) > 3 * REGIONS
    assert most_layers(late) <= 2 * REGIONS  # a layer has two such values
    assert needed(late) < 0.8 * needed(early)
    assert forecast(late, BUSY).period <= forecast(early, BUSY).period * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2])
def test_losses_with_checkpoints_beside_collectives_are_those_of_the_eager_script(pieces: int) -> None:
    _, values, optimizer = laid_of(CASE, layout(pieces), BATCH)
    expected, _ = train_eagerly(CASE, [BATCH] * STEPS, 1)
    losses, _ = train(CASE, planned(pieces), values, optimizer, [BATCH] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_published_order_of_a_pipeline_computes_few_layers_again_at_a_time() -> None:
    mesh = [placement("cpu", [[2 * stage, 2 * stage + 1]]) for stage in range(2)]
    stages = {r"first|layers\.[0-2]": mesh[0], r"layers\.[3-5]|head": mesh[1]}

    def prepare(model: nn.Module) -> None:
        distribute(model, SPLIT)
        place(model, stages)

    step = laid_of(CASE, Layout(4, 4, prepare=prepare, hardware=BUSY), BATCH)[0]
    late = schedule(step.cut(Variant()), BUSY, name="1f1b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portfolio, "recomputed_late", lambda graph, run: ())
        early = schedule(step.cut(Variant()), BUSY, name="1f1b")
    assert needed(late) < needed(early)
    assert forecast(late, BUSY).period <= forecast(early, BUSY).period * 1.02


def test_a_step_without_checkpoints_is_ordered_as_ever() -> None:
    plan = laid_of(CASES["mlp"], Layout(2), 8)[0].cut(Variant())
    assert Portfolio(plan, nanoseconds(plan, BUSY)).recomputed == ()
