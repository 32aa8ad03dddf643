"""The mirrored view: every device runs the job on a batch of its own; it equals the consistent run of all batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow.script_state.search import find_state
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import compile_step
from actorflow_compiler.custom_ops.optimizers import SCALARS
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.hints.hints import resolve
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.values.variables import real_optimizer_state
from actorflow_scheduler.schedule import schedule
from models import CASES, Batch, Case, digit_batches, reference, setting

STEPS = 20


@dataclass
class Trained:
    """What a training has come to."""

    plan: Plan
    losses: list[Tensor] = field(default_factory=list)  # of each step, one for each device
    parts: list[dict[str, Tensor]] = field(default_factory=list)  # of each rank, its variables


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Tensor],
    lists: Sequence[Sequence[Tensor]],
    devices: int = 2,
    seeds: Sequence[Sequence[int]] | None = None,
) -> Trained:
    """Train in the mirrored view, all ranks in this process; ``lists`` are the stacked arguments of every step."""
    state = find_state(step, model=model, optimizer=optimizer)
    names = ["x", "y"][: len(lists[0])]
    arguments = [TensorArgument(n, tuple(t.shape), t.dtype, True) for n, t in zip(names, lists[0], strict=True)]
    laid = compile_step(
        StepRequest(
            UserStep("train", lambda given: [step(*given)], arguments, state, train=True, own=[True] * len(arguments)),
            TargetDevices(devices),
            Preferences(resolve(state.modules)),
        )
    )
    plan = schedule(laid.cut)
    values = {h.name: h.tensor.detach().clone() for h in state.held.values()} | real_optimizer_state(state)
    for v in plan.variables:
        values.setdefault(v.name, torch.zeros(v.shape, dtype=getattr(torch, v.dtype)))
    group = optimizer.param_groups[0]
    read = SCALARS["actorflow.sgd" if "momentum" in group else "actorflow.adam"]
    scalars = {f"optimizer.0.{key}": setting(group, key) for key in read}
    trained = Trained(plan)
    with LocalCluster(plan, variables=values) as cluster:
        for number, batch in enumerate(lists):
            inputs = dict(zip(names, batch, strict=True))
            of_ranks = seeds[number] if seeds else [number] * devices
            calls = [w.issue(0, inputs, {**scalars, SEED: s}) for w, s in zip(cluster.workers, of_ranks, strict=True)]
            for call in calls:
                call.wait(100.0)
            trained.losses += cluster.results(calls)
        trained.parts = [{n: t.clone() for n, t in w.variables.items()} for w in cluster.workers]
    return trained


def of_case(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor]]:
    model = case.model()
    optimizer = case.optimizer(model)
    loss_of, clip = case.loss, case.clip

    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def dealt(batches: Sequence[Batch], devices: int) -> list[list[Tensor]]:
    """Every batch in equal parts, one for each device."""
    return [[torch.stack(t.chunk(devices)) for t in batch] for batch in batches]


@pytest.mark.parametrize("devices", [1, 2])
def test_mirrored_equals_the_one_device_run_on_the_concatenated_batch(devices: int) -> None:
    case = CASES["mlp"]
    batches = digit_batches([12] * STEPS)
    model = case.model()
    expected, parameters = reference(model, case.optimizer(model), case.loss, batches)
    trained = train(*of_case(case), dealt(batches, devices), devices)
    losses = torch.stack(trained.losses)
    assert losses.shape == (STEPS, devices)
    torch.testing.assert_close(losses.mean(1), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    for part in trained.parts:
        for name, value in parameters.items():
            torch.testing.assert_close(part[f"model.{name}"], value, rtol=1e-5, atol=1e-6)


def test_the_models_stay_equal_on_all_devices_to_the_last_bit() -> None:
    case = CASES["mlp"]
    (first, *others) = train(*of_case(case), dealt(digit_batches([15] * 4), 3), 3).parts
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


def test_gradients_are_clipped_by_the_norm_of_their_mean() -> None:
    case = replace(CASES["mlp"], clip=0.1)
    batches = case.batches([12] * 3)
    model = case.model()
    expected, parameters = reference(model, case.optimizer(model), case.loss, batches, clip=case.clip)
    trained = train(*of_case(case), dealt(batches, 2))
    torch.testing.assert_close(torch.stack(trained.losses).mean(1), torch.tensor(expected), rtol=1e-5, atol=0)
    for name, value in parameters.items():
        torch.testing.assert_close(trained.parts[0][f"model.{name}"], value, rtol=1e-4, atol=1e-5)


def test_batch_norm_sees_each_devices_batch_and_keeps_the_mean_of_the_statistics() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    model, optimizer = make()
    batches = digit_batches([16, 16])
    expected = []
    for x, y in batches:  # what two devices do, one after the other
        before = {n: b.clone() for n, b in model.named_buffers()}
        ends, losses = [], []
        for part, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            model.load_state_dict(before, strict=False)
            loss = loss_of(model, part, targets)
            (loss / 2).backward()
            losses.append(loss.detach())
            ends.append({n: b.clone() for n, b in model.named_buffers()})
        optimizer.step()
        optimizer.zero_grad()
        means = {n: (ends[0][n] + ends[1][n]) / 2 if v.is_floating_point() else v for n, v in ends[0].items()}
        model.load_state_dict(means, strict=False)
        expected.append(torch.stack(losses))

    mirrored, its_optimizer = make()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(mirrored, x, y)
        loss.backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        return loss

    trained = train(mirrored, its_optimizer, step, dealt(batches, 2))
    torch.testing.assert_close(trained.losses, expected, rtol=1e-5, atol=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained.parts[1][f"model.{name}"], value, rtol=1e-5, atol=1e-6)


def test_every_device_drops_elements_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: Tensor) -> Tensor:
        out = model(x)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return out

    same = torch.ones(2, 3, 4)
    ((first, second), (again, _)) = train(model, optimizer, step, [[same]] * 2, seeds=[(7, 8), (7, 7)]).losses
    assert not torch.equal(first == 0, second == 0)
    assert torch.equal(first, again)
    assert first.eq(0).float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_a_gradient_of_a_gradient_is_that_of_the_mean_of_all_devices() -> None:
    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, mean: Callable[[Tensor], Tensor]) -> Any:
        def step(x: Tensor) -> Tensor:
            loss = mean(model(x).square().flatten(-2).mean(-1))
            found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            total = loss + sum(g.square().sum() for g in found)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(1)
    batches = [torch.randn(2, 4, 3) for _ in range(3)]
    model, optimizer = make()
    for batch in batches:
        step_of(model, optimizer, torch.mean)(batch)
    mirrored, its = make()
    trained = train(mirrored, its, step_of(mirrored, its, lambda loss: loss), [[b] for b in batches])
    torch.testing.assert_close(trained.parts[1]["model.weight"], model.weight.detach(), rtol=1e-5, atol=1e-6)


class Counting(nn.Module):
    """Counts how often each digit was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(10, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.counts += F.one_hot(out.argmax(-1), 10).sum(0)
        return out


def refused(model: nn.Module, match: str, wrap: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = wrap(model(x)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with pytest.raises(flow.ActorflowError, match=match):
        train(model, optimizer, step, [[torch.ones(2, 4, 64)]])


def test_state_that_cannot_be_averaged_is_refused_by_its_name() -> None:
    refused(Counting(), r"model.counts \(int64\[10\]\) would become different on each device")


def hinted() -> nn.Module:
    model = nn.Linear(64, 10)
    flow.distribute(model, {"weight": flow.sbp.split(0)})
    return model


def placed() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 10))
    flow.place(model, {"0": flow.placement("cpu", [0])})
    return model


def zeroed() -> nn.Module:
    model = nn.Linear(64, 10)
    flow.zero(model, 1)
    return model


def staged() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    flow.place(model, stages=2)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (hinted, r"S\(0\) for model.weight \(flow.distribute\(Linear"),
        (placed, r"flow.place\(Sequential, \{'0'"),
        (zeroed, r"flow.zero\(Linear"),
        (staged, r"flow.place\(Sequential, stages=2\)"),
    ],
)
def test_hints_that_are_no_data_parallelism_are_refused_as_the_user_wrote_them(
    make: Callable[[], nn.Module], said: str
) -> None:
    refused(make(), rf"mirrored view, and {said}.* data parallelism only")


def test_ops_that_are_placed_cut_or_packed_are_refused() -> None:
    def on_one(x: Tensor) -> Tensor:
        with flow.scope.placement("cpu", [0]):
            return x * 2

    refused(nn.Linear(64, 10), r"a placement of ops on cpu:\[0\] was found.* data parallelism only", on_one)
    refused(nn.Linear(64, 10), "flow.constrain.* data parallelism only", lambda x: flow.constrain(x, flow.sbp.split(0)))
    refused(nn.Linear(64, 10), "flow.unpack.* data parallelism only", lambda x: flow.unpack(x, 2))


def test_a_scope_over_all_devices_changes_nothing() -> None:
    def trained(scope: contextlib.AbstractContextManager[Any]) -> Trained:
        model, optimizer, _ = of_case(CASES["mlp"])

        def step(x: Tensor, y: Tensor) -> Tensor:
            with scope:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train(model, optimizer, step, dealt(digit_batches([8, 8]), 2))

    plain, scoped = trained(contextlib.nullcontext()), trained(flow.scope.placement("cpu", [0, 1]))
    assert torch.equal(torch.stack(plain.losses), torch.stack(scoped.losses))
