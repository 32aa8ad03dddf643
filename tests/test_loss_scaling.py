"""A job with torch's GradScaler trains as the eager script does, under every plan, also where gradients overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.hints.hints import zero
from models import CASES, Batch, Case, digit_batches
from trained import LAYOUTS, Layout, plan_of, train_eagerly, train_planned

STEPS = 6
POISONED = (1, 4)  # steps in which one sample makes one element of one gradient infinite


def poisoned_batches(sizes: Sequence[int]) -> list[Batch]:
    """Digits, and a number for each sample that is 0, but for one sample of some batches."""
    batches = []
    for number, (images, targets) in enumerate(digit_batches(sizes)):
        poison = torch.zeros(len(images))
        if number in POISONED:
            poison[len(images) // 2 + 1] = math.inf
        batches.append((images, targets, poison))
    return batches


def poisoned_loss(model: nn.Module, images: Tensor, targets: Tensor, poison: Tensor) -> Tensor:
    bias: Tensor = model.head.bias  # type: ignore[assignment, union-attr]  # the last stage's
    return F.cross_entropy(model(images), targets) + (bias[0] * poison).mean()


CASE = replace(
    CASES["mlp"],
    batches=poisoned_batches,
    loss=poisoned_loss,
    names=("x", "y", "poison"),
    scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2),
)
OPTIMIZERS = {
    "AdamW": CASE,
    "AdamW, clipped": replace(CASE, clip=0.5),
    "SGD": replace(CASE, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)),
    "RMSprop, which takes no found_inf": replace(CASE, optimizer=lambda m: torch.optim.RMSprop(m.parameters(), 1e-3)),
}


def check(case: Case, layout: Layout, size: int = 12) -> None:
    expected, parameters = train_eagerly(case, [size] * STEPS, layout.micro_batches)
    losses, found, _ = train_planned(case, layout, [size] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0, equal_nan=True)
    assert [math.isfinite(x) for x in losses] == [n not in POISONED for n in range(STEPS)]
    assert found["scaler._scale"].item() == parameters["scaler._scale"].item() == 2.0**11
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", ["one device", "data 2", "data 2, pipeline 2"])
def test_an_optimizer_skips_the_steps_in_which_a_gradient_overflows(name: str, layout: str) -> None:
    check(OPTIMIZERS[name], LAYOUTS[layout], 16 if LAYOUTS[layout].micro_batches > 1 else 13)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", ["four micro-batches", "output layer split", "pipeline 2"])
def test_an_infinity_of_one_part_is_known_to_all_of_them(layout: str) -> None:
    check(CASE, LAYOUTS[layout], 16)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scaling_works_with_optimizer_state_in_parts(stage: int) -> None:
    check(OPTIMIZERS["AdamW, clipped"], Layout(3, prepare=lambda model: zero(model, stage)))


def test_the_steps_of_adam_are_counted_where_no_infinity_was_found() -> None:
    plan, values, _ = plan_of(CASE, LAYOUTS["data 2"], 12)
    assert {v.name for v in plan.variables if v.kind == "tensor"} == {"scaler._scale", "scaler._growth_tracker"}
    assert values["scaler._scale"].item() == 2.0**12


def half(kind: str, dtype: torch.dtype) -> Case:
    """A case whose forward pass runs under autocast."""

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            logits = model(inputs).flatten(0, -2)
            assert logits.dtype == dtype
            return F.cross_entropy(logits, targets.flatten())

    return replace(CASES[kind], loss=loss)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(("name", "layout"), [*(("mlp", layout) for layout in LAYOUTS), ("gpt", "data 2, pipeline 2")])
def test_autocast_works_under_every_plan(name: str, layout: str) -> None:
    case = half(name, torch.bfloat16)
    expected, parameters = train_eagerly(case, [16] * 3, 1)
    losses, found, plan = train_planned(case, LAYOUTS[layout], [16] * 3)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=3e-3, atol=0)
    assert {t.dtype for r in plan.registers for t in r.tensors} >= {"bfloat16"}
    assert all(value.dtype == torch.float32 for value in found.values())
    for key, value in parameters.items():  # three steps of AdamW with a rate of 0.001 change no element by more
        assert (found[key] - value).abs().max() < 6e-3, key


def test_float16_overflows_and_the_scale_backs_off_as_in_eager_pytorch() -> None:
    scaler = lambda: torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-4)  # noqa: E731
    case = replace(half("mlp", torch.float16), scaler=scaler)
    expected, parameters = train_eagerly(case, [16] * 4, 1)
    losses, found, _ = train_planned(case, LAYOUTS["data 2"], [16] * 4)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=0)
    assert found["scaler._scale"].item() == parameters["scaler._scale"].item() < 2.0**24


def test_a_job_reads_and_writes_the_scaler_of_the_script() -> None:
    def make() -> tuple[torch.amp.GradScaler, torch.optim.Optimizer, nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2), optimizer, model

    scaler, optimizer, model = make()

    @flow.global_function(type="train")
    def train_step(images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    eager = make()

    def eager_step(images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(eager[2](images), targets)
        eager[0].scale(loss).backward()  # type: ignore[no-untyped-call]
        eager[0].step(eager[1])
        eager[0].update()
        eager[1].zero_grad()
        return loss.detach()

    for number, (images, targets) in enumerate(digit_batches([16] * 6)):
        if number == 2:
            images = images * math.inf
        if number == 4:  # between calls, as one loads a checkpoint
            for one in (scaler, eager[0]):
                one.load_state_dict({**one.state_dict(), "scale": 2.0**5, "_growth_tracker": 0, "growth_interval": 1})
        loss, expected = train_step(images, targets), eager_step(images, targets)
        torch.testing.assert_close(loss.detach().clone(), expected, rtol=2e-2, atol=0, equal_nan=True)
        assert scaler.state_dict() == eager[0].state_dict()
    assert scaler.get_scale() == 2.0**7
    steps = [state["step"].item() for state in optimizer.state_dict()["state"].values()]
    assert steps == [5.0] * 4
