"""Pipelines that nobody wrote: under every schedule, training equals the eager script's on one device."""

from dataclasses import replace

import pytest
import torch

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.hints.goal import goal_of
from actorflow_compiler.hints.hints import place
from actorflow_compiler.plan.plan import Plan
from hf import PROMISED, exact
from models import CASES, DEEP_GPT, Case
from trained import Layout, differences, plan_of, train_eagerly, train_planned

STEPS = 3
BATCH = 16
MODELS = ("deep gpt", "cnn", "llama", "t5")
ROUND = ("interleaved", "zb-v")  # two stages on each device
SCHEDULES = ("auto", "gpipe", "1f1b", *ROUND, "zb-h1", "zb-h2")
EXACT = 1e-5


def case_of(name: str) -> tuple[Case, float]:
    """A model and how far its parameters may be off."""
    if name in PROMISED:
        return exact(name, PROMISED[name](0.0))
    return {**CASES, "deep gpt": DEEP_GPT}[name], EXACT if name == "cnn" else 1e-4  # SGD; AdamW


def pipelined(world: int, stages: int, micro_batches: int, schedule: str) -> Layout:
    return Layout(world, micro_batches, prepare=lambda model: place(model, stages=stages), schedule=schedule)


def check(name: str, layout: Layout, steps: int = STEPS) -> Plan:
    case, bound = case_of(name)
    sizes = [BATCH] * steps
    expected, parameters = train_eagerly(case, sizes, layout.micro_batches)
    losses, found, plan = train_planned(case, layout, sizes)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    worst = max(differences(found, parameters).items(), key=lambda item: item[1])
    assert worst[1] <= bound, worst
    assert plan.pieces == layout.micro_batches
    return plan


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("gpt", s) for s in SCHEDULES),
        *(("cnn", s) for s in SCHEDULES),
        ("llama", "zb-v"),
        pytest.param("t5", "auto", marks=pytest.mark.slow),  # test_hf.py has it in two stages
    ],
)
def test_two_stages_train_as_one_device_under_every_schedule(name: str, schedule: str) -> None:
    plan = check(name, pipelined(2, 4 if schedule in ROUND else 2, 4, schedule), 2)
    kinds = {a.kind for a in plan.actors}
    assert ("weight" in kinds) == schedule.startswith("zb") or schedule == "auto"
    assert len(plan.summary.stages) == (4 if schedule in ROUND else 2)


@pytest.mark.slow
@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["deep gpt"])  # eight stages have to be cut of it
def test_four_devices_train_as_one_under_every_schedule(name: str, schedule: str) -> None:
    check(name, pipelined(4, 8 if schedule in ROUND else 4, 8, schedule), 2)


@pytest.mark.slow
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("schedule", ["auto", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_data_parallel_stages_train_as_one_device(name: str, schedule: str) -> None:
    plan = check(name, pipelined(4, 2, 4, schedule), 2)
    assert plan.summary.stages == ("cpu:[0,1]", "cpu:[2,3]")


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("schedule", ["auto", "1f1b", "zb-h1"])
def test_tensor_parallel_stages_train_as_one_device(schedule: str) -> None:
    plan = check("gpt", replace(pipelined(4, 2, 4, schedule), goal=goal_of("tensor", None)), 2)
    assert plan.summary.stages == ("cpu:[0,1]", "cpu:[2,3]")
    assert plan.summary.redundant_flops <= 0.2


def test_a_schedule_that_begins_too_few_pieces_for_the_step_is_refused_with_what_would_do() -> None:
    case, _ = exact("mixtral", PROMISED["mixtral"](0.0))  # its router's loss waits for all pieces
    with pytest.raises(PlanError, match=r"schedule '1f1b' cannot run it.*expected: schedule='auto'.*or 'gpipe'"):
        plan_of(case, Layout(2, 4, pipeline=True, schedule="1f1b"), 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_under_every_schedule(name: str, schedule: str, world: int, micro_batches: int) -> None:
    check(name, pipelined(world, world * (2 if schedule in ROUND else 1), micro_batches, schedule), 5)
