"""What torch.jit has compiled trains in jobs as in eager PyTorch; what of it changes is guarded.

``tests/recipes/scripted.py`` trains such models under all layouts.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CallError, CaptureError, StateError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)
        self.scale, self.flip, self.h = 1.0, False, torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.layer(x))) * self.scale
        if self.flip:
            x = -x
        self.h = 0.9 * self.h + x.detach().mean(0)
        return x + self.h

    @torch.jit.export
    def penalty(self) -> Tensor:
        return self.layer.weight.pow(2).sum() * self.scale


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Ignoring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x)  # type: ignore[no-any-return]

    @torch.jit.ignore
    def plain(self, x: Tensor) -> Tensor:
        return x * 2


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"a": torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.parts["a"]


@torch.jit.script
def shown(x: Tensor) -> Tensor:
    print(x)
    return x


@torch.jit.script
def beside(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(torch.relu, x))


@torch.jit.script
def at_most_three(x: Tensor, n: int) -> Tensor:
    if n > 3:
        raise ValueError("n is too large")
    return x


@torch.jit.script
def product(x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
    return x @ y * scale


def trained(change: Callable[[Any, int], object], job: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, the state at the end, and how many plans were made."""
    torch.manual_seed(0)
    model = torch.jit.script(Net().double())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    g = torch.Generator().manual_seed(1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 0.01 * model.penalty()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    run: Any = flow.global_function(step) if job else step
    losses = []
    for i in range(6):
        change(model, i)
        x, y = torch.randn(8, 4, generator=g).double(), torch.randn(8, 4, generator=g).double()
        losses.append(float(run(x, y)))
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return losses, {**state, "h": model.h.detach().clone()}, len(run.plans) if job else 0


def scaled(model: Any, i: int) -> None:
    model.scale = 0.5 if i >= 3 else 1.0


def flipped(model: Any, i: int) -> None:
    model.flip = i % 2 == 1


def evaluated(model: Any, i: int) -> None:
    model.train(i < 3)


def zeroed(model: Any, i: int) -> None:
    if i == 3:
        model.h = torch.zeros(4).double()


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("change", "plans"), [(scaled, 2), (flipped, 2), (evaluated, 2), (zeroed, 1)])
def test_attributes_and_modes_of_a_scripted_module_are_guarded(
    change: Callable[[Any, int], object], plans: int
) -> None:
    losses, state, made = trained(change, job=True)
    wanted, wanted_state, _ = trained(change, job=False)
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert made <= plans
    for name, value in wanted_state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


def stepping(function: Callable[..., Tensor]) -> Any:
    weight = nn.Parameter(torch.eye(4))

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss = function(x @ weight).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.jit.script(Counting()), "count changes from 0 to 1 in code of torch.jit.*a buffer"),
        (lambda: torch.jit.script(Ignoring()), r"calls a function of Python \(@torch.jit.ignore"),
        (lambda: torch.jit.script(Holding()), "parts of a module of torch.jit holds tensors in a dict"),
        (lambda: shown, "shown, which torch.jit has compiled, prints; expected"),
        (lambda: beside, r"has another thread work \(torch.jit.fork\)"),
        (lambda: lambda x: at_most_three(x, 5), "code of torch.jit that the step calls here raises ValueError: n"),
    ],
)
def test_what_a_plan_cannot_repeat_of_it_is_refused(make: Callable[[], Any], said: str) -> None:
    function = make()
    with pytest.raises(CaptureError, match=rf"(?s)test_scripted\.py:\d+.*{said}"):
        stepping(lambda x: function(x))(torch.ones(2, 4))


def test_what_an_op_of_it_raises_is_told_as_it_was_raised() -> None:
    with pytest.raises(CallError, match=r"test_scripted\.py:\d+: .*\n  RuntimeError: a and b must have same"):
        stepping(lambda x: product(x, x[:3, :2]))(torch.ones(5, 4))
    with pytest.raises(CallError, match=r"product\(x, y, scale\) of torch.jit was called with 1 arguments"):
        stepping(lambda x: product(x))(torch.ones(5, 4))


def test_arguments_by_name_and_defaults_are_what_they_are_outside() -> None:
    x = torch.rand(4, 4)
    for function in (lambda x: product(y=x, x=x), lambda x: product(x, x, scale=3.0), lambda x: product(x, x)):
        assert float(stepping(function)(x)) == pytest.approx(float(function(x).pow(2).mean()), rel=1e-6)


def test_a_constant_of_traced_code_that_changes_is_another_plan_and_one_that_is_state_is_refused() -> None:
    table, x = torch.ones(4), torch.rand(4, 4)
    traced = torch.jit.trace(lambda x: x * table, x)
    step = stepping(lambda x: traced(x))
    assert float(step(x)) == pytest.approx(float(x.pow(2).mean()), rel=1e-6)
    table.mul_(3)
    assert float(step(x)) == pytest.approx(float((3 * x).pow(2).mean()), rel=1e-6)
    with pytest.raises(CaptureError, match="has a tensor of the script written into it, as a constant"):
        stepping(lambda x: traced(x) + table)(x)


def test_code_that_ran_before_is_captured_op_by_op_all_the_same() -> None:
    x = torch.rand(4, 4, requires_grad=True)
    for _ in range(4):
        product(x, x).sum().backward()  # torch has joined its ops by now
    step = stepping(lambda y: product(y, y))
    assert float(step(x.detach())) == pytest.approx(float(product(x, x).pow(2).mean()), rel=1e-6)


def test_outside_of_jobs_such_a_module_is_used_saved_and_copied_with_what_plans_have_made_of_it() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    twin = copy.deepcopy(plain)
    model = torch.jit.script(plain)

    def stepped(model: Any) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x).pow(2).mean() + model(2 * x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()  # type: ignore[no-any-return]

        return step

    step: Any = flow.global_function(stepped(model))
    eager = stepped(twin)
    x = torch.rand(8, 4)
    for _ in range(2):
        assert float(step(x)) == pytest.approx(float(eager(x)), rel=1e-5)
    with pytest.raises(StateError, match="its value belongs to the plan"):
        model(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x))  # counts in the batch norm of both
    torch.testing.assert_close(plain.state_dict(), twin.state_dict())
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    for copied in (torch.jit.load(file), copy.deepcopy(model)):
        torch.testing.assert_close({**copied.state_dict()}, {**twin.state_dict()})
        torch.testing.assert_close(copied.eval()(x), twin.eval()(x))
    model.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
    assert float(step(x)) == 0
