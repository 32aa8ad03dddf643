"""A step that decides by a counter or a flag of its own, which it keeps in a tensor, does as eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from test_runs import actorflow


class Warmed(nn.Module):
    """Scales by what its first batches were like; its flag and its counter are buffers."""

    ready: Tensor
    seen: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(4))
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Let the first batch give the scale, and every third move it."""
        if not self.ready:
            self.scale.copy_(1 / x.detach().std(0))
            self.ready.fill_(True)
        if self.training:
            self.seen += 1
            if self.seen % 3 == 0:
                self.scale.mul_(0.9)
        found: Tensor = self.linear(x * self.scale)
        return found


def trained(
    model: nn.Module, job: Callable[..., Any], between: Callable[[int], object] = lambda _: None
) -> list[float]:
    """Losses of eight calls."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    g = torch.Generator().manual_seed(0)
    losses = []
    for call in range(8):
        losses.append(train(torch.randn(6, 4, generator=g)))
        between(call)
    return [float(loss) for loss in losses]


def pair() -> tuple[Warmed, Warmed]:
    """Two that are alike."""
    torch.manual_seed(0)
    model = Warmed()
    return model, copy.deepcopy(model)


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A job that is none."""
    return function


def alike(one: nn.Module, other: nn.Module) -> None:
    """The same state."""
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_flags_and_counters_in_buffers_decide_as_eagerly() -> None:
    eager, planned = pair()
    assert trained(planned, flow.global_function) == pytest.approx(trained(eager, plainly))
    alike(planned, eager)


def test_what_the_script_writes_between_calls_decides_the_next_one() -> None:
    def resets(model: Warmed) -> Callable[[int], object]:
        saved = copy.deepcopy(model.state_dict())

        def between(call: int) -> None:
            if call == 2:
                model.ready.fill_(False)
            if call == 5:
                model.load_state_dict(saved)

        return between

    eager, planned = pair()
    assert trained(planned, flow.global_function, resets(planned)) == pytest.approx(
        trained(eager, plainly, resets(eager))
    )
    alike(planned, eager)


def test_what_another_job_does_to_a_counter_is_known() -> None:
    count = torch.zeros((), dtype=torch.long)

    @flow.global_function
    def add(x: Tensor) -> Tensor:
        count.add_(2)
        return x + 0

    @flow.global_function
    def jump(x: Tensor) -> Tensor:
        count.copy_(x.sum().long())
        return x + 0

    @flow.global_function
    def look(x: Tensor) -> Tensor:
        return x * 2 if count > 3 else x * 3

    one = torch.ones(1)
    found = []
    for job in (look, add, look, add, look, jump, look, add, add, look):
        result = job(one)
        if job is look:
            found.append(float(result))
    assert found == [3, 3, 2, 3, 2]
    assert len(look.plans) == 2


def test_a_number_that_settles_is_known_and_one_that_is_new_in_each_call_is_refused() -> None:
    state = torch.zeros((), dtype=torch.long)

    @flow.global_function
    def settles(x: Tensor) -> Tensor:
        result = x * (1 + state.item())
        state.fill_(1)
        return result

    assert [float(settles(torch.ones(1))) for _ in range(3)] == [1, 2, 2]
    steps = torch.zeros((), dtype=torch.long)

    @flow.global_function
    def grows(x: Tensor) -> Tensor:
        steps.add_(1)
        return x * min(0.9, 1 / float(steps))

    assert [round(float(grows(torch.ones(1))), 4) for _ in range(4)] == [0.9, 0.5, 0.3333, 0.25]
    assert len(grows.plans) == 1

    @flow.global_function
    def rounds(x: Tensor) -> Tensor:
        steps.add_(1)
        return x * round(1 / float(steps), 2)

    with pytest.raises(flow.CaptureError, match=r"round\(1 / float\(steps\), 2\)\n  the step looks at the value"):
        rounds(torch.ones(1))


def test_a_condition_of_what_depends_on_data_is_refused() -> None:
    mean = torch.zeros(())

    @flow.global_function
    def train(x: Tensor) -> Tensor:
        if mean > 0.5:
            x = x * 2
        mean.mul_(0.9).add_(x.mean())
        return x + 0

    with pytest.raises(flow.CaptureError, match=r"if mean > 0.5:\n  the step looks at the value"):
        train(torch.ones(2))


def test_a_view_through_which_a_counter_is_written_counts() -> None:
    counts = torch.zeros(3, dtype=torch.long)

    @flow.global_function
    def train(x: Tensor) -> Tensor:
        counts.view(3, 1)[1] += 1
        x = x * 2 if counts[1] > 2 else x * 3
        counts[1:].add_(1)
        return x

    assert [float(train(torch.ones(1))) for _ in range(4)] == [3, 2, 2, 2]
    assert counts.detach().tolist() == [0, 8, 4]


FAILING = """
import torch
import actorflow as flow

model = torch.nn.Embedding(4, 3)
count = torch.zeros((), dtype=torch.long)

@flow.global_function
def train(x):
    count.add_(1)
    return (2 if count > 1 else 1) * model(x).sum()

float(train(torch.tensor([1])).detach())
for row in (9, 1):
    try:
        float(train(torch.tensor([row])).detach())
    except flow.ActorError as error:
        print(error)
"""


def test_a_failing_call_that_moves_what_is_decided_by_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    run = actorflow("run", str(tmp_path / "failing.py"), "--devices", "1")
    assert run.stdout.count("The call had changed count before, and no call can follow it") == 2, run.stdout


def test_what_is_detached_from_a_parameter_changes_it() -> None:
    model = nn.Linear(3, 2)
    predict = flow.global_function(type="predict")(lambda x: model(x))
    predict(torch.ones(1, 3))
    model.weight.detach().fill_(2.0)
    model.weight.detach()[0, 1:] *= 3
    torch._foreach_add_([model.bias.detach().zero_()], 1.0)
    torch.testing.assert_close(predict(torch.ones(1, 3)) + 0, torch.tensor([[15.0, 7.0]]))
    before = model.weight.detach()
    model.weight.detach().mul_(2)
    before.view(-1)[0].add_(1)
    assert model.state_dict()["weight"].tolist() == [[5, 12, 12], [4, 4, 4]]
    assert type(before * 1) is Tensor
    assert type(model.state_dict()["weight"]) is Tensor
    assert type(copy.deepcopy(before)) is Tensor


def test_an_optimizer_that_was_prepared_for_several_processes_is_refused() -> None:
    class State:
        num_processes = 2

    class AcceleratedOptimizer(torch.optim.SGD):
        accelerator_state = State()

    AcceleratedOptimizer.__module__ = "accelerate.optimizer"
    layer = nn.Linear(4, 3)
    optimizer = AcceleratedOptimizer(layer.parameters(), 0.1)

    @flow.global_function
    def train(x: Tensor) -> None:
        layer(x).sum().backward()
        optimizer.step()

    with pytest.raises(flow.CaptureError, match=r"optimizer was prepared by accelerate for 2 processes.*expected: the"):
        train(torch.ones(2, 4))


class Synchronising(torch.optim.Optimizer):
    """Steps the optimizer that it wraps in every second call, as accelerate's does within ``accumulate``."""

    def __init__(self, optimizer: torch.optim.Optimizer, counter: Any) -> None:
        self.optimizer, self.counter = optimizer, counter

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self) -> None:  # type: ignore[override]
        if self.counter.calls % 2 == 0:
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.counter.calls % 2 == 0:
            self.optimizer.zero_grad(set_to_none)


def test_an_optimizer_that_was_prepared_for_one_process_is_the_one_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Synchronising, "__module__", "accelerate.optimizer")

    def losses(job: bool) -> list[float]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        counter = SimpleNamespace(calls=0)
        optimizer = Synchronising(torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9), counter)

        def train(x: Tensor) -> Tensor:
            counter.calls += 1
            loss: Tensor = layer(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = flow.global_function(train) if job else train
        return [run(torch.full((2, 4), 0.1 * i + 0.1)).item() for i in range(7)]

    assert losses(job=True) == pytest.approx(losses(job=False), rel=1e-5)
