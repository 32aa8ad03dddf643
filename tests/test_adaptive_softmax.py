"""``nn.AdaptiveLogSoftmaxWithLoss`` with targets is trained as eagerly, also where a cluster has no target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CallError

Decorate = Callable[[Any], Any]
Optimizers = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def layer(**options: Any) -> nn.AdaptiveLogSoftmaxWithLoss:
    torch.manual_seed(0)
    return nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10], **options)


def batches(rows: int, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 16, generator=g), torch.randint(20, (rows,), generator=g)) for _ in range(count)]


def values(tensors: Any) -> Tensor:
    return torch.cat([torch.as_tensor(t.detach().tolist()).reshape(-1).double() for t in tensors])


def trained(
    decorate: Decorate, optimizer_of: Optimizers, rows: int, loss_of: Any = lambda a, x, y: a(x, y), **options: Any
) -> Tensor:
    """What the steps return, and the weights at the end."""
    a = layer(**options)
    optimizer = optimizer_of(a.parameters())

    @decorate
    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        found, loss = loss_of(a, x, y)
        loss.backward()
        optimizer.step()
        return found, loss

    made = [t for batch in batches(rows) for t in step(*batch)]
    return values([*made, *a.parameters()])


def as_eagerly(*args: Any, **options: Any) -> bool:
    wanted = trained(lambda f: f, *args, **options)
    return torch.allclose(trained(flow.global_function, *args, **options), wanted, rtol=0, atol=1e-9)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("rows", [1, 2, 8])  # of one or two rows not every cluster has one
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.05),
        lambda p: torch.optim.RMSprop(p, 0.01),
    ],
    ids=["SGD", "Adam", "RMSprop"],
)
def test_weights_of_a_cluster_without_a_target_are_passed_over(optimizer: Optimizers, rows: int) -> None:
    assert as_eagerly(optimizer, rows)


def test_the_head_may_have_a_bias_and_tails_other_widths() -> None:
    assert as_eagerly(lambda p: torch.optim.AdamW(p, 0.05), 3, head_bias=True, div_value=2.0)


def test_a_row_without_a_batch_is_one() -> None:
    assert as_eagerly(lambda p: torch.optim.Adam(p, 0.05), 2, lambda a, x, y: a(x[0], y[0]))


def test_what_else_the_loss_depends_on_gives_all_weights_a_gradient() -> None:
    def loss_of(a: Any, x: Tensor, y: Tensor) -> Any:
        found, loss = a(x, y)
        return found, loss + sum(p.square().sum() for p in a.parameters())

    assert as_eagerly(lambda p: torch.optim.Adam(p, 0.05), 2, loss_of)


@pytest.mark.slow
def test_two_calls_whose_clusters_differ_are_refused_and_alike_ones_run() -> None:
    def loss_of(a: Any, x: Tensor, y: Tensor) -> Any:
        return a(x, y)[0], a(x, y)[1] + a(-x, y)[1]

    assert as_eagerly(lambda p: torch.optim.Adam(p, 0.05), 64, loss_of)
    with pytest.raises(RuntimeError, match="no target of the batch is in one of the clusters"):
        trained(flow.global_function, lambda p: torch.optim.Adam(p, 0.05), 2, loss_of)


@pytest.mark.slow
def test_gradients_left_for_later_calls_need_a_target_in_every_cluster() -> None:
    a = layer()
    optimizer = torch.optim.Adam(a.parameters())

    @flow.global_function
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = a(x, y).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    x = torch.randn(3, 16)
    step(x, torch.tensor([1, 7, 15]))
    with pytest.raises(RuntimeError, match="that are left for a later one"):
        step(x, torch.tensor([1, 7, 7]))
    assert optimizer is not None


def test_weights_that_a_step_changes_itself_need_a_target_in_every_cluster() -> None:
    def run(decorate: Decorate) -> tuple[list[Tensor], Callable[..., Any]]:
        a = layer()

        @decorate
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = a(x, y).loss
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for p in a.parameters():
                    if p.grad is not None:
                        p -= 0.1 * (p.grad + 0.1 * p)
                        p.grad = None
            return loss.detach()

        x = torch.linspace(-1, 1, 48).view(3, 16)
        return [step(x, torch.tensor([1, 7, 15])) + 0 for _ in range(3)] + [*a.parameters()], step

    (wanted, _), (found, step) = run(lambda f: f), run(flow.global_function)
    assert torch.allclose(values(found), values(wanted), rtol=0, atol=1e-9)
    with pytest.raises(RuntimeError, match="weights that no optimizer changes"):
        step(torch.randn(3, 16), torch.tensor([1, 7, 7]))


@pytest.mark.parametrize("bad", [pytest.param(-1, marks=pytest.mark.slow), 20])
def test_a_target_out_of_range_raises_and_changes_nothing(bad: int) -> None:
    a = layer()
    optimizer = torch.optim.SGD(a.parameters(), 0.1)

    @flow.global_function
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = a(x, y).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    good = batches(4, 1)[0]
    step(*good)
    before = values(a.parameters())
    with pytest.raises(RuntimeError, match=r"Target values should be in \[0, 19\]"):
        step(good[0], torch.tensor([1, bad, 3, 4]))
    assert torch.equal(values(a.parameters()), before)
    step(*good)


def test_targets_of_another_batch_are_refused_as_by_torch() -> None:
    with pytest.raises(CallError, match="same size in the batch dimension"):
        trained(flow.global_function, lambda p: torch.optim.SGD(p, 0.1), 4, lambda a, x, y: a(x[:2], y))


def test_the_likeliest_class_is_found() -> None:
    a = layer()

    @flow.global_function(type="predict")
    def predict(x: Tensor) -> Tensor:
        return a.predict(x)

    for x, _ in batches(9):
        wanted = layer().predict(4 * x)
        assert torch.equal(torch.as_tensor(predict(4 * x).tolist()), wanted)
