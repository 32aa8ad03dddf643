"""Learning rates follow OneFlow's formulas, counted from the first call of the job."""

from __future__ import annotations

import math
from typing import Any

import pytest

import actorflow as flow
from actorflow_compiler.core.errors import ActorflowError

opt = flow.optimizer
cos, pi = math.cos, math.pi
RATES: dict[str, tuple[Any, dict[int, float]]] = {  # schedule → rate of some calls
    "constant": (opt.PiecewiseConstantScheduler([], [0.1]), {0: 0.1, 1000: 0.1}),
    "piecewise constant": (opt.PiecewiseConstantScheduler([2, 5], [1, 2, 3]), {0: 1, 2: 1, 3: 2, 5: 2, 6: 3, 99: 3}),
    "piecewise scaling": (opt.PiecewiseScalingScheduler(0.4, [2, 5], [0.5, 0.25]), {2: 0.4, 3: 0.2, 6: 0.1}),
    "piecewise scaling by one number": (opt.PiecewiseScalingScheduler(0.4, [2, 5], 0.5), {2: 0.4, 3: 0.2, 6: 0.2}),
    "polynomial": (
        opt.PolynomialScheduler(1.0, 10, 0.1, power=2.0), {0: 1.0, 5: 0.9 * 0.25 + 0.1, 10: 0.1, 20: 0.1},
    ),
    "polynomial in cycles": (
        opt.PolynomialScheduler(1.0, 10, 0.0, cycle=True), {0: 0.9, 1: 0.9, 10: 0.0, 11: 1 - 11 / 20, 20: 0.0},
    ),
    "cosine": (opt.CosineScheduler(2.0, 8, alpha=0.25), {0: 2.0, 4: 2 * 0.625, 8: 0.5, 9: 0.5}),
    "linear cosine": (
        opt.LinearCosineScheduler(1.0, 10, 0.5, 0.1, 0.01),
        {0: 1.11, 3: (0.1 + 0.7) * (1 + cos(pi * 0.3)) / 2 + 0.01, 10: 0.01, 30: 0.01},
    ),
    "exponential": (opt.ExponentialScheduler(1.0, 4, 0.5), {0: 1.0, 2: 0.5**0.5, 8: 0.25}),
    "exponential staircase": (opt.ExponentialScheduler(1.0, 4, 0.5, staircase=True), {3: 1.0, 4: 0.5, 7: 0.5}),
    "inverse time": (opt.InverseTimeScheduler(1.0, 4, 0.5), {0: 1.0, 2: 0.8, 8: 0.5}),
    "inverse time staircase": (opt.InverseTimeScheduler(1.0, 4, 0.5, True), {3: 1.0, 4: 1 / 1.5}),
    "natural exponential": (opt.NaturalExpScheduler(1.0, 4, 0.5), {0: 1.0, 2: math.exp(-0.25)}),
    "natural exponential staircase": (opt.NaturalExpScheduler(1.0, 4, 0.5, True), {3: 1.0, 5: math.exp(-0.5)}),
    "constant warm-up": (
        opt.CosineScheduler(2.0, 8, warmup=opt.warmup.constant(3, 0.1)), {0: 0.2, 2: 0.2, 3: 1 + cos(pi * 3 / 8)},
    ),
    "linear warm-up": (
        opt.PiecewiseConstantScheduler([1], [1.0, 3.0], warmup=opt.warmup.linear(4, 0.2)),
        {0: 0.2, 1: 0.4, 3: 0.8, 4: 3.0},
    ),
    "no warm-up at all": (opt.ExponentialScheduler(1.0, 4, 0.5, warmup=opt.warmup.linear(0, 0.5)), {0: 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", RATES)
def test_the_rate_follows_the_formula(case: str):
    schedule, rates = RATES[case]
    assert {step: schedule.rate(step) for step in rates} == pytest.approx(rates)


WRONG: dict[str, tuple[Any, str]] = {
    "too few values": (lambda: opt.PiecewiseConstantScheduler([1, 2], [0.1]), "3 values were expected"),
    "boundaries that go back": (lambda: opt.PiecewiseConstantScheduler([2, 1], [1, 1, 1]), "growing boundaries"),
    "too many scales": (lambda: opt.PiecewiseScalingScheduler(0.1, [1], [1, 2]), "1 values were expected"),
    "no steps": (lambda: opt.CosineScheduler(0.1, 0), "steps above 0"),
    "a negative rate": (lambda: opt.ExponentialScheduler(-0.1, 5, 0.5), "learning rate, 0 or more"),
    "a warm-up that is a number": (lambda: opt.CosineScheduler(0.1, 5, warmup=3), "warmup=flow.optimizer.warmup"),
    "a constant warm-up from 0": (lambda: opt.warmup.constant(5, 0.0), "above 0 to below 1"),
    "a linear warm-up from 1": (lambda: opt.warmup.linear(5, 1.0), "from 0 to below 1"),
    "clipping to 0": (lambda: opt.grad_clipping.by_global_norm(0.0), "a number above 0"),
    "a rate that is a number": (lambda: opt.SGD(0.1), "PiecewiseConstantScheduler([], [0.1])"),
    "a momentum of 1": (lambda: opt.SGD(opt.CosineScheduler(0.1, 5), momentum=1.0), "momentum=1.0"),
    "a clipping that is a number": (lambda: opt.Adam(opt.CosineScheduler(0.1, 5), grad_clipping=1), "by_global_norm"),
    "decay of some and not of others": (
        lambda: opt.AdamW(opt.CosineScheduler(0.1, 5), weight_decay_includes="a", weight_decay_excludes="b"),
        "one of both was expected",
    ),
    "RMSProp with a rate that always changes": (
        lambda: opt.RMSProp(opt.CosineScheduler(0.1, 5)), "RMSProp with CosineScheduler",
    ),
    "RMSProp with a linear warm-up": (
        lambda: opt.RMSProp(opt.PiecewiseConstantScheduler([], [1], opt.warmup.linear(5, 0.0))), "compiled for each",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_mean_nothing_are_told(case: str):
    call, said = WRONG[case]
    with pytest.raises(ActorflowError) as error:
        call()
    assert said in str(error.value)
