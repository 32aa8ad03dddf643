"""Axes for experts and for the sequence are tried where a step has what they split, and train as the eager script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from actorflow.auto_parallel.estimate import StepProfile
from actorflow.auto_parallel.follow import following
from actorflow.auto_parallel.search import PlanSearch
from actorflow.auto_parallel.space import marked_for_zero, open_choices
from actorflow.auto_parallel.strategy import Strategy
from actorflow_compiler.compile import capture_step, fold_captured
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.sbp import B
from actorflow_compiler.hints.goal import ParallelMode, goal_of
from actorflow_compiler.values.variables import real_optimizer_state
from actorflow_scheduler.fewer_pieces import forecast_draft
from actorflow_scheduler.schedule import schedule
from models import CASES, Batch, Case
from trained import Layout, in_float64, request_of, train, train_eagerly

LENGTH, WIDTH, HEADS, STEPS = 64, 8, 2, 2
EXPERT, SEQUENCE = ParallelMode.EXPERT, ParallelMode.SEQUENCE


class Mixture(nn.Module):
    """Rows float32[n, 8], which every expert sees, to one number each."""

    def __init__(self, experts: int = 4, inner: int = 32) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts), nn.Linear(WIDTH, 1)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, inner) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        said = torch.bmm(torch.bmm(x.expand(len(self.up), -1, -1), self.up).relu(), self.down)
        out: Tensor = self.last(x + torch.einsum("te,etd->td", self.router(x).softmax(-1), said))
        return out


class Attentive(nn.Module):
    """Features float32[n, length, 8] to one number for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = self.last(x + self.out(seen))
        return out


def rows(sizes: Sequence[int]) -> list[Batch]:
    """Batches of rows, and what is to be said of each."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, WIDTH, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def features(sizes: Sequence[int]) -> list[Batch]:
    """Batches of sequences, and what is to be said of each position."""
    generator = torch.Generator().manual_seed(0)
    shapes = [((n, LENGTH, WIDTH), (n, LENGTH, 1)) for n in sizes]
    return [(torch.randn(x, generator=generator), torch.randn(y, generator=generator)) for x, y in shapes]


def _adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


MIXTURE = in_float64(Case(Mixture, _adamw, rows, ("", ""), loss=_squares))
THREE_EXPERTS = in_float64(Case(lambda: Mixture(3), _adamw, rows, ("", ""), loss=_squares))
ATTENTIVE = in_float64(Case(Attentive, _adamw, features, ("", ""), loss=_squares))


def search_of(
    case: Case, world: int, size: int, budget: float | None = None
) -> tuple[PlanSearch, torch.optim.Optimizer]:
    request, optimizer = request_of(case, Layout(world, goal=goal_of("auto", budget)), size)
    captured = capture_step(marked_for_zero(request))
    choices = open_choices(captured, request, micro_batches=True, budget=budget)
    foreseen = lambda c, r, name: forecast_draft(fold_captured(c, r).cut, CPU_CORE, None, name)  # noqa: E731
    search = PlanSearch(captured, request, choices, foreseen, budget, beside=False)
    search._estimated()
    return search, optimizer


def axes_of(search: PlanSearch) -> set[str]:
    return {str(replace(s, zero=None, micro_batches=1, again=(0, 0))) for s in search.estimates if special(s)}


def special(strategy: Strategy) -> bool:
    return bool({EXPERT, SEQUENCE} & set(strategy.modes))


@pytest.mark.parametrize(
    ("case", "world", "size", "expected"),
    [
        pytest.param(MIXTURE, 2, 4, {"expert 2"}, marks=pytest.mark.slow),
        (MIXTURE, 4, 4, {"expert 4", "data 2, expert 2", "2 stages, expert 2"}),
        (THREE_EXPERTS, 4, 4, {"data 2, expert 2", "2 stages, expert 2"}),  # four devices have no expert each
        (ATTENTIVE, 2, 4, set()),  # there are samples for all devices
        (ATTENTIVE, 2, 1, {"sequence 2"}),
        pytest.param(  # a sample is for one device or divided itself
            ATTENTIVE, 4, 1, {"sequence 4", "2 stages, sequence 2"}, marks=pytest.mark.slow
        ),
        (ATTENTIVE, 4, 2, {"sequence 4", "data 2, sequence 2", "2 stages, sequence 2"}),
        (CASES["mlp"], 4, 1, set()),
        pytest.param(CASES["cnn"], 4, 1, set(), marks=pytest.mark.slow),
    ],
    ids=[
        "experts 2",
        "experts 4",
        "three experts",
        "enough samples",
        "one sample",
        "one sample 4",
        "two samples",
        "mlp",
        "cnn",
    ],
)
def test_special_axes_are_tried_where_there_is_something_to_split(
    case: Case, world: int, size: int, expected: set[str]
) -> None:
    assert axes_of(search_of(case, world, size)[0]) == expected


def test_a_sample_that_takes_half_of_the_memory_is_split_along_its_sequence() -> None:
    activations = StepProfile.of(search_of(ATTENTIVE, 2, 4)[0].captured, CPU_CORE).activations
    assert axes_of(search_of(ATTENTIVE, 2, 4, budget=activations / 4 * 1.9)[0]) == {"sequence 2"}
    assert not axes_of(search_of(ATTENTIVE, 2, 4, budget=activations / 4 * 2.1)[0])


CHEAP = {("experts", 2, 0)}  # test_sequence_axis.py trains with a sequence that is split
GIVEN = {"experts": (MIXTURE, 4), "sequence": (ATTENTIVE, 1)}


@pytest.mark.parametrize(
    ("name", "world", "number"),
    [
        pytest.param(name, world, number, marks=() if (name, world, number) in CHEAP else pytest.mark.slow)
        for name in GIVEN
        for world in (2, 4)
        for number in range(6)
    ],
)
def test_strategies_with_special_axes_train_as_the_eager_script_does(name: str, world: int, number: int) -> None:
    case, size = GIVEN[name]
    search, optimizer = search_of(case, world, size)
    every = sorted(filter(special, search.estimates))
    strategy = every[number * len(every) // 6]
    request = search.request_of(strategy)
    step = fold_captured(search.captured_for(strategy), request, runs=True)
    plan = schedule(step.cut, CPU_CORE)
    state = request.step.state
    values = {h.name: h.tensor.detach().clone() for h in state.held.values()} | real_optimizer_state(state)
    for v in plan.variables:
        values.setdefault(v.name, torch.zeros(v.shape, dtype=getattr(torch, v.dtype)))
    losses, found = train(case, plan, values, optimizer, [size] * STEPS)
    expected, parameters = train_eagerly(case, [size] * STEPS, 1)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-6, atol=1e-9)


def test_many_large_experts_are_shared_where_their_copies_do_not_fit() -> None:
    case = in_float64(Case(lambda: Mixture(8, 512), _adamw, rows, ("", ""), loss=_squares))
    search, _ = search_of(case, 2, 4)
    every = {
        str(s): search.compare(s) for s in search.estimates if s.stages == 1 and s.micro_batches == 1 and not s.zero
    }
    held = {name: every[name].nbytes for name in ("data 2", "expert 2")}
    assert held["expert 2"] < 0.6 * held["data 2"]
    estimated = {str(s): e.nbytes for s, e in search.estimates.items()}
    assert estimated["expert 2"] < 0.6 * estimated["data 2"]


def test_a_later_plan_keeps_rows_with_their_experts() -> None:
    search, _ = search_of(MIXTURE, 2, 4)
    request = search.request_of(next(s for s in search.estimates if s.modes == (EXPERT,) and not s.zero))
    step = fold_captured(search.captured, request, runs=True)
    fixed = {v.name: v for v in schedule(step.cut, CPU_CORE).variables}
    later = replace(search.request, history=replace(search.request.history, fixed=fixed))
    assert following(search.captured, later).preferences.goal.modes == (EXPERT,)
    whole = {name: replace(v, sbp=(B,)) for name, v in fixed.items()}
    later = replace(later, history=replace(later.history, fixed=whole))
    assert following(search.captured, later).preferences.goal.modes == (ParallelMode.AUTO,)
