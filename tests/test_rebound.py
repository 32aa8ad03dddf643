"""What a script takes from a place that steps give other tensors stays as it was; what it puts there is read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from scripts.rebound import CASES, KINDS, Trained, cases, difference
from test_runs import actorflow
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "rebound.py"


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_a_script_holds_resets_and_restores_runs(case: Callable[[Trained], list[float]], kind: str) -> None:
    off, plans = difference(case, "micro-batches", kind)
    assert off < 1e-9
    assert plans == 1 or kind == "deque"  # which is changed in place, and is another one where the script puts one


@pytest.mark.slow
def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["data", "pipeline", "zero 3"], how)


class Remembering(nn.Module):
    """Adds what it remembers, which may need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.ones(3))
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """A value for each row."""
        h = self.begin if self.h is None else self.h
        z = torch.tanh(x * self.begin + h)
        self.h = z.mean(0).detach()
        return z


def trained(job: bool, put: Callable[[Remembering, int], None]) -> tuple[list[float], int]:
    """The losses of some calls, between which something is put where the model remembers."""
    torch.manual_seed(0)
    model = Remembering().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    step = flow.global_function(train) if job else train
    losses = []
    for i in range(8):
        put(model, i)
        losses.append(float(step(torch.linspace(-1, 1, 6).view(2, 3).double() * (i + 1))))
    return [*losses, *model.begin.detach().tolist()], len(step.plans) if job else 0  # type: ignore[attr-defined]


def nothing(model: Remembering, i: int) -> None:
    if i % 3 == 0:
        model.h = None


def of_another_shape(model: Remembering, i: int) -> None:
    model.h = torch.zeros(1, 3).double() if i == 4 else torch.zeros(3).double() if i == 0 else model.h


def changed_in_place(model: Remembering, i: int) -> None:
    if i == 0:
        model.h = torch.zeros(3).double()
    elif model.h is not None:
        model.h = model.h.detach().clone().mul_(0.5)


@pytest.mark.parametrize(("put", "worth"), [(nothing, 2), (of_another_shape, 3), (changed_in_place, 1)])
def test_whatever_is_put_there_is_what_runs(put: Callable[[Remembering, int], None], worth: int) -> None:
    wanted, _ = trained(False, put)
    found, plans = trained(True, put)
    assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < 1e-9
    assert plans <= worth


def test_models_with_such_places_are_let_go() -> None:
    def run() -> weakref.ref[nn.Module]:
        model = Remembering()
        model.h = torch.zeros(3)
        job = flow.global_function(lambda x: model(x).mean())
        kept = []
        for _ in range(3):
            job(torch.ones(2, 3))
            kept.append(model.h)
        assert len(kept) == 3
        return weakref.ref(model)

    gone = run()
    gc.collect()
    assert gone() is None


def changed_first(job: bool) -> list[float]:
    """The step changes what is there before it puts another one there; the script holds the one that was there."""
    torch.manual_seed(0)
    layer, kept, start = nn.Linear(3, 3).double(), {"h": torch.zeros(3).double()}, torch.ones(3).double()

    def step(x: Tensor) -> Tensor:
        kept["h"].mul_(0.5)
        z = torch.tanh(layer(x) + kept["h"])
        kept["h"] = z.mean(0).detach()
        return z.mean().detach()

    run = flow.global_function(step) if job else step
    out = []
    for i in range(7):
        if i % 3 == 0:
            kept["h"] = start
        before = kept["h"]
        out += [float(run(torch.ones(2, 3).double() * i)), *before.detach().tolist(), *start.detach().tolist()]
    return out


def deep_inside(job: bool) -> list[float]:
    """Tensors beside numbers, in lists and tuples of a dictionary, as a whole and one of them."""
    torch.manual_seed(0)
    layer, kept = nn.Linear(3, 3).double(), {"a": {"h": [torch.zeros(3).double(), (torch.zeros(3).double(), 3)]}}

    def step(x: Tensor) -> Tensor:
        first, (second, _) = kept["a"]["h"]  # type: ignore[misc]
        z = torch.tanh(layer(x) + first + second)
        h = z.mean(0).detach()
        kept["a"] = {"h": [h, (h * 0.5, 3)]}
        return z.mean().detach()

    run = flow.global_function(step) if job else step
    out = []
    for i in range(7):
        old = kept["a"]
        out += [float(run(torch.ones(2, 3).double() * i)), *old["h"][0].detach().tolist()]  # type: ignore[union-attr]
        if i == 2:
            kept["a"] = {"h": [torch.ones(3).double(), (torch.zeros(3).double(), 3)]}
        if i == 4:
            kept["a"] = old
        if i == 5:
            kept["a"]["h"][0] = torch.ones(3).double()
    return out


@pytest.mark.parametrize("case", [changed_first, deep_inside])
def test_what_is_changed_or_lies_deep_stays_as_it_was(case: Callable[[bool], list[float]]) -> None:
    wanted, found = case(False), case(True)
    assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < 1e-12


def test_a_rank_that_takes_a_plan_in_late_is_read_when_it_has() -> None:
    run = actorflow("run", str(SCRIPT.with_name("late_to_read.py")), "--devices", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "right\n"
