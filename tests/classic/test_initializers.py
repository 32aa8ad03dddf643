"""Initialisers fill a tensor with what their names say, from a generator, whatever torch's own generator is at."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import ActorflowError


def filled(initializer: Any, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype).fill_(-77)
    initializer(tensor, torch.Generator().manual_seed(seed))
    return tensor


RANDOM: dict[str, tuple[Any, tuple[int, ...], float, float, float]] = {  # → shape, mean, deviation, largest distance
    "truncated_normal": (flow.truncated_normal(0.1), (400, 300), 0.0, 0.08796, 0.2),
    "truncated_normal_initializer": (flow.truncated_normal_initializer(3, 0.5), (400, 300), 3.0, 0.4398, 1.0),
    "random_normal": (flow.random_normal_initializer(mean=1.0, stddev=2.0), (400, 300), 1.0, 2.0, math.inf),
    "random_uniform": (flow.random_uniform_initializer(-1, 2), (400, 300), 0.5, 3 / math.sqrt(12), 1.5),
    "xavier_uniform": (flow.xavier_uniform_initializer(), (400, 300), 0.0, math.sqrt(2 / 700), math.sqrt(6 / 700)),
    "xavier_normal": (flow.xavier_normal_initializer(), (400, 300), 0.0, math.sqrt(2 / 700), math.inf),
    "glorot_uniform of a window": (
        flow.glorot_uniform_initializer("NCHW"), (64, 32, 3, 3), 0.0, math.sqrt(2 / 864), math.sqrt(6 / 864),
    ),
    "glorot_normal of a window, channels last": (
        flow.glorot_normal_initializer("NHWC"), (64, 3, 3, 32), 0.0, math.sqrt(2 / 864), math.inf,
    ),
    "variance_scaling": (flow.variance_scaling_initializer(2.0), (400, 300), 0.0, math.sqrt(2 / 300), 0.2),
    "variance_scaling, fan_out, channels last": (
        flow.variance_scaling_initializer(1.0, "fan_out", "random_uniform", "NHWC"), (64, 3, 3, 32), 0.0,
        math.sqrt(1 / 576), math.sqrt(3 / 576),
    ),
    "variance_scaling, fan_avg": (
        flow.variance_scaling_initializer(1.0, "fan_avg", "random_normal"), (400, 300), 0.0, math.sqrt(1 / 350),
        math.inf,
    ),
    "kaiming": (flow.kaiming_initializer((400, 300), nonlinearity="relu"), (400, 300), 0.0, math.sqrt(2 / 300), 1),
    "kaiming, uniform": (
        flow.kaiming_initializer((64, 32, 3, 3), "random_uniform", "fan_out", "leaky_relu", 0.5), (64, 32, 3, 3), 0.0,
        math.sqrt(2 / 1.25 / 576), math.sqrt(6 / 1.25 / 576),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RANDOM)
def test_random_numbers_have_the_mean_and_deviation_that_are_asked_for(case: str):
    initializer, shape, mean, deviation, largest = RANDOM[case]
    values = filled(initializer, *shape)
    error = 4 / math.sqrt(values.numel())  # four standard errors
    assert values.mean().item() == pytest.approx(mean, abs=error * deviation)
    assert values.std().item() == pytest.approx(deviation, rel=error)
    assert (values - mean).abs().max().item() <= largest * (1 + 1e-6)
    assert values.equal(filled(initializer, *shape))
    assert not values.equal(filled(initializer, *shape, seed=1))


def test_torchs_generator_is_left_alone():
    before = torch.get_rng_state()
    filled(flow.truncated_normal(1.0), 10, 10)
    assert torch.get_rng_state().equal(before)


def test_xavier_is_torchs():
    expected = nn.init.xavier_uniform_(torch.empty(30, 20), generator=torch.Generator().manual_seed(0))
    assert filled(flow.xavier_uniform_initializer(), 30, 20).equal(expected)


def test_constants_fill_every_dtype():
    assert filled(flow.constant_initializer(2.5), 3).tolist() == [2.5] * 3
    assert filled(flow.constant_initializer(2, flow.int32), 3, dtype=torch.int32).tolist() == [2] * 3
    assert filled(flow.zeros_initializer(), 2).tolist() == [0.0] * 2
    assert filled(flow.ones_initializer(flow.float), 2).tolist() == [1.0] * 2
    whole = filled(flow.random_uniform_initializer(2, 5), 100, dtype=torch.int64)
    assert set(whole.tolist()) == {2, 3, 4}


WRONG: dict[str, tuple[Any, str]] = {
    "a mode": (lambda: flow.variance_scaling_initializer(mode="fan"), "mode='fan'"),
    "a distribution": (lambda: flow.kaiming_initializer((2, 2), "truncated_normal"), "'random_normal'"),
    "a shape of one dim": (lambda: flow.kaiming_initializer((2,)), "shape=[2]"),
    "a data format": (lambda: flow.xavier_normal_initializer("CHW"), "data_format='CHW'"),
    "an empty range": (lambda: flow.random_uniform_initializer(1, 0), "minval <= maxval"),
    "a negative factor": (lambda: flow.regularizers.l2(-1.0), "l2=-1.0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_mean_nothing_are_told(case: str):
    call, said = WRONG[case]
    with pytest.raises(ActorflowError) as error:
        call()
    assert said in str(error.value)
