"""Class losses under every plan equal eager ones; where the vocabulary is split, no device sees all of the logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import Sbp, Split
from actorflow_compiler.infer import layout_assignment, legal_options
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.signatures import signatures
from models import Case, Loss
from trained import Layout, train_eagerly, train_planned

WORDS, WIDTH, LENGTH = 406, 8, 6  # uneven over 3 devices, and over 2 by 2
IGNORED = 3
STEPS = 3
CLASS_WEIGHTS = torch.linspace(0.1, 2.0, WORDS)


class Words(nn.Module):
    """Words int64[n, LENGTH] to logits float32[n, LENGTH, WORDS]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("weights", CLASS_WEIGHTS)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embed(words))))
        return logits


def batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Words and targets, of which many are to be ignored, and more in the first samples than in the last."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for size in sizes:
        x, y = torch.randint(0, WORDS, (2, size, LENGTH), generator=generator)
        y = torch.where(torch.rand(y.shape, generator=generator) < 0.3, IGNORED, y)
        y[0, 1:] = IGNORED
        found.append((x, y))
    return found


def of_words(**settings: Any) -> Loss:
    """A loss of all words as one list of samples."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        given = {k: (model.weights if v == "weights" else v) for k, v in settings.items()}
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, **given)

    return loss


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="none")
    return (losses * losses).mean()


def as_image(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=IGNORED, weight=model.weights)


LOSSES: dict[str, Loss] = {
    "mean": of_words(),
    "weighted": of_words(weight="weights"),
    "smoothed": of_words(weight="weights", label_smoothing=0.2),
    "sum": lambda *given: of_words(reduction="sum")(*given) / 100,
    "each": each,
    "image": as_image,
}
SPLIT: dict[str, Sbp | tuple[Sbp | None, ...]] = {r"head\..*": Split(0)}
MESH = placement("cpu", [[0, 1], [2, 3]])
LAYOUTS = {
    "vocabulary 2": Layout(2, hints=SPLIT),
    "vocabulary 3": Layout(3, hints=SPLIT),
    "vocabulary 2 in micro-batches": Layout(2, 4, hints=SPLIT),
    "data 2, vocabulary 2": Layout(4, hints={r"head\..*": (None, Split(0))}, mesh=MESH),
    "vocabulary 2 by 2": Layout(4, hints={r"head\..*": (Split(0), Split(0))}, mesh=MESH),
}


@pytest.fixture
def split_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are not gathered, whatever that costs."""
    monkeypatch.setattr(legal_options, "signatures", functools.partial(signatures, inner=True))
    monkeypatch.setattr(layout_assignment, "inner_cost", lambda *_: (-1e12, 0))


def check(loss: str, layout: Layout, size: int) -> Plan:
    case = Case(Words, lambda m: SGD(m.parameters(), lr=0.5), batches, ("embed", "hidden|head"), loss=LOSSES[loss])
    expected, parameters = train_eagerly(case, [size] * STEPS, 1)
    losses, found, plan = train_planned(case, layout, [size] * STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-5, atol=1e-6)
    return plan


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("size", [8, 5])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_a_split_batch_has_the_denominator_of_the_whole(loss: str, size: int) -> None:
    check(loss, Layout(2), size)


@pytest.mark.matrix(every=4)
@pytest.mark.usefixtures("split_inside")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_over_a_split_vocabulary_moves_no_logits(loss: str) -> None:
    samples = 40
    plan = check(loss, LAYOUTS["vocabulary 2"], samples)
    gathered = samples * LENGTH * WORDS * 4
    assert sum(nbytes for _, nbytes in plan.summary.moved) < gathered / 2


@pytest.mark.matrix(every=4)
@pytest.mark.usefixtures("split_inside")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "vocabulary 2"])
def test_a_vocabulary_may_be_split_over_any_axes(layout: str) -> None:
    plan = check("weighted", LAYOUTS[layout], 8)
    blocks = {step.args[2] for body in plan.bodies for step in body.steps if step.op == "actorflow.amax_blocks"}
    assert blocks == {()}  # every device takes the maximum of all that it has


UNEQUAL = {
    "2 to 1": Layout(2, hints=SPLIT, mesh=placement("cpu", [0, 1], [2, 1])),
    "1 to 2 to 1": Layout(3, hints=SPLIT, mesh=placement("cpu", [0, 1, 2], [1, 2, 1])),
    "batch and vocabulary": Layout(
        4, hints={r"head\..*": (None, Split(0))}, mesh=placement("cpu", [[0, 1], [2, 3]], [[4, 2], [2, 1]])
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("split_inside")
@pytest.mark.parametrize("layout", UNEQUAL)
def test_a_vocabulary_may_be_shared_by_weights(layout: str) -> None:
    plan = check("weighted", UNEQUAL[layout], 8)
    blocks = {step.args[2] for body in plan.bodies for step in body.steps if step.op == "actorflow.amax_blocks"}
    assert blocks == {(), (0, 2)}  # every device takes the maximum of all that it has, once for each part of its weight
