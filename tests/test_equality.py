"""Losses and parameters of every plan equal those of the eager script on one device."""

import pytest
import torch

from actorflow_compiler.sbp import Split
from trained import CASES, Layout, train_eagerly, train_planned

LAYOUTS = {
    "one device": Layout(1),
    "four micro-batches": Layout(1, 4),
    "data 2": Layout(2),
    "output layer split": Layout(2, hints={r"head\.weight": Split(0)}),
    "pipeline 2": Layout(2, 4, pipeline=True),
    "data 2, pipeline 2": Layout(4, 4, pipeline=True),
}
STEPS = 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_trains_as_the_eager_script_does(name: str, layout: str) -> None:
    case, how = CASES[name], LAYOUTS[layout]
    check(name, how, 16 if how.micro_batches > 1 else 12)
    del case


@pytest.mark.parametrize("size", [5, 13])
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_a_batch_that_does_not_divide_evenly_trains_as_well(name: str, size: int) -> None:
    check(name, Layout(2), size)


def test_a_batch_smaller_than_the_number_of_devices_trains_as_well() -> None:
    check("mlp", Layout(3), 2)


def check(name: str, layout: Layout, size: int) -> None:
    case = CASES[name]
    expected, parameters = train_eagerly(case, [size] * STEPS, layout.micro_batches)
    losses, found, _ = train_planned(case, layout, [size] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert set(parameters) == set(found)
    bound = 1e-5 if name == "cnn" else 1e-4  # SGD; AdamW
    for key, value in parameters.items():
        scale = value.abs().max().double().clamp(min=1e-6)
        assert (found[key].double() - value.double()).abs().max() / scale <= bound, key
