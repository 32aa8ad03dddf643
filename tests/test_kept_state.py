"""State that a step writes in several pieces and reads again is that of eager PyTorch; what random programs found."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import actorflow as flow
from actorflow.session import compiling
from actorflow_compiler.core.errors import DeadlockError
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import place, zero
from actorflow_compiler.plan.plan import Plan
from models import Batch, Case
from trained import Layout, differences, train_eagerly, train_planned

SIZE, WIDTH, STEPS = 12, 6, 3


def batches(sizes: Sequence[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, WIDTH, generator=generator).double(), torch.arange(n) % 3) for n in sizes]


def case_of(make: type[nn.Module]) -> Case:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    return Case(lambda: make().double(), lambda m: SGD(m.parameters(), lr=0.1), batches, ("first", "head"), loss=loss)


class Net(nn.Module):
    """Two layers, with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.between(self.first(x).tanh()))
        return found

    def between(self, x: Tensor) -> Tensor:
        return x


class Cached(Net):
    """A cache of the last few activations of each sample, written at a position that moves on, and read as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(SIZE, 4, WIDTH))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def between(self, x: Tensor) -> Tensor:
        before = self.cache.mean(1)
        self.cache.index_copy_(1, self.position % 4, x.detach().unsqueeze(1))
        self.position += 1
        return x + before - 0.5 * self.cache.mean(1) + self.cache[:, 0]


class Twice(Net):
    """A buffer that is written in two places, with what is made of it in between, and read by both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        old = self.seen.mean(0)
        h = self.first(x + self.seen[0]).tanh()
        self.seen[1] = h.detach().mean(0)
        h = h * (1 + self.seen.sum(0))
        self.seen[0] = 0.5 * self.seen[0] + h.detach().mean(0)
        found: Tensor = self.head(h + self.seen[0] + old)
        return found


class Observed(nn.Module):
    """Fake quantization to 255 steps of a range that moves on with what comes; gradients pass unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        low, high = torch.aminmax(x.detach())
        self.low.copy_(self.low + 0.1 * (low - self.low))
        self.high.lerp_(high, 0.1)
        self.scale.copy_((self.high - self.low) / 255)
        steps = ((x - self.low) / self.scale).round().clamp(0, 255)
        return x + (steps * self.scale + self.low - x).detach()


class Quantized(Net):
    """Fake quantization of an activation and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.activation, self.weight = Observed(), Observed()

    def between(self, x: Tensor) -> Tensor:
        return self.activation(x) @ self.weight(self.first.weight)


LAYOUTS = {
    "one device": Layout(1),
    "data 2": Layout(2),
    "data 4, pieces": Layout(4, 2),
    "tensor 3": Layout(3, goal=goal_of("tensor", None)),
    "two stages": Layout(2, 2, pipeline=True),
    "two stages of two": Layout(4, 3, pipeline=True),
    "cut in stages": Layout(2, 2, prepare=lambda m: place(m, stages=2)),
    **{f"zero {n}": Layout(2, prepare=lambda m, n=n: zero(m, n)) for n in (1, 2, 3)},
    "zero 3, pieces": Layout(3, 2, prepare=lambda m: zero(m, 3)),
}


def check(case: Case, layout: Layout) -> None:
    expected, state = train_eagerly(case, [SIZE] * STEPS, 1)
    losses, found, _ = train_planned(case, layout, [SIZE] * STEPS)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    assert max(differences(found, {n: v for n, v in state.items() if v.numel()}).values()) < 1e-9


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [Cached, Twice, Quantized])
def test_buffers_that_are_written_and_read_again_are_those_of_one_device(make: type[nn.Module], layout: str) -> None:
    check(case_of(make), LAYOUTS[layout])


# ---- what random programs have found


@pytest.mark.parametrize("world", [2, 3])
def test_a_number_that_is_put_among_sums_counts_once(world: int) -> None:
    class Put(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            y[torch.tensor([1, 4])] = 0.25
            found: Tensor = self.head(self.first(y))
            return found

    check(case_of(Put), Layout(world))


def test_a_bias_whose_gradient_waits_for_nothing_is_not_changed_before_it_is_read() -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(WIDTH, 1)), nn.Parameter(torch.zeros(WIDTH, 1))
            self.first, self.table, self.head = nn.Linear(1, 7), nn.Embedding(7, 2), nn.Linear(2, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = x.unsqueeze(-1) * (1 + self.scale) + self.shift
            found: Tensor = self.first(h).mean() + self.head(self.table(y)).square().mean()
            return found

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = model(x, y)
        return found

    case = replace(case_of(Means), loss=loss, optimizer=lambda m: AdamW(m.parameters(), lr=0.1))
    check(case, Layout(4, 4, goal=goal_of("tensor", None)))


def test_pieces_that_a_collective_brings_are_packed_and_read_one_by_one() -> None:
    class OverBatch(Net):
        def between(self, x: Tensor) -> Tensor:
            return (x * x.softmax(0)).sum(0, keepdim=True) + x.hypot(x + 1)

    check(case_of(OverBatch), Layout(3, 4))


@pytest.mark.parametrize("layout", ["four pieces", "two stages"])
def test_a_range_over_the_batch_goes_on_from_piece_to_piece(layout: str) -> None:
    class Weighted(Net):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.first(x).cumsum(0) / torch.arange(1, SIZE + 1).view(-1, 1))
            return found

    check(case_of(Weighted), Layout(1, 4) if layout == "four pieces" else LAYOUTS[layout])


# ---- what the proof says if a plan is made that waits for ever all the same


def test_a_plan_that_would_wait_for_ever_is_our_bug_and_is_kept_for_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: object) -> Plan:
        raise DeadlockError("plan 'step' would wait for ever")

    monkeypatch.setattr(compiling, "schedule", never)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Tensor:
        return x.sin()

    with pytest.raises(DeadlockError, match=r"'step'.*bug of actorflow.*kept in .*report(.|\n)*would wait for ever"):
        float(step(torch.ones(4)).sum())
    (kept,) = tmp_path.glob("actorflow-plan-*.txt")
    assert kept.read_text().startswith("plan step: 1 rank")
