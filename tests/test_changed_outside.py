"""What a script does between calls to tensors, and to what optimizers keep, is what the next call works with."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import actorflow as flow
from actorflow.session.process import current
from actorflow_compiler.core.errors import CaptureError, StateError

CALLS, WIDTH = 6, 6
Change = Callable[[SimpleNamespace], object]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Remembering(nn.Module):
    """A layer, and a tensor and a view of it that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.loose = torch.ones(2, WIDTH)
        self.view = self.loose[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.loose.sum(0)


class Momentum(torch.optim.Optimizer):
    """By hand: its state is made in the first step, of the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["steps"] = p.grad.clone(), 0
                state["steps"] += 1
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * state["mean"] / state["steps"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "by hand": Momentum,
}


def trained(change: Change, job: bool, optimizer: str = "momentum", every: int = 1) -> list[Tensor]:
    """All losses, and the weights at the end; ``change`` before the fourth and the sixth call, some of which step."""
    torch.manual_seed(0)
    s = SimpleNamespace(model=Remembering(), last=True, kept=[])
    s.optimizer = OPTIMIZERS[optimizer](s.model.parameters())

    def step(x: Tensor) -> Tensor:
        loss: Tensor = (s.model(x) - 1).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if s.last:
            s.optimizer.step()
            s.optimizer.zero_grad()
        return loss

    run = flow.global_function(step) if job else step
    losses = []
    for i in range(CALLS):
        s.i, s.last = i, i % every == every - 1
        if i in (3, 5):
            change(s)
        losses.append(run(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i))).detach().clone())
    return [*losses, *s.model.state_dict().values()]


def check(change: Change, optimizer: str = "momentum", every: int = 1) -> None:
    wanted, found = (trained(change, job, optimizer, every) for job in (False, True))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    untouched = trained(lambda s: None, False, optimizer, every)
    assert any(not torch.equal(a, b) for a, b in zip(untouched, wanted, strict=True)), "the change changes nothing"


def exchanged(s: SimpleNamespace) -> None:
    """First another layer and optimizer, then a change of a tensor that both models read."""
    if s.i == 3:
        s.model.layer = nn.Linear(WIDTH, WIDTH)
        s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
    s.model.loose.mul_(0.5)


def copied(s: SimpleNamespace) -> None:
    """A copy's view shares memory with the copied tensor, and no count of versions."""
    if s.i == 3:
        s.model = copy.deepcopy(s.model)
        s.optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
    else:
        s.model.view.mul_(0.5)


TENSORS: dict[str, Change] = {
    "through data": lambda s: s.model.loose.data.mul_(0.5),
    "through NumPy": lambda s: s.model.loose.numpy().__setitem__((0, 1), s.i),
    "through a view": lambda s: s.model.view.mul_(0.5),
    "through a view of a copy": copied,
    "with another layer": exchanged,
}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("change", TENSORS)
def test_a_tensor_that_is_changed_is_read_anew(change: str) -> None:
    check(TENSORS[change])


def test_a_large_tensor_that_is_changed_without_a_word_is_read_anew() -> None:
    table = torch.ones(1000, WIDTH).t().contiguous().t()

    @flow.global_function(type="predict")
    def read(x: Tensor) -> Tensor:
        return x * table.sum(0)

    assert read(torch.ones(WIDTH)).sum() == 6000
    table.data.mul_(2)
    assert read(torch.ones(WIDTH)).sum() == 12000


def test_nan_that_stays_is_no_change() -> None:
    table = torch.tensor([1.0, float("nan")])

    @flow.global_function(type="predict")
    def read(x: Tensor) -> Tensor:
        return x + table.nan_to_num()

    read(torch.ones(2))
    running = current().runtime
    assert running is not None
    variables = running.variables
    before = variables.writes
    read(torch.ones(2))
    assert variables.writes == before


def replaced(s: SimpleNamespace) -> None:
    for p, values in s.optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                values[name] = torch.full_like(p, 0.01)


def zeroed(s: SimpleNamespace) -> None:
    for values in s.optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor):
                value.zero_()


STATES: dict[str, Change] = {
    "cleared": lambda s: s.optimizer.state.clear(),
    "anew": lambda s: setattr(s.optimizer, "state", defaultdict(dict)),
    "popped": lambda s: s.optimizer.state.pop(s.model.layer.weight, None),
    "replaced": replaced,
    "loaded": lambda s: s.optimizer.load_state_dict({**s.optimizer.state_dict(), "state": {}}),
}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("change", STATES)
def test_an_optimizer_steps_with_the_state_that_the_script_gives_it(change: str, optimizer: str, every: int) -> None:
    if (change, optimizer) == ("popped", "dampening"):
        with pytest.raises(StateError, match=r"layer\.weight.*dampening"):
            trained(STATES[change], True, optimizer, every)
    else:
        check(STATES[change], optimizer, every)


def grown(job: bool, dampening: float) -> list[Tensor]:
    """Losses of a training whose optimizer gets another parameter in the middle."""
    torch.manual_seed(0)
    model, more = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = (model(x) * more).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = flow.global_function(step) if job else step
    losses = []
    for i in range(CALLS):
        if i == 3:
            optimizer.add_param_group({"params": [more]})
        losses.append(run(torch.ones(4, WIDTH)).detach().clone())
    return losses


def test_a_parameter_that_comes_later_takes_its_first_step_or_is_refused() -> None:
    torch.testing.assert_close(grown(True, 0.0), grown(False, 0.0), rtol=1e-9, atol=1e-9)
    with pytest.raises(StateError, match=r"has been stepped by SGD with dampening, and more\w* has not"):
        grown(True, 0.5)


def test_momenta_may_be_zeroed_in_place() -> None:
    check(zeroed, "momentum")


def averaged(s: SimpleNamespace) -> None:
    """Weights are pulled to their mean outside of jobs."""
    with torch.no_grad():
        s.mean = parameters_to_vector(s.model.parameters()) * 0.5
        vector_to_parameters(s.mean, s.model.parameters())
        for p in s.model.parameters():
            p.add_(p.abs().mean(), alpha=0.1).clamp_(-0.3, 0.3)
        s.model.layer.weight[0, 1:3] = 0.25
    s.model.layer.bias.data[2:].mul_(0.5)


WEIGHTS: dict[str, Change] = {
    "by their mean": averaged,
    "by an initialisation": lambda s: nn.init.constant_(s.model.layer.weight, 0.1),
    "by data": lambda s: setattr(s.model.layer.weight, "data", torch.eye(WIDTH)),
    "by load_state_dict": lambda s: s.model.load_state_dict({"layer.bias": torch.ones(WIDTH)}, strict=False),
}


@pytest.mark.parametrize("change", WEIGHTS)
def test_weights_are_changed_outside_of_jobs(change: str) -> None:
    check(WEIGHTS[change])


def memories(job: bool, alias: bool = False, grows: bool = False) -> list[Tensor]:
    """Results of a step that puts another list in place of one of memories."""
    torch.manual_seed(0)
    s = SimpleNamespace(rows=[torch.zeros(WIDTH), torch.ones(WIDTH), torch.full((WIDTH,), 2.0)])
    s.other = s.rows if alias else None

    def step(x: Tensor) -> Tensor:
        out = x + s.rows[0] * s.rows[1] + s.rows[2]
        s.rows = [s.rows[2], s.rows[0], out.mean(0)]
        return out + s.other[0] if alias else out

    run = flow.global_function(step) if job else step
    found = [run(torch.randn(4, WIDTH)).clone() for _ in range(CALLS)]
    return [*found, *(t.clone() for t in s.rows)]


def test_a_list_of_memories_may_be_replaced() -> None:
    torch.testing.assert_close(memories(True), memories(False), rtol=1e-9, atol=1e-9)


def test_a_list_that_somebody_else_holds_may_not() -> None:
    with pytest.raises(CaptureError, match=r"rows and .* would be one tensor after the step"):
        memories(True, alias=True)


def test_a_descriptor_of_the_users_is_followed() -> None:
    class Twice:
        def __set_name__(self, owner: type, name: str) -> None:
            self.name = "_" + name

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return getattr(instance, self.name) * 2

        def __set__(self, instance: Any, value: float) -> None:
            setattr(instance, self.name, value)

    class Settings:
        gain = Twice()

        def __init__(self) -> None:
            self.gain = 0.5

    settings = Settings()
    run = flow.global_function(type="predict")(lambda x: x * settings.gain)
    assert run(torch.ones(1)) == 1
    settings.gain = 2.0
    assert run(torch.ones(1)) == 4


def test_what_was_taken_of_data_keeps_its_value_when_something_else_takes_its_place() -> None:
    def run(job: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()], 0.1)

        def step(x: Tensor) -> Tensor:
            loss = (model(x).sin() + 0.1 * other(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        call = flow.global_function(step) if job else step
        found = []
        for number in range(4):
            found.append(call(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).detach())
            backup = {name: p.data for name, p in model.named_parameters()}
            row = backup["weight"][0]
            for p in model.parameters():
                p.data = p.data * 0.5
            with torch.no_grad():
                found += [model.weight.clone(), backup["weight"].clone(), row.clone()]
                backup["bias"].mul_(0.9)  # which is no parameter's memory now
                found.append(model.bias.clone())
            for name, p in model.named_parameters():
                p.data = backup[name]
            row.mul_(0.5)  # which is a part of the weight again
            kept = model.weight.data
            model.weight.data = other.weight.data
            other.weight.data = kept
        return [*found, *(p.detach().clone() for p in (*model.parameters(), *other.parameters()))]

    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("changed", [False, True])
def test_a_tensor_that_data_was_set_to_goes_on_with_the_weight_until_another_one_takes_its_place(changed: bool) -> None:
    def run(job: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).sin().square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        call = flow.global_function(step) if job else step
        found = [call(torch.ones(2, WIDTH)).detach()]
        for number in range(4):
            for name, p in model.named_parameters():
                p.data = start[name]  # as lottery tickets are rewound: PyTorch trains these very tensors
            found += [call(torch.ones(2, WIDTH) * (number + 1)).detach() for _ in range(2)]
            if number == 2:
                model.bias.data = torch.zeros(WIDTH)
                found.append(start["bias"].clone())
                if changed:
                    start["bias"].mul_(2)
                    start["weight"] = start["weight"].clone() * 0 + 0.1
        return [*found, *(p.detach().clone() for p in model.parameters())]

    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=1e-9)


def test_a_view_of_a_weight_that_a_hook_replaces_before_it_is_read_is_no_second_tensor_in_its_memory() -> None:
    def run(job: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        call = flow.global_function(step) if job else step
        losses = [call(torch.ones(2, WIDTH) * n).detach() for n in range(3)]
        return [*losses, *(t.clone() for t in model.state_dict().values())]

    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=1e-9)
    model = nn.Linear(WIDTH, WIDTH)
    model.also = model.weight.data  # type: ignore[assignment]

    @flow.global_function
    def reads(x: Tensor) -> Tensor:
        loss = (model(x) + model.also.sum()).sum()  # type: ignore[operator]
        loss.backward()
        torch.optim.SGD.step(optimizer)
        return loss

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CaptureError, match="share memory"):
        reads(torch.ones(2, WIDTH))


def test_a_sparse_tensor_of_the_script_is_refused_by_its_name() -> None:
    graph, layer = torch.eye(WIDTH).to_sparse(), nn.Linear(WIDTH, WIDTH)

    @flow.global_function(type="predict")
    def predict(x: Tensor) -> Tensor:
        return torch.sparse.mm(graph, layer(x))

    with pytest.raises(CaptureError, match=r"graph is a sparse tensor \(sparse_coo, \[6, 6\]\).*graph\.to_dense\(\)"):
        predict(torch.ones(WIDTH, WIDTH))


def test_a_step_outside_of_jobs_is_captured_whatever_hooks_come_after_its_own() -> None:
    """As of a room that is imported later; torch's loop over hooks bears no change of their registry."""

    def hook(*_: Any) -> None:
        pass

    hook.__module__ = "actorflow"
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    step(torch.ones(2, WIDTH))
    before = model.weight.detach().clone()
    last = register_optimizer_step_pre_hook(hook)
    try:
        optimizer.step()
    finally:
        last.remove()
    assert not torch.equal(model.weight.detach(), before)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_an_optimizer_that_steps_outside_of_jobs_run_once(when: str) -> None:
    def run(job: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for p in optimizer.param_groups[0]["params"]:
                    p.mul_(0.5)

        register = optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook
        handle = register(halve)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        call, found = flow.global_function(step) if job else step, []
        for n in range(5):
            found.append(call(torch.ones(2, WIDTH) * n).detach() + 0)
            optimizer.step()
            optimizer.zero_grad()
            found += [p.detach().clone() for p in model.parameters()]
            if n == 3:
                handle.remove()
        return found

    torch.testing.assert_close(run(True), run(False), rtol=1e-12, atol=1e-12)


def test_a_hook_of_all_optimizers_is_refused_where_it_would_run_twice() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @flow.global_function
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step(torch.ones(2, WIDTH))

    def told(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Would run in the job of the step, and behind it."""

    handle = register_optimizer_step_post_hook(told)
    try:
        with pytest.raises(StateError, match=r"a hook of all optimizers, .*told, would run twice"):
            optimizer.step()
    finally:
        handle.remove()
