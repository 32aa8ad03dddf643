"""Losses and parameters of every plan equal those of the eager script on one device."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.sbp import Sbp, Split
from actorflow_compiler.custom_ops import optimizers
from models import CASES, DEEP_GPT, DROPOUT
from trained import LAYOUTS, MESH, Layout, train_eagerly, train_planned

STEPS = 4


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*CASES, pytest.param("deep gpt", marks=pytest.mark.slow)])
def test_a_plan_trains_as_the_eager_script_does(name: str, layout: str) -> None:
    how = LAYOUTS[layout]
    check(name, how, 16 if how.micro_batches > 1 else 12)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("size", [5, 13])
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_a_batch_that_does_not_divide_evenly_trains_as_well(name: str, size: int) -> None:
    check(name, Layout(2), size)


def test_a_batch_smaller_than_the_number_of_devices_trains_as_well() -> None:
    check("mlp", Layout(3), 2)


MEGATRON = {r".*(qkv|up)\.weight": (None, Split(0)), r".*(projection|down)\.weight": (None, Split(1))}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(("name", "hints"), [("mlp", {}), ("cnn", {}), ("gpt", {}), ("gpt", MEGATRON)])
@pytest.mark.parametrize("size", [8, 7])
def test_a_mesh_of_two_axes_trains_as_well(name: str, hints: dict[str, tuple[Sbp | None, ...]], size: int) -> None:
    check(name, replace(MESH, hints=hints), size)


def test_a_gradient_whose_strides_differ_from_its_parameters_updates_it_element_by_element() -> None:
    param, grad = torch.zeros(3, 2), torch.arange(6.0).view(2, 3).t()
    optimizers.sgd_([param], [grad], [], 1.0, 0.0, 0.0, 0.0, False, False, False)
    assert torch.equal(param, -grad)


def scoped_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with flow.scope.placement("cpu", [0, 1]):
        x = F.relu(model.first(x))
    with flow.scope.placement("cpu", [2]):
        return F.cross_entropy(model.head(F.relu(model.second(x))), y)


def test_ops_may_be_placed_one_by_one_on_placements_of_different_sizes() -> None:
    case = replace(CASES["mlp"], loss=scoped_loss)
    expected, parameters = train_eagerly(case, [12] * STEPS, 1)
    losses, found, plan = train_planned(case, Layout(3, 4), [12] * STEPS)
    assert plan.summary.stages == ("cpu:[0,1]", "cpu:[2]")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)


@functools.cache
def dropped() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the one-device job with dropout."""
    losses, found, _ = train_planned(DROPOUT, LAYOUTS["one device"], [16] * STEPS)
    return losses, found


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one device"])
def test_dropout_drops_the_same_elements_under_every_plan(layout: str) -> None:
    expected, parameters = dropped()
    losses, found, _ = train_planned(DROPOUT, LAYOUTS[layout], [16] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)


def check(name: str, layout: Layout, size: int) -> None:
    case = {**CASES, "deep gpt": DEEP_GPT}[name]
    expected, parameters = train_eagerly(case, [size] * STEPS, layout.micro_batches)
    losses, found, _ = train_planned(case, layout, [size] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert set(parameters) == set(found)
    bound = 1e-5 if name == "cnn" else 1e-4  # SGD; AdamW
    for key, value in parameters.items():
        scale = value.abs().max().double().clamp(min=1e-6)
        assert (found[key].double() - value.double()).abs().max() / scale <= bound, key
