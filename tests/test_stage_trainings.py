"""Pipelines whose stages come back to a rank, or are found automatically, train as the eager script on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.hints.goal import goal_of
from architectures import ARCHITECTURES
from hf import PROMISED
from models import CASES, DEEP_GPT, Case
from trained import Layout, differences, in_float64, plan_of, train_eagerly, train_planned

FIRST, SECOND = placement("cpu", [0]), placement("cpu", [1])
SIZES = [8] * 2


def check(case: Case, layout: Layout) -> tuple[str, ...]:
    """Compare with eager training in float64; returns the placements of the stages."""
    case = in_float64(case)
    expected, parameters = train_eagerly(case, SIZES, layout.micro_batches)
    losses, found, plan = train_planned(case, layout, SIZES)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0)
    worst = max(differences(found, parameters).items(), key=lambda item: item[1])
    assert worst[1] <= 1e-6, worst
    return plan.summary.stages


def automatic(world: int, stages: int, schedule: str = "auto") -> Layout:
    return Layout(world, 4, prepare=lambda model: flow.place(model, stages=stages), schedule=schedule)


def by_patterns(*places: tuple[str, Placement]) -> Layout:
    return Layout(2, 4, prepare=lambda model: flow.place(model, dict(places)))


def texts(*ranks: list[int]) -> tuple[str, ...]:
    return tuple(str(placement("cpu", r)) for r in ranks)


INTERLEAVED, V = texts([0], [1], [0], [1]), texts([0], [1], [1], [0])


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    ("make", "layout", "stages"),
    [
        (lambda: CASES["cnn"], automatic(2, 4), INTERLEAVED),  # batch norm
        (lambda: PROMISED["gpt2"](0.0), automatic(2, 4, "zb-v"), V),  # tied weights
        (lambda: PROMISED["gpt2"](0.0), automatic(4, 2), texts([0, 1], [2, 3])),
        pytest.param(  # encoder and decoder; test_hf.py has it in two stages
            lambda: PROMISED["t5"](0.0), automatic(2, 4), INTERLEAVED, marks=pytest.mark.slow
        ),
        (lambda: ARCHITECTURES["u-net"], automatic(3, 3), texts([0], [1], [2])),  # skip connections
    ],
    ids=["cnn 4 on 2", "gpt2 in a V", "gpt2 data 2", "t5 4 on 2", "u-net 3"],
)
def test_stages_that_are_found_train_as_one_device(
    make: Callable[[], Case], layout: Layout, stages: tuple[str, ...]
) -> None:
    assert check(make(), layout) == stages


@pytest.mark.parametrize(
    ("parallel", "world", "stages"),
    [
        ("pipeline", 2, texts([0], [1])),
        ({"pipeline": 4}, 2, INTERLEAVED),
        ({"pipeline": 2, "data": 2}, 4, texts([0, 1], [2, 3])),
        ({"tensor": 2, "pipeline": 2}, 4, texts([0, 1], [2, 3])),
    ],
    ids=str,
)
def test_stages_that_a_job_asks_for_train_as_one_device(parallel: object, world: int, stages: tuple[str, ...]) -> None:
    assert check(CASES["gpt"], Layout(world, 4, goal=goal_of(parallel, None))) == stages


def test_stages_that_a_job_asks_for_are_those_that_flow_place_asks_for() -> None:
    def asked(prepare: Callable[[nn.Module], None], parallel: object = "pipeline", world: int = 2) -> Layout:
        return Layout(world, 4, goal=goal_of(parallel, None), prepare=prepare)

    def offload(model: nn.Module) -> None:
        flow.distribute(model, {".*weight": flow.sbp.broadcast}, placement=placement("cpu", [2]))

    third = texts([0], [1], [2])  # that only keeps and updates weights
    assert plan_of(CASES["mlp"], asked(offload, world=3), 8)[0].summary.stages == third
    both = asked(lambda model: flow.place(model, [SECOND, FIRST]))
    assert plan_of(CASES["mlp"], both, 8)[0].summary.stages == texts([1], [0])
    for prepare, message in [
        (lambda model: flow.place(model, stages=4), r'="pipeline" asks for 2 stages, and flow\.place\(.*=4\) for 4; '),
        (
            lambda model: flow.place(model, {"first": FIRST}),
            r'parallel="pipeline" and flow\.place\(.*first.* one of both',
        ),
    ]:
        with pytest.raises(LayoutError, match=message):
            plan_of(CASES["mlp"], asked(prepare), 8)
    with pytest.raises(LayoutError, match=r'{"pipeline": 1}: each stage has 2 of the 2 devices, .* mesh of 1 = 1'):
        plan_of(CASES["mlp"], asked(lambda model: None, {"pipeline": 1}), 8)


def test_stages_by_patterns_may_come_back_to_a_rank() -> None:
    layout = by_patterns(("first", FIRST), ("second", SECOND), ("head", FIRST))
    assert check(CASES["mlp"], layout) == texts([0], [1], [0])


@pytest.mark.slow
def test_stages_by_patterns_may_come_back_to_both_ranks() -> None:
    blocks = [r"embed|positions|blocks\.0", r"blocks\.1", r"blocks\.2", r"blocks\.3|norm|head"]
    layout = by_patterns(*zip(blocks, (FIRST, SECOND, FIRST, SECOND), strict=True))
    assert check(DEEP_GPT, layout) == INTERLEAVED


@pytest.mark.slow
def test_a_decoder_may_be_on_the_rank_of_the_embedding_that_it_shares_with_the_encoder() -> None:
    layout = by_patterns(("shared|decoder|lm_head", FIRST), ("encoder", SECOND))
    assert check(PROMISED["t5"](0.0), layout)[-2:] == texts([1], [0])


def test_parameters_in_parts_are_gathered_for_each_stage_of_a_rank() -> None:
    pairs = [placement("cpu", r) for r in ([0, 1], [2, 3], [2, 3], [0, 1])]

    def prepare(model: nn.Module) -> None:
        flow.place(model, pairs)
        flow.zero(model, 3)

    assert check(CASES["mlp"], Layout(4, 4, prepare=prepare)) == tuple(map(str, pairs))


def loss_on_the_first_stage(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    with flow.scope.placement("cpu", [0]):
        return F.cross_entropy(logits, y)


def test_a_loss_on_the_first_stage_trains_as_well() -> None:
    layout = by_patterns(("first", FIRST), ("second|head", SECOND))
    assert check(replace(CASES["mlp"], loss=loss_on_the_first_stage), layout) == texts([0], [1], [0])


def scoped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with flow.scope.placement("cpu", [0, 1]):
        x = F.relu(model.first(x))
    with flow.scope.placement("cpu", [2]):
        x = F.relu(model.second(x))
    with flow.scope.placement("cpu", [0, 1]):
        return F.cross_entropy(model.head(x), y)


def test_scopes_may_come_back_to_a_placement_of_another_size() -> None:
    assert check(replace(CASES["mlp"], loss=scoped), Layout(3, 4)) == texts([0, 1], [2], [0, 1])
