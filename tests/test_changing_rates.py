"""Rates and other settings that a step changes itself, by a scheduler or by hand, go on from call to call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError
from scripts.changing_numbers import finish, plans
from scripts.changing_rates import CASES, OPEN, SCHEDULES, Trained, cases, difference, loss_of, scheduled
from scripts.kept_gradients import batches
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "changing_rates.py"
DECAY = 3


@pytest.mark.matrix(every=16)
@pytest.mark.parametrize("case", [*CASES, *map(scheduled, SCHEDULES)], ids=lambda case: case.__name__)
def test_a_step_that_sets_rates_trains_as_eagerly(case: Callable[..., list[float]]) -> None:
    assert difference(case, "micro-batches", "AdamW") < 1e-9


@pytest.mark.parametrize(
    "case",
    [scheduled("OneCycleLR"), pytest.param(scheduled("CyclicLR"), marks=pytest.mark.slow)],
    ids=lambda case: case.__name__,
)
def test_momentum_is_a_setting_as_others(case: Callable[..., list[float]]) -> None:
    def with_momentum(t: Trained, **how: Any) -> list[float]:
        t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.05, momentum=0.9)
        return case(t, **how)

    assert difference(with_momentum, "data", "SGD") < 1e-9


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.longdouble])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_rate_may_be_any_number_of_numpys(kind: Any, optimizer: Any) -> None:
    def case(t: Trained, **how: Any) -> list[float]:
        t.optimizer = optimizer(t.model.parameters(), lr=0.05)

        def train(x: Tensor, y: Tensor) -> Tensor:
            return finish(t, loss_of(t, x, y))

        out = []
        for i, x, y in batches():
            for group in t.optimizer.param_groups:
                group["lr"] = kind(i % 3)
            out.append(t.call(train, x, y, **how))
        return out

    assert difference(case, "data", "SGD") < 1e-6  # eager Adam computes in the precision of the rate


@pytest.mark.slow
def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["tensor", "pipeline", "zero 3"], how)


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("name", OPEN)
def test_a_schedule_is_no_reason_to_compile_again(name: str) -> None:
    case = scheduled(name) if name in SCHEDULES else next(case for case in CASES if case.__name__ == name)
    trained = Trained("data", "AdamW")
    case(trained)
    assert plans(trained) <= OPEN[name]


def warm(step: int, most: int) -> float:
    return float(step + 1) / float(max(1, most)) if step < most else 1.0 / float(step)


def by_calls(step: Any, i: int) -> Any:
    return step * float(i) + int(i / 3)


def by_kind(step: Any, i: int) -> Any:
    return step * (2 if isinstance(i, float) else float(i))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("scaled", "worth"), [(by_calls, 3), (by_kind, 9)])
def test_functions_may_ask_for_floats(scaled: Callable[[Any, int], Any], worth: int) -> None:
    def case(t: Trained, **how: Any) -> list[float]:
        def train(x: Tensor, y: Tensor, i: int) -> Tensor:
            for group in t.optimizer.param_groups:
                group["lr"] = 0.1 * warm(i, DECAY)
            t.optimizer.zero_grad()
            loss = scaled(loss_of(t, x, y), i)
            loss.backward()
            t.optimizer.step()
            return loss.detach()

        found = [t.call(train, x, y, i, **how) for i, x, y in batches()]
        assert plans(t) <= worth
        return found

    assert difference(case, "data") < 1e-9
    assert "float" not in globals()


def test_factors_of_a_library_may_do_so_too() -> None:
    from transformers import get_cosine_schedule_with_warmup

    def case(t: Trained, **how: Any) -> list[float]:
        schedule = get_cosine_schedule_with_warmup(t.optimizer, 3, 12)

        def train(x: Tensor, y: Tensor) -> Tensor:
            t.optimizer.zero_grad()
            loss = loss_of(t, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            t.optimizer.step()
            schedule.step()
            return loss.detach() + schedule.get_last_lr()[0]

        found = [t.call(train, x, y, **how) for _, x, y in batches()]
        assert plans(t) <= 3
        return found

    assert difference(case, "data") < 1e-9


def test_where_numbers_are_constants_a_change_of_rates_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.global_function
    def train(x: Tensor, i: int) -> Tensor:
        loss = model(x).mean() * (1 if type(i) is int else 2)
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        return loss

    with pytest.raises(CaptureError, match=r"\['lr'\] changes from 0.1 to 0.05 in the step.*do this after the call"):
        train(torch.ones(2, 4), 1)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_loss_that_decides_a_rate_is_refused_at_its_line() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def train(decide: Callable[[Tensor], None], x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2])
        loss.backward()  # type: ignore[no-untyped-call]
        decide(loss.detach())
        optimizer.step()
        return loss.detach()

    def set_rate(loss: Tensor) -> None:
        optimizer.param_groups[0]["lr"] = loss * 0.1  # a tensor

    with pytest.raises(CaptureError, match=r"test_changing_rates.py:\d+: decide(.|\n)*the step looks at the value"):
        flow.global_function(functools.partial(train, plateau.step))(torch.ones(2, 4))
    with pytest.raises(CaptureError, match=r"test_changing_rates.py:\d+: .*\['lr'\] changes from 0.1 to a tensor"):
        flow.global_function(functools.partial(train, set_rate))(torch.ones(2, 4))


def test_a_loss_may_be_the_rate_of_the_next_step() -> None:
    def case(t: Trained, **how: Any) -> list[float]:
        def train(x: Tensor, y: Tensor) -> Tensor:
            loss = finish(t, loss_of(t, x, y))
            for group in t.optimizer.param_groups:
                group["lr"] = loss * 0.1
            return loss

        found = [t.call(train, x, y, **how) for _, x, y in batches()]
        assert plans(t) <= 2
        return found

    assert difference(case, "data", "SGD") < 1e-9


def test_hooks_of_an_optimizer_hear_of_each_step_once() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    heard = {"steps": 0}

    def hear(*_: Any) -> None:
        heard["steps"] += 1

    optimizer.register_step_pre_hook(hear)

    @flow.global_function
    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        return loss.detach() * heard["steps"]

    for _ in range(3):
        train(torch.ones(2, 4))
    assert heard["steps"] == 3
