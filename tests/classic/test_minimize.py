"""``minimize`` is a step of torch's optimizer, over what the loss depends on, at the schedule's rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow.classic.registry import REGISTRY
from actorflow_compiler.core.errors import CallError, StateError
from classic.rehearsed import play, rehearse

pytestmark = pytest.mark.usefixtures("forget")
opt = flow.optimizer
STEPS = 6
varying = opt.PolynomialScheduler(0.1, STEPS, 0.01)
steady = opt.PiecewiseConstantScheduler([2], [0.1, 0.05])
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1) ** 2


def network(x: Tensor) -> Tensor:
    hidden = flow.layers.dense(
        x, 8, activation=flow.math.tanh, kernel_initializer=flow.random_normal_initializer(stddev=0.5), name="in"
    )
    return flow.layers.dense(hidden, 1, kernel_initializer=flow.truncated_normal(0.5), name="out")[:, 0]


def errors(x: Tensor, y: Tensor) -> Tensor:
    """A loss for each sample."""
    return flow.math.square(network(x) - y)


def twin() -> nn.Sequential:
    """The network as torch's modules, with the same values."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    names = ("in-weight", "in-bias", "out-weight", "out-bias")
    with torch.no_grad():
        for parameter, name in zip(model.parameters(), names, strict=True):
            parameter.copy_(REGISTRY[name])
    return model


OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (lambda: opt.SGD(varying, momentum=0), lambda p: torch.optim.SGD(p)),
    "SGD with momentum by default": (lambda: opt.SGD(varying), lambda p: torch.optim.SGD(p, momentum=0.9)),
    "Adam": (
        lambda: opt.Adam(varying, 0.8, 0.99, epsilon=1e-6, do_bias_correction=True),
        lambda p: torch.optim.Adam(p, betas=(0.8, 0.99), eps=1e-6),
    ),
    "AdamW": (
        lambda: opt.AdamW(varying, do_bias_correction=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    ),
    "Adagrad": (
        lambda: opt.Adagrad(varying, 0.01, 0.1), lambda p: torch.optim.Adagrad(p, 1, 0.01, 0, 0.1),
    ),
    "RMSProp": (lambda: opt.RMSProp(steady, centered=True), lambda p: torch.optim.RMSprop(p, centered=True)),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_minimize_equals_torchs_optimizer(case: str):
    ours, torchs = OPTIMIZERS[case]

    def body(x: Tensor, y: Tensor) -> Tensor:
        loss = errors(x, y)
        ours().minimize(loss)
        return loss

    recording = rehearse(body, X, Y)
    model = twin()
    optimizer = torchs(model.parameters())
    schedule = ours().lr_scheduler
    for step in range(STEPS):
        loss = (model(X)[:, 0] - Y) ** 2
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(play(recording, body, X, Y), loss)
    assert recording.optimizers[0].steps == STEPS
    torch.testing.assert_close(REGISTRY["out-weight"], model[2].weight)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_without_bias_correction_follows_oneflows_formula(decay: float):
    beta1, beta2, epsilon = 0.9, 0.99, 1e-12

    def body(x: Tensor, y: Tensor) -> None:
        opt.AdamW(varying, beta1, beta2, epsilon, weight_decay=decay).minimize(errors(x, y))

    recording = rehearse(body, X, Y)
    model = twin()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    for step in range(STEPS):
        play(recording, body, X, Y)
        gradients = torch.autograd.grad(((model(X)[:, 0] - Y) ** 2).mean(), list(model.parameters()))
        with torch.no_grad():
            for p, g, (m, v) in zip(model.parameters(), gradients, moments, strict=True):
                m.mul_(beta1).add_((1 - beta1) * g)
                v.mul_(beta2).add_((1 - beta2) * g * g)
                p.sub_(varying.rate(step) * (m / (v.sqrt() + epsilon) + decay * p))
    for name, p in zip(("in-weight", "in-bias", "out-weight", "out-bias"), model.parameters(), strict=True):
        torch.testing.assert_close(REGISTRY[name], p, rtol=1e-4, atol=1e-6)


def gradients_of(minimize: Callable[[Tensor], object], body: Callable[[Tensor, Tensor], Tensor] = errors) -> Any:
    """The changes of one step of SGD at a rate of 1: the negative gradients that were used."""

    def whole(x: Tensor, y: Tensor) -> None:
        minimize(body(x, y))

    recording = rehearse(whole, X, Y)
    before = flow.get_all_variables()
    play(recording, whole, X, Y)
    return {n: before[n] - REGISTRY[n].detach() for n in before}, before


def sgd(**more: Any) -> Any:
    return opt.SGD(opt.PiecewiseConstantScheduler([], [1.0]), momentum=0, **more)


def test_gradients_are_clipped_together():
    def minimize(loss: Tensor) -> None:
        sgd(grad_clipping=opt.grad_clipping.by_global_norm(0.25)).minimize(loss)

    found, _ = gradients_of(minimize)
    model = twin()
    with torch.no_grad():
        for p, change in zip(model.parameters(), (found[n] for n in found), strict=True):
            p.add_(change)
    gradients = torch.autograd.grad(((model(X)[:, 0] - Y) ** 2).mean(), list(model.parameters()))
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    assert norm > 0.25
    for change, gradient in zip(found.values(), gradients, strict=True):
        torch.testing.assert_close(change, gradient * 0.25 / norm, rtol=1e-4, atol=1e-5)


def test_regularizers_add_to_gradients_before_clipping():
    def body(x: Tensor, y: Tensor) -> Tensor:
        weight = flow.get_variable(
            "w", (4,), initializer=flow.random_normal_initializer(), regularizer=flow.regularizers.l1_l2(0.5, 0.25)
        )
        return (weight * 0).sum()

    found, before = gradients_of(lambda loss: sgd().minimize(loss), body)
    torch.testing.assert_close(found["w"], 0.5 * before["w"].sign() + 0.25 * before["w"])
    clip = opt.grad_clipping.by_global_norm(0.1)
    found, _ = gradients_of(lambda loss: sgd(grad_clipping=clip).minimize(loss), body)
    assert found["w"].norm().item() == pytest.approx(0.1, rel=1e-4)


def test_several_losses_are_added_up_and_each_counts_by_its_mean():
    found, _ = gradients_of(lambda loss: sgd().minimize([loss, loss.sum() / 2]))
    model = twin()
    with torch.no_grad():
        for p, change in zip(model.parameters(), found.values(), strict=True):
            p.add_(change)
    loss = (model(X)[:, 0] - Y) ** 2
    expected = torch.autograd.grad(loss.mean() + loss.sum() / 2, list(model.parameters()))
    for change, gradient in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(change, gradient, rtol=1e-3, atol=1e-4)


def test_only_what_the_loss_depends_on_and_can_be_trained_is_trained():
    def body(x: Tensor, y: Tensor) -> None:
        loss = errors(x, y)
        flow.get_variable("aside", (2,), initializer=flow.ones_initializer())
        frozen = flow.get_variable("frozen", (), initializer=flow.ones_initializer(), trainable=False)
        cut = flow.get_variable("cut", (), initializer=flow.ones_initializer())
        sgd().minimize(loss * frozen * cut.detach())

    assert rehearse(body, X, Y).optimizers[0].variables == ("in-weight", "in-bias", "out-weight", "out-bias")


def test_some_variables_may_be_named():
    named, _ = gradients_of(lambda loss: sgd().minimize(loss, var_list=["out-bias"]))
    assert {n for n, change in named.items() if change.any()} == {"out-bias"}
    assert all(REGISTRY[n].grad is None for n in REGISTRY.names())
    of_optimizer, _ = gradients_of(lambda loss: sgd(variables=["in-bias", "out-bias"]).minimize(loss))
    assert {n for n, change in of_optimizer.items() if change.any()} == {"in-bias", "out-bias"}


@pytest.mark.parametrize(
    ("patterns", "decayed"),
    [
        ({"weight_decay_excludes": ["bias", "^out"]}, {"in-weight"}),
        ({"weight_decay_includes": "bias"}, {"in-bias", "out-bias"}),
    ],
    ids=["excludes", "includes"],
)
def test_weight_decay_is_for_some_variables(patterns: dict[str, Any], decayed: set[str]):
    def body(x: Tensor, y: Tensor) -> None:
        opt.AdamW(steady, weight_decay=0.5, do_bias_correction=True, **patterns).minimize(errors(x, y))

    minimizer = rehearse(body, X, Y).optimizers[0]
    order = iter(minimizer.variables)
    of = {next(order): g["weight_decay"] for g in minimizer.optimizer.param_groups for _ in g["params"]}
    assert {name for name, decay in of.items() if decay} == decayed


def test_a_rehearsal_with_other_shapes_keeps_the_optimizer():
    def body(x: Tensor, y: Tensor) -> None:
        sgd().minimize(errors(x, y))

    first = rehearse(body, X, Y)
    again = rehearse(body, X[:3], Y[:3], again=first)
    assert again.optimizers == first.optimizers


def test_a_call_that_is_refused_does_not_count():
    def body(x: Tensor, y: Tensor) -> None:
        opt.SGD(varying).minimize(errors(x, y))

    recording = rehearse(body, X, Y)
    with pytest.raises(CallError), recording.call():
        raise CallError("refused")
    assert recording.optimizers[0].steps == 0


def twice(x: Tensor, y: Tensor) -> None:
    loss = errors(x, y)
    sgd().minimize(loss)
    opt.Adam(steady).minimize(loss)  # the second one


def late(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        sgd().minimize(errors(x, y))


MISTAKES: dict[str, tuple[Callable[..., Any], type[Exception], list[str]]] = {
    "minimize twice": (
        twice, CallError, ["    sgd().minimize(loss)".strip(), "opt.Adam(steady).minimize(loss)  # the second one"],
    ),
    "minimize in a predict job": (late, CallError, ['type="train" was expected']),
    "a loss without variables": (lambda x, y: sgd().minimize(y.mean()), StateError, ["depends on no trainable"]),
    "a loss of whole numbers": (lambda x, y: sgd().minimize(y.long()), StateError, ["floating-point"]),
    "no loss": (lambda x, y: sgd().minimize([]), StateError, ["without a loss"]),
    "a variable that is not in the loss": (
        lambda x, y: sgd().minimize(errors(x, y), ["out-bias", "head"]), StateError, ["'head'", "in-weight, in-bias"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_with_its_line(case: str):
    body, kind, said = MISTAKES[case]
    with pytest.raises(kind) as error:
        rehearse(body, X, Y)
    assert [text for text in said if text not in str(error.value)] == []
    assert f"{__file__}:" in str(error.value)


def test_outside_of_a_job_function_is_an_error():
    with pytest.raises(CallError, match=r"SGD\.minimize was called outside of a job function"):
        sgd().minimize(torch.ones(()))
