"""Scripts that look at what optimizers keep of parameters, add to it and move it, do as in eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError, StateError
from scripts.optimizer_state import KINDS, PAIRS, cases, difference
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "optimizer_state.py"


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_what_an_optimizer_keeps_is_there_when_it_is_in_pytorch(case: str, kind: str) -> None:
    assert difference(case, kind, "one device") < 1e-9


@pytest.mark.slow
def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["data", "tensor", "zero 3", "pipeline"], how)


def test_two_optimizers_that_would_step_with_the_same_memory_are_refused() -> None:
    model = nn.Linear(4, 2)
    one, other = KINDS["SGD"](model.parameters()), KINDS["SGD"](model.parameters())

    @flow.global_function
    def step(x: Tensor, first: bool) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        (one if first else other).step()
        model.zero_grad()
        return loss  # type: ignore[no-any-return]

    step(torch.ones(8, 4), True)
    other.state = one.state
    step(torch.ones(8, 4), False)
    with pytest.raises(StateError, match=r"share memory, .* expected: a copy"):
        step(torch.ones(8, 4), True)
    other.load_state_dict(one.state_dict())  # copies
    step(torch.ones(8, 4), True).item()


def test_a_number_that_a_step_keeps_with_the_state_of_one_of_torchs_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = KINDS["SGD"](model.parameters())

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        state = optimizer.state[model.weight]
        state["calls"] = state.get("calls", 0) + 1
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"state\['calls'\]"):
        step(torch.ones(8, 4))


def test_a_step_that_looks_at_nothing_of_the_kind_has_one_plan() -> None:
    model = nn.Linear(4, 2)
    optimizer = KINDS["Adam"](model.parameters())

    @flow.global_function
    def looks_at_nothing(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    for _ in range(3):
        looks_at_nothing(torch.ones(8, 4))
    told = [line for line in flow.explain_recompiles().splitlines() if line.startswith("looks_at_nothing, ")]
    assert told == ["looks_at_nothing, plan 1: the first call"]


def test_an_evaluation_that_reads_what_an_optimizer_keeps_is_told_what_to_do() -> None:
    model = nn.Linear(4, 2)
    optimizer = KINDS["SGD"](model.parameters())

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    @flow.global_function(type="predict")
    def look(x: Tensor) -> Tensor:
        return model(x).sum() + optimizer.state[model.weight]["momentum_buffer"].norm()  # type: ignore[no-any-return]

    step(torch.ones(8, 4))
    with pytest.raises(StateError, match=r"only jobs that train .* pass that as an argument"):
        look(torch.ones(8, 4))
