"""Losses over what a mask selects train as eagerly, whatever each device has of it; what cannot be is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError
from scripts.masks import CASES, cases, difference
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "masks.py"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.mark.matrix(every=24)
@pytest.mark.parametrize("name", CASES)
def test_a_loss_over_a_selection_trains_as_eagerly(name: str) -> None:
    assert difference(CASES[name], "micro-batches") < 1e-9


def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["data", "tensor", "pipeline", "zero 3"], how)


def trained(loss_of: Loss, job: bool, **options: object) -> Tensor:
    """The loss of a call, and the parameters after it."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def train(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        loss = loss_of(layer(x), y, z)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    generator = torch.Generator().manual_seed(1)
    x, z = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (6, 4))
    y = torch.tensor([0, 3, 1, -1, 2, 0, -1, 1])
    step = flow.global_function(**options)(train) if job else train  # type: ignore[arg-type]
    loss = step(x, y, z)
    return torch.cat([torch.stack([loss + 0]), *(p.detach().flatten() for p in layer.parameters())])


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, z: out[y > 5].mean(),
        lambda out, y, z: F.cross_entropy(out[y > 5], y[y > 5]),
        lambda out, y, z: out[y == 3].var(0).mean(),
    ],
    ids=["mean", "cross entropy", "variance of one"],
)
def test_of_nothing_a_mean_is_nan_as_in_eager(loss: Loss) -> None:
    wanted, found = trained(loss, False), trained(loss, True)
    assert wanted.isnan().any()
    assert torch.equal(wanted.isnan(), found.isnan())


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, z: torch.where(z > 0, z, float("nan"))[z > 0].log().sum() * out[z > 0].mean(),
        lambda out, y, z: (z.clamp(min=0)[z > 0].log() * out[z > 0]).sum(),
        lambda out, y, z: (out - out.detach() + z.clamp(min=0))[z > 0].sqrt().sum(),
        lambda out, y, z: (out * 0 + out / z.clamp(min=1e-30))[z > 0].square().mean().log(),
        lambda out, y, z: torch.linalg.norm((out * (y > 0)[:, None])[y > 0], dim=1).sum(),
        lambda out, y, z: (out.exp() * 1e3)[out < 0.1].square().log().mean(),
        lambda out, y, z: (out[y >= 0].sigmoid() / out[y >= 0].sigmoid().sum(1, keepdim=True)).log().mean(),
    ],
    ids=["NaN", "log", "sqrt", "large", "norm", "exp", "shares"],
)
def test_what_is_not_finite_where_the_mask_does_not_choose_reaches_no_gradient(loss: Loss) -> None:
    wanted, found = trained(loss, False), trained(loss, True)
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_masks_that_are_computed_twice_are_the_same_unless_something_was_written_in_between() -> None:
    def same(out: Tensor, y: Tensor, z: Tensor) -> Tensor:
        labels = y.clone()
        labels[0] = -1
        return (out[labels >= 0] * z[labels >= 0]).mean()

    def written(out: Tensor, y: Tensor, z: Tensor) -> Tensor:
        labels = y.clone()
        rows = out[labels >= 0]
        labels[0] = -1
        return (rows * z[labels >= 0]).mean()

    def drawn(out: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (out[torch.rand(8) < 0.5] * z[torch.rand(8) < 0.5]).mean()

    torch.testing.assert_close(trained(same, True), trained(same, False), rtol=1e-9, atol=1e-9)
    for loss in (written, drawn):
        with pytest.raises(CaptureError, match=r"which were not found to be the same.*one mask for both"):
            trained(loss, True)


def test_what_was_written_since_it_was_selected_is_seen() -> None:
    def rows(out: Tensor, y: Tensor, z: Tensor) -> Tensor:
        found = torch.where(y > 0)[0]
        found -= 1
        return out[found + 1].mean() + out[found].square().mean()

    def column(out: Tensor, y: Tensor, z: Tensor) -> Tensor:
        found = out[y > 0]
        found[:, 1].mul_(2)
        return (found * z[y > 0]).sum()

    for loss in (rows, column):
        torch.testing.assert_close(trained(loss, True), trained(loss, False), rtol=1e-9, atol=1e-9)

    def sized(out: Tensor, y: Tensor, z: Tensor) -> Tensor:
        found = out[y > 0]
        found.mul_(2)
        return found.view(5, 4).sum()

    with pytest.raises(CaptureError, match=r"view has other sizes than those of the rows"):
        trained(sized, True)


def counts(out: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Numbers of rows that are changed, and used as sizes."""
    rows = out[y > 0]
    n = m = rows.shape[0]
    n += 2
    n *= 2
    m -= len(rows) - 1
    wanted = torch.zeros(len(rows), 4) + rows.new_ones(rows.size(0), 1)
    own = rows[torch.arange(len(rows)), y[y > 0] % 4] * torch.arange(rows.shape[0])
    flat = rows.view(len(rows), 2, -1).amax(-1).reshape(rows.size(0), -1)
    return (rows - wanted).square().sum() / n + own.sum() * m / len(own) + flat.sum() / float(len(flat)) ** 0.5


def test_numbers_of_rows_are_computed_with() -> None:
    torch.testing.assert_close(trained(counts, True), trained(counts, False), rtol=1e-9, atol=1e-9)


REFUSED: dict[str, tuple[Loss, str]] = {
    "dropout in a recurrent layer": (
        lambda out, y, z: nn.LSTM(4, 4, 2, dropout=0.5, dtype=out.dtype)(out[y > 0][None])[0].sum(),
        "lstm goes over the rows",
    ),
    "a mask of padding of all rows": (
        lambda out, y, z: F.multi_head_attention_forward(
            *[out[y > 0][None]] * 3,
            4,
            1,
            out.new_ones(12, 4),
            None,
            None,
            None,
            False,
            0.0,
            out.new_ones(4, 4),
            None,
            key_padding_mask=(z > 9)[:, :1],
        )[0].sum(),
        "key_padding_mask is that of others beside the rows",
    ),
    "an order": (
        lambda out, y, z: out[y > 0].sort(0).values[0].sum(),
        r"sort goes along the rows that out\[y > 0\] selects: their order and their number depend on values.*"
        r"torch\.where\(\(y > 0\)\[\.\.\., None\], out, float\('inf'\)\)\.sort\(0\)",
    ),
    "some of them": (
        lambda out, y, z: out[y > 0][:3].sum(),
        r"\[:3\] takes some of the rows.*a mask that has those alone",
    ),
    "random numbers": (
        lambda out, y, z: F.dropout(out[y > 0]).sum(),
        r"dropout draws numbers for the rows .*dropout over the whole tensor, before it is selected",
    ),
    "batch norm": (
        lambda out, y, z: F.batch_norm(out[y > 0], None, None, training=True).sum(),
        "batch norm takes the mean",
    ),
    "pairs": (
        lambda out, y, z: (out[y > 0] @ out[y > 0].t()).sum(),
        r"a product of matrices pairs the rows .*pairs\[\(y > 0\)\[:, None\] & \(y > 0\)\[None, :\]\]",
    ),
    "other rows": (
        lambda out, y, z: F.mse_loss(out[y > 0], z),
        r"mse_loss pairs a tensor of shape \[8, 4\] with the rows .*the same rows of it: y\[y > 0\]",
    ),
    "a function that is not known": (
        lambda out, y, z: torch.fft.rfft(out[y > 0]).abs().sum(),
        r"fft_rfft is called with the rows .*fft_rfft\(out\)\[y > 0\], which selects afterwards",
    ),
    "a function of all rows": (
        lambda out, y, z: torch.cov(out[y > 0].T).sum(),
        r"cov is called with the rows (?!.*which selects afterwards)",
    ),
    "a hook": (
        lambda out, y, z: out[y > 0].register_hook(lambda g: g),  # type: ignore[no-untyped-call]
        r"register_hook is called with the rows (?!.*which selects afterwards)",
    ),
    "another number of rows": (lambda out, y, z: out[y > 0].view(-1, 2, 4).sum(), "view groups the rows that"),
    "columns of other rows": (lambda out, y, z: assigned(out[y > 0], z), "an assignment changes some of the rows that"),
    "which one": (lambda out, y, z: out[y > 0].max(0).values.sum(), r"max along a dim says which .*amax\(dim\)"),
    "a whole number": (lambda out, y, z: out.sum() * y[y > 0].max(), r"of no rows torch would raise"),
    "a result": (lambda out, y, z: out[y > 0], r"grad|the step returns"),
    "what is caught": (lambda out, y, z: caught(out[y > 0]), "median sorts, or numbers, the rows"),
    "a function of autograd": (
        lambda out, y, z: Squared.apply(out[y > 0]).sum(),  # type: ignore[no-untyped-call]
        r"a torch\.autograd\.Function is called with the rows",
    ),
}


class Squared(torch.autograd.Function):
    """A square by hand."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def assigned(rows: Tensor, others: Tensor) -> Tensor:
    """A column that another tensor has so many rows of as there happen to be."""
    rows = rows.clone()
    rows[:, 0] = others[:5, 0]
    return rows.sum()


def caught(rows: Tensor) -> Tensor:
    """A refusal that the step catches."""
    try:
        return rows.median()
    except Exception:
        return rows.mean()


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_order_or_the_number_of_rows_is_refused_with_the_line(name: str) -> None:
    loss, said = REFUSED[name]
    with pytest.raises(CaptureError) as raised:
        trained(loss, True)
    text = str(raised.value)
    assert re.search(said, text, re.DOTALL), text
    assert re.match(r"\S+test_masks\.py:\d+: ", text), text
    assert "A plan has fixed sizes" in text


def test_selected_rows_that_a_step_returns_are_refused() -> None:
    @flow.global_function(type="predict")
    def predict(x: Tensor) -> Tensor:
        return x[x > 0]

    with pytest.raises(CaptureError, match=r"the step returns.* rows that x\[x > 0\] selects.*return x and x > 0"):
        predict(torch.ones(4))


def test_evaluation_reduces_over_a_selection() -> None:
    @flow.global_function(type="predict")
    def predict(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x[y >= 0].argmax(-1) == y[y >= 0]).float().mean(), x[y >= 0].amax()

    x, y = torch.randn(8, 4), torch.tensor([0, 1, -1, 3, 2, -1, 0, 1])
    right, largest = predict(x, y)
    assert float(right) == float((x[y >= 0].argmax(-1) == y[y >= 0]).float().mean())
    assert float(largest) == float(x[y >= 0].amax())


def test_so_does_inference_mode() -> None:
    @flow.global_function(type="predict")
    @torch.inference_mode()
    def predict(x: Tensor, y: Tensor) -> Tensor:
        rows, found = torch.where(y > 0)[0], x * 2
        found[y == 1] += 1
        return F.cross_entropy(found[y >= 0], y[y >= 0]) + found[rows].mean()

    x, y = torch.randn(8, 4), torch.tensor([0, 1, -1, 3, 2, -1, 0, 1])
    found = torch.where((y == 1)[:, None], x * 2 + 1, x * 2)
    torch.testing.assert_close(predict(x, y) + 0, F.cross_entropy(found[y >= 0], y[y >= 0]) + found[y > 0].mean())


def test_a_selection_within_what_a_checkpoint_computes_again() -> None:
    def loss(out: Tensor, y: Tensor, z: Tensor) -> Tensor:
        def inside(h: Tensor) -> Tensor:
            return F.cross_entropy(h.tanh()[y >= 0], y[y >= 0])

        found: Tensor = torch.utils.checkpoint.checkpoint(inside, out, use_reentrant=False)
        return found

    torch.testing.assert_close(trained(loss, True), trained(loss, False), rtol=1e-9, atol=1e-9)
