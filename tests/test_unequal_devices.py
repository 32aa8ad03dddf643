"""Trainings on devices that share by weights equal those of one device; each device computes and holds its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from actorflow_compiler.core.errors import HardwareError
from actorflow_compiler.core.hardware import Hardware, balanced_weights
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.hints.goal import Goal, ParallelMode
from actorflow_compiler.hints.hints import distribute, place, zero
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.summary import variable_shape
from actorflow_scheduler.forecast import forecast
from gpt import GPT
from models import CASES, CONTEXT, DROPOUT, NOISY, Case
from trained import Layout, plan_of, train_eagerly, train_planned

STEPS = 3
TINY_GPT = replace(CASES["clipped gpt"], make=lambda: GPT(1, 32, 4, CONTEXT))


def shared(weights: list[int], micro_batches: int = 1, **more: Any) -> Layout:
    """All ranks on one axis, which share by these weights."""
    world = len(weights)
    return Layout(world, micro_batches, mesh=placement("cpu", range(world), weights), **more)


def check(case: Case, layout: Layout, size: int) -> Plan:
    expected, parameters = train_eagerly(case, [size] * STEPS, layout.micro_batches)
    losses, found, plan = train_planned(case, layout, [size] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert set(parameters) == set(found)
    for key, value in parameters.items():
        scale = value.abs().max().double().clamp(min=1e-6)
        assert (found[key].double() - value.double()).abs().max() / scale <= 1e-4, key
    return plan


def work(plan: Plan) -> dict[int, float]:
    """Rank → its FLOPs in the forward pass of an iteration."""
    found = dict.fromkeys(range(plan.world), 0.0)
    for actor in plan.actors:
        if actor.kind == "forward":
            found[actor.rank] += actor.flops * actor.rate
    return found


def tensor_parallel(model: nn.Module) -> None:
    distribute(model, {r".*(qkv|up)\.weight": Split(0), r".*(projection|down)\.weight": Split(1)})


WEIGHTS = [[2, 1], [3, 1], [1, 2, 1]]
CASES_OF = {
    "mlp": (CASES["mlp"], lambda w: shared(w), 12),
    "batch norm": (CASES["cnn"], lambda w: shared(w), 12),
    "micro-batches": (CASES["mlp"], lambda w: shared(w, 4), 24),
    "a batch that the weights do not divide": (TINY_GPT, lambda w: shared(w), 7),
    "a batch smaller than the devices": (CASES["mlp"], lambda w: shared(w), 2),
    "zero 1": (CASES["mlp"], lambda w: shared(w, prepare=lambda m: zero(m, 1)), 12),
    "zero 2": (CASES["mlp"], lambda w: shared(w, prepare=lambda m: zero(m, 2)), 12),
    "zero 3": (CASES["cnn"], lambda w: shared(w, 2, prepare=lambda m: zero(m, 3)), 12),
    "tensor parallel": (TINY_GPT, lambda w: shared(w, prepare=tensor_parallel), 6),
}  # fmt: skip


QUICK = (("mlp", [2, 1]), ("zero 3", [3, 1]))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        pytest.param(name, weights, marks=() if (name, weights) in QUICK else pytest.mark.slow, id=f"{name}-{weights}")
        for name in CASES_OF
        for weights in WEIGHTS
    ],
)
def test_devices_that_share_by_weights_train_as_one_does(name: str, weights: list[int]) -> None:
    case, layout, size = CASES_OF[name]
    check(case, layout(weights), size)


def test_each_device_computes_what_its_weight_says() -> None:
    plan, *_ = plan_of(CASES["mlp"], shared([1, 2, 1]), 12)
    first, second, third = work(plan).values()
    assert second == 2 * first == 2 * third > 0


def test_a_split_weight_lies_by_the_weights_of_its_placement() -> None:
    plan, *_ = plan_of(CASES["mlp"], shared([3, 1], hints={r"second\.weight": Split(0)}), 12)
    (second,) = (v for v in plan.variables if v.name == "model.second.weight")
    assert [variable_shape(second, rank) for rank in (0, 1)] == [(24, 32), (8, 32)]


def test_devices_may_get_nothing_at_all() -> None:
    plan = check(CASES["mlp"], shared([19, 1], hints={r"head\.weight": Split(0)}), 6)
    (head,) = (v for v in plan.variables if v.name == "model.head.weight")
    assert [variable_shape(head, rank) for rank in (0, 1)] == [(10, 64 // 2), (0, 32)]


def on_a_mesh(model: nn.Module) -> None:
    zero(model, 3)
    split_0, split_1 = (None, Split(0)), (None, Split(1))
    distribute(model, {r".*(qkv|up)\.weight": split_0, r".*(projection|down)\.weight": split_1})


@pytest.mark.slow
def test_a_mesh_shares_by_the_weights_of_both_axes() -> None:
    mesh = placement("cpu", [[0, 1], [2, 3]], [[4, 2], [2, 1]])
    plan = check(TINY_GPT, Layout(4, mesh=mesh, prepare=on_a_mesh), 8)
    (down,) = (v for v in plan.variables if v.name == "model.blocks.0.down.weight")
    assert down.sbp == (Split(0), Split(1))
    assert [variable_shape(down, rank) for rank in range(4)] == [(21, 85), (21, 43), (11, 85), (11, 43)]


def stages(first: Any, second: Any) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        place(model, {"first": first, "second|head": second})

    return prepare


@pytest.mark.parametrize("micro_batches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_stages_of_a_pipeline_may_share_differently(micro_batches: int) -> None:
    halves = stages(placement("cpu", [0, 1], [2, 1]), placement("cpu", [3, 2], [1, 3]))
    plan = check(CASES["mlp"], Layout(4, micro_batches, prepare=halves), 12 * micro_batches)
    assert work(plan)[0] == 2 * work(plan)[1]
    assert work(plan)[2] == 3 * work(plan)[3]


@pytest.mark.slow
def test_stages_on_one_set_of_devices_may_share_differently() -> None:
    halves = stages(placement("cpu", [0, 1], [2, 1]), placement("cpu", [0, 1]))
    check(CASES["mlp"], Layout(2, 2, prepare=halves), 12)


@pytest.mark.slow
@pytest.mark.parametrize("case", [DROPOUT, NOISY], ids=["dropout", "noise"])
def test_random_numbers_are_those_of_every_other_plan(case: Case) -> None:
    one, parameters, _ = train_planned(case, Layout(1), [9] * STEPS)
    losses, found, _ = train_planned(case, shared([2, 1]), [9] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(one), rtol=1e-5, atol=0)
    for name, value in parameters.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ParallelMode.AUTO, ParallelMode.TENSOR], ids=str)
def test_inferred_layouts_train_as_one_device_does(mode: ParallelMode) -> None:
    check(TINY_GPT, shared([3, 1], goal=Goal((mode,))), 8)


@pytest.mark.slow
def test_equal_weights_are_the_plan_without_weights() -> None:
    with_weights, *_ = plan_of(CASES["mlp"], shared([5, 5]), 12)
    without, *_ = plan_of(CASES["mlp"], Layout(2, mesh=placement("cpu", [0, 1])), 12)
    assert with_weights == without
    assert all(v.sbp == (B,) for v in without.variables)


def test_a_forecast_goes_by_the_speed_of_each_rank_and_by_its_share() -> None:
    slow = Hardware(flops_per_s=1e6, memory_bytes_per_s=1e12, latency_s=0.0, fire_overhead_s=0.0)
    unequal = replace(slow, speeds=(1.0, 0.5))

    def period(layout: Layout, hardware: Hardware) -> float:
        plan, *_ = plan_of(CASES["mlp"], layout, 12)
        return forecast(plan, hardware).period

    alike = period(shared([1, 1]), slow)
    assert period(shared([1, 1]), unequal) == pytest.approx(2 * alike, rel=0.02)
    assert period(shared([2, 1]), unequal) == pytest.approx(4 / 3 * alike, rel=0.02)


@pytest.mark.parametrize(
    ("speeds", "weights"),
    [
        ((1.0, 0.5), (2, 1)),
        ((1.0, 1.0), None),
        ((), None),
        ((0.3, 0.3, 0.3), None),
        ((1.0, 0.75, 0.5), (4, 3, 2)),
        ((2.0, 3.0), (2, 3)),
        ((1.0, 0.999), None),
        ((1e-9, 1.0), (1, 1_000_000)),
    ],
    ids=str,
)
def test_balanced_weights_are_the_smallest_that_are_close(speeds: Any, weights: Any) -> None:
    assert balanced_weights(Hardware(speeds=speeds), range(max(2, len(speeds)))) == weights


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8))
def test_by_balanced_weights_all_finish_at_about_the_same_time(speeds: list[float]) -> None:
    found = balanced_weights(Hardware(speeds=tuple(speeds)), range(len(speeds)))
    shares = placement("cpu", range(len(speeds)), found).shares
    slowest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    assert slowest <= 1.02 / sum(speeds) * (1 + 1e-9)


def test_balanced_weights_are_in_the_order_of_the_ranks() -> None:
    assert balanced_weights(Hardware(speeds=(1.0, 0.5, 2.0)), [2, 1]) == (4, 1)
    with pytest.raises(HardwareError, match="rank 3"):
        balanced_weights(Hardware(speeds=(1.0, 0.5, 2.0)), [0, 3])
