"""What a step that seeds random numbers leaves for what the script draws afterwards, against PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.script_state.seeds import call_seeds

own = torch.Generator().manual_seed(5)


def seeded(x: Tensor, n: int) -> Tensor:
    torch.manual_seed(7)
    return x * n


def by_an_argument(x: Tensor, n: int) -> Tensor:
    torch.random.manual_seed(n)
    return x * n


def through_the_generator(x: Tensor, n: int) -> Tensor:
    torch.default_generator.manual_seed(9)
    return x * n


def by_flow(x: Tensor, n: int) -> Tensor:
    flow.manual_seed(11)
    return x * n


def apart(x: Tensor, n: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        x = x + 0 * torch.rand(3)
    return x * n


@pytest.mark.parametrize("function", [seeded, by_an_argument, through_the_generator, by_flow, apart])
def test_what_is_drawn_after_a_step_that_seeds_is_what_pytorch_draws(function: Callable[[Tensor, int], Tensor]) -> None:
    def run(step: Callable[[Tensor, int], Tensor]) -> list[Any]:
        torch.manual_seed(1)
        drawn = []
        for n in (2, 3, 2, 2):
            assert step(torch.ones(3), n).tolist() == [n] * 3
            drawn.append((torch.rand(2).tolist(), torch.initial_seed()))
        return drawn

    before = call_seeds.swap((None, 0))
    try:
        expected = run(function)
        assert run(flow.global_function(type="predict")(function)) == expected
    finally:
        call_seeds.swap(before)


def test_a_step_that_seeds_all_jobs_draws_the_same_in_each_call_and_after_it() -> None:
    @flow.global_function(type="predict")
    def seeds_all() -> Tensor:
        flow.manual_seed(7)
        return torch.rand(4)

    @flow.global_function(type="predict")
    def draws() -> Tensor:
        return torch.rand(4)

    before = call_seeds.swap((3, 0))
    try:
        rounds = [(seeds_all().tolist(), draws().tolist(), draws().tolist()) for _ in range(3)]
    finally:
        call_seeds.swap(before)
    assert rounds[0] == rounds[1] == rounds[2]
    assert rounds[0][1] != rounds[0][2]


def test_a_generator_of_the_script_that_a_step_seeds_is_refused_and_stays_as_it_was() -> None:
    @flow.global_function(type="predict")
    def step(x: Tensor) -> Tensor:
        own.manual_seed(5)  # as it is already: the next call would find it elsewhere
        return x + 1

    before = own.get_state()
    with pytest.raises(flow.CaptureError, match=r"test_seeding.py:\d+: own is seeded in the step.*before the call"):
        step(torch.ones(3))
    assert torch.equal(own.get_state(), before)


@pytest.mark.parametrize(
    ("ask", "said"),
    [(torch.seed, "asks the system for random numbers"), (torch.initial_seed, "asks for torch's seed")],
)
def test_a_step_that_asks_for_a_seed_is_refused(ask: Callable[[], int], said: str) -> None:
    name = ask.__name__

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Tensor:
        return x + getattr(torch, name)() % 3

    with pytest.raises(flow.CaptureError, match=rf"test_seeding.py:\d+: the step {said}"):
        step(torch.ones(3))


def test_a_step_that_sets_a_state_of_the_script_s_is_refused_at_its_line() -> None:
    state = torch.get_rng_state()

    @flow.global_function(type="predict")
    def step(x: Tensor) -> Tensor:
        torch.set_rng_state(state)
        return x + 1

    with pytest.raises(flow.CaptureError, match=r"set_rng_state\(state\)\n  the step asks for the memory"):
        step(torch.ones(3))


def of_python(x: Tensor, n: int) -> Tensor:
    random.seed(3)
    return x * n


def of_numpy(x: Tensor, n: int) -> Tensor:
    np.random.seed(3)
    return x * n


chosen = random.Random(1)


def of_its_own(x: Tensor, n: int) -> Tensor:
    chosen.seed(3)
    return x * n


@pytest.mark.parametrize("function", [of_python, of_numpy, of_its_own])
def test_a_step_that_seeds_python_or_numpy_is_refused_and_moves_no_generator(
    function: Callable[[Tensor, int], Tensor],
) -> None:
    states = [random.getstate(), chosen.getstate(), repr(np.random.get_state())]
    for _ in range(2):
        with pytest.raises(flow.CaptureError, match=r"test_seeding\.py:\d+: of_\w+ draws .* or seeds them"):
            flow.global_function(type="predict")(function)(torch.ones(3), 2)
        assert [random.getstate(), chosen.getstate(), repr(np.random.get_state())] == states
