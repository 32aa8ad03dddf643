"""What a script changes in Python between calls, or a step in it, is what runs: as eagerly, or it is refused."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
from actorflow_compiler.core.errors import CaptureError
from scripts.python_state import BETWEEN, REFUSED, WITHIN, train
from test_runs import actorflow

SCRIPT = Path(__file__).parent / "scripts" / "python_state.py"


@pytest.fixture(autouse=True)
def dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


ON_ONE_DEVICE, ON_TWO_RANKS = [*BETWEEN, *WITHIN][::3], [*BETWEEN, *WITHIN][1::24]


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in ON_ONE_DEVICE else pytest.mark.slow) for c in [*BETWEEN, *WITHIN]],
)
def test_a_job_does_what_the_script_does_with_python(case: str) -> None:
    wanted, _ = train(case, job=False)
    found, plans = train(case, job=True)
    assert found == pytest.approx(wanted, abs=1e-9)
    assert plans == (BETWEEN | WITHIN)[case]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_calls_could_not_repeat_is_refused(case: str) -> None:
    with pytest.raises(CaptureError, match=REFUSED[case]):
        train(case, job=True)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ON_TWO_RANKS, id="some"),
        pytest.param([*BETWEEN, *WITHIN], id="every", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_do_so_too(cases: list[str]) -> None:
    run = actorflow("run", str(SCRIPT), "--devices", "2", "--", *cases)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WRONG" not in run.stdout
    assert run.stdout.count(": right") == len(cases)


class Counting(torch.optim.Optimizer):
    """Momentum, as people write it: tensors are replaced, and steps are counted where ``count`` says."""

    def __init__(self, parameters: object, count: str) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0, "where": count})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["where"] == "group":
                group["count"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), tensor=torch.zeros(()), python=0)
                if group["where"] in state:
                    state[group["where"]] = state[group["where"]] + 1
                count = group["count"] if group["where"] == "group" else state[group["where"]]
                state["mean"] = 0.9 * state["mean"] + 0.1 * p.grad
                p.sub_(group["lr"] * state["mean"] / (1 - 0.9**count))


def steps(make: object, job: bool) -> list[float]:
    """The losses of some steps with the optimizers that ``make`` makes."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizers = make(model)  # type: ignore[operator]

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        return loss

    run = flow.global_function(step) if job else step
    return [run(torch.ones(2, 4)).item() for _ in range(6)]


@pytest.mark.parametrize("count", [pytest.param("tensor", marks=pytest.mark.slow), "group", "python"])
def test_an_optimizer_may_replace_its_state_and_count_in_python(count: str) -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [Counting(model.parameters(), count)]

    assert steps(make, job=True) == pytest.approx(steps(make, job=False), rel=1e-5)


def test_several_optimizers_may_step_one_parameter_several_times() -> None:
    def make(model: nn.Linear) -> list[torch.optim.Optimizer]:
        first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return [first, torch.optim.Adam([model.weight], lr=0.01), first]

    assert steps(make, job=True) == pytest.approx(steps(make, job=False), rel=1e-5)


def test_other_threads_and_files_go_on_while_a_step_is_captured(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w")  # an iterator, too, and no business of a plan
    items, asked, answered = itertools.count(), threading.Event(), threading.Event()
    got: list[object] = []

    def beside() -> None:
        asked.wait()
        got.extend([next(items), time.time()])
        answered.set()

    thread = threading.Thread(target=beside)
    thread.start()

    @flow.global_function(type="predict")
    def captured(x: Tensor) -> Tensor:
        log.write("captured")
        asked.set()
        answered.wait()
        return x * len(str(items))

    captured(torch.ones(2))
    thread.join()
    assert got[0] == 0
    assert isinstance(got[1], float)
    assert next(items) == 1
    log.close()
    assert (tmp_path / "log").read_text() == "captured"


def test_what_made_plans_necessary_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"kl": 0.0}

    @flow.global_function(type="predict")
    def weighted(x: Tensor) -> Tensor:
        return x * weights["kl"]

    for i in range(5):
        weights["kl"] = i / 10
        assert torch.equal(weighted(torch.ones(2)) + 0, torch.full((2,), i / 10))
    weights["kl"] = 0.2  # it has a plan
    assert torch.equal(weighted(torch.ones(2)) + 0, torch.full((2,), 0.2))
    assert len(weighted.plans) == 5
    weighted(torch.ones(3))
    told = [line for line in flow.explain_recompiles().splitlines() if line.startswith("weighted, ")]
    assert told[0] == "weighted, plan 1: the first call"
    assert told[2] == "weighted, plan 3: weights['kl'] changed from 0.1 to 0.2"
    assert told[5] == "weighted, plan 6: other arguments"
    assert capsys.readouterr().err.count("weights['kl'] changed from 0.2 to 0.3, the 3rd plan") == 1


WIDE = 6


class _Overridden:
    gain = 1.0

    def get(self) -> float:
        return self.gain


class _Inherited(_Overridden):
    pass


class _Sized:
    def __init__(self) -> None:
        self.size = 1

    def __len__(self) -> int:
        return self.size


def _by(t: Tensor, by: float = 1.0) -> Tensor:
    return t * by * getattr(_by, "gain", 1.0)


SHELF = type("Shelf", (), {"items": [1.0, 2.0]})
NAMES = SimpleNamespace(a1=1.0, a2=2.0)
INHERITED, SIZED = _Inherited(), _Sized()
UNREACHED: dict[str, Callable[[], None]] = {
    "an attribute of a function": lambda: setattr(_by, "gain", 3.0),
    "the code of a function": lambda: setattr(_by, "__code__", (lambda t, by=1.0: t * 5).__code__),
    "a list of a class": lambda: SHELF.items.reverse(),  # type: ignore[attr-defined]
    "an attribute that a class overrides": lambda: setattr(_Inherited, "gain", 4.0),
    "what an operator reads": lambda: setattr(SIZED, "size", 3),
    "an attribute whose name is made": lambda: setattr(NAMES, "a1", 7.0),
    "a variable of the environment": lambda: os.environ.update(ACTORFLOW_TEST_GAIN="5"),
}


def _reads_all(x: Tensor) -> Tensor:
    for by in SHELF.items:  # type: ignore[attr-defined]
        x = (x * by).sin()
    x = _by(x) * INHERITED.get() * len(SIZED) * sum(getattr(NAMES, f"a{k}") for k in (1, 2))
    return x * float(os.environ.get("ACTORFLOW_TEST_GAIN", "1"))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("case", UNREACHED)
def test_what_scripts_reach_in_devious_ways_is_seen_to_change(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_by, "__code__", _by.__code__)
    monkeypatch.setenv("ACTORFLOW_TEST_GAIN", "1")
    job = flow.global_function(type="predict")(_reads_all)
    x = torch.linspace(0.1, 1.0, WIDE)
    assert torch.equal(job(x) + 0, _reads_all(x))
    UNREACHED[case]()
    assert torch.equal(job(x) + 0, _reads_all(x))
    assert len(job.plans) == 2


def test_a_parameter_in_place_of_another_is_not_stepped_by_the_optimizer_of_that_one() -> None:
    def losses(job: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).pow(2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            model.zero_grad()
            return loss

        run, found = flow.global_function(step) if job else step, []
        for i in range(5):
            if i == 2:
                model.weight = nn.Parameter(torch.ones(3, 4))
            found.append(run(torch.ones(2, 4)).item())
        return found

    assert losses(job=True) == pytest.approx(losses(job=False), rel=1e-5)


def test_the_first_step_of_an_optimizer_may_come_after_calls_that_do_not_step() -> None:
    def losses(job: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

        def step(x: Tensor, last: bool) -> Tensor:
            loss: Tensor = model(x).pow(2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        run = flow.global_function(step) if job else step
        return [run(torch.ones(2, 4), i % 2 == 1).item() for i in range(6)]

    assert losses(job=True) == pytest.approx(losses(job=False), rel=1e-5)


@pytest.mark.slow
def test_a_curriculum_has_as_many_stages_as_it_likes_where_each_lasts() -> None:
    class Course:
        calls = 0

    def trained(job: bool, lasts: int) -> list[float]:
        torch.manual_seed(0)
        model, course = nn.Linear(8, 8), Course()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            shown = 2 + course.calls // lasts
            course.calls += 1
            loss: Tensor = model(x)[:, :shown].pow(2).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        run = flow.global_function(step) if job else step
        return [run(torch.full((2, 8), 0.1 * (i % 7))).item() for i in range(5 * lasts)]

    assert trained(job=True, lasts=20) == pytest.approx(trained(job=False, lasts=20), rel=1e-5)
    with pytest.raises(CaptureError, match=r"course\.calls changes from \d to \d, and to another value in each call"):
        trained(job=True, lasts=2)


class Slotted:
    __slots__ = ("phase",)


class Phased:
    flag = "on"


@pytest.mark.parametrize("value", ["train", 5, 0.5, True, None, (1, "a")])
def test_what_a_step_only_sets_is_set_in_each_call(value: object) -> None:
    slotted, plain, named = Slotted(), Phased(), SimpleNamespace()

    def step(x: Tensor) -> Tensor:
        slotted.phase = plain.phase = Phased.flag = value  # type: ignore[attr-defined,misc,assignment]
        for name in ("first", "second"):
            setattr(named, name, value)
        return x * 2

    job = flow.global_function(type="predict")(step)
    slotted.phase = plain.phase = named.first = named.second = Phased.flag = value  # type: ignore[attr-defined,misc,assignment]
    for other in (value, "another", value, 7, "another"):
        job(torch.ones(2))
        left = slotted.phase, plain.phase, named.first, named.second, Phased.flag  # type: ignore[attr-defined]
        assert left == (value,) * 5
        assert all(type(one) is type(value) for one in left)
        slotted.phase = plain.phase = named.first = named.second = Phased.flag = other  # type: ignore[attr-defined,misc,assignment]
    assert 1 <= len(job.plans) <= 2  # a second one only where it cannot be seen that it was set


def test_a_step_that_changes_a_tensor_of_which_there_is_a_view_is_refused() -> None:
    whole = torch.ones(2, 4)
    view = whole[0]

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        whole.mul_(0.9)
        return x * view

    with pytest.raises(CaptureError, match=r"test_python_state.py:\d+(.|\n)*view and whole share memory"):
        step(torch.ones(3, 4))


def test_a_tensor_that_starts_to_train_gets_gradients() -> None:
    weight = torch.ones(4)

    @flow.global_function
    def step(x: Tensor) -> Tensor:
        loss: Tensor = (nn.functional.linear(x, other) * weight).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    other = torch.eye(4, requires_grad=True)
    step(torch.ones(2, 4)).item()
    weight.requires_grad_()
    step(torch.ones(2, 4)).item()
    assert weight.grad is not None
    assert torch.allclose(weight.grad + 0, torch.full((4,), 0.5))


def test_ranks_may_have_given_their_hooks_other_numbers() -> None:
    run = actorflow("run", str(SCRIPT.with_name("hooks_counted_apart.py")), "--devices", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "right" in run.stdout
