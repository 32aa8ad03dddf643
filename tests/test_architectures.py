"""Architectures in plain PyTorch train under a plan as they do eagerly; noisy ones as the one-device job."""

import pytest
import torch

from architectures import ARCHITECTURES, NOISY
from trained import Layout, differences, in_float64, plan_of, train_eagerly, train_planned

LAYOUTS = {"data 2": Layout(2), "four micro-batches": Layout(1, 4)}
SIZES = [8] * 3
MOST_REDUNDANT = 0.05

NOT_CUT = "cannot be split into micro-batches"


@pytest.mark.matrix(every=12)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *NOISY])
def test_it_trains_under_a_plan_as_on_one_device(name: str, layout: str) -> None:
    case, how = in_float64({**ARCHITECTURES, **NOISY}[name]), LAYOUTS[layout]
    if name in NOISY:
        expected, parameters, _ = train_planned(case, Layout(1), SIZES)
    else:
        expected, parameters = train_eagerly(case, SIZES, how.micro_batches)
    losses, found, plan = train_planned(case, how, SIZES)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    worst = max(differences(found, parameters).items(), key=lambda item: item[1])
    assert worst[1] <= 1e-6, worst
    assert plan.summary.redundant_flops <= MOST_REDUNDANT


@pytest.mark.parametrize(
    "name",
    [
        "graph network",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("padded encoder", "u-net", "picked targets")),
    ],
)
def test_what_compares_no_samples_with_each_other_is_cut_into_micro_batches(name: str) -> None:
    plan, *_ = plan_of(ARCHITECTURES[name], Layout(1, 4), SIZES[0])
    assert not [note for note in plan.notes if NOT_CUT in note]


def test_what_compares_samples_with_each_other_is_not_cut_into_micro_batches() -> None:
    plan, *_ = plan_of(ARCHITECTURES["contrastive"], Layout(1, 4), SIZES[0])
    assert any(note.startswith("aten.mm") and NOT_CUT in note for note in plan.notes)
