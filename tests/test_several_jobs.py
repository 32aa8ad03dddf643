"""Jobs that share state, and steps with several parameter groups, train on two devices as eager PyTorch does on one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import actorflow as flow
import warm
from cluster.runs import Run
from scripts.several_jobs import TRAININGS, Ended

SCRIPT = Path(__file__).parent / "scripts" / "several_jobs.py"
RUNS = {  # each on two ranks, one training after the other: a budget first, for what others left counts
    "adversaries": [
        "gan, memory_budget=60KB",
        *(f"{training}, parallel={mode}" for training in ("gan", "noisy gan") for mode in ("data", "tensor")),
    ],
    "groups": [
        *(f"{training}, parallel={mode}" for training in ("adamw", "sgd") for mode in ("data", "tensor")),
        *("adamw, parallel=auto", "rmsprop, parallel=tensor", "nadam, parallel=data"),
    ],
}


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Mapping[str, Ended]]:
    """What the trainings of a run ended with, by their titles: those of the tests that are run."""
    asked = {item.callspec.params.get("title") for item in request.session.items if hasattr(item, "callspec")}

    @functools.cache
    def start(name: str) -> Mapping[str, Ended]:
        folder = tmp_path_factory.mktemp(name)
        options = ("--devices", "2", "--log-dir", str(folder), "--", str(folder / "out"))
        titles = [title for title in RUNS[name] if title in asked]
        run = Run(folder, SCRIPT, *options, *titles, python=warm.python())
        assert run.wait() == 0, run.output
        found: Mapping[str, Ended] = torch.load(folder / "out")
        return found

    return start


@functools.cache
def on_one_device(training: str) -> Ended:
    """The same training eagerly, or as jobs of one device where these draw random numbers."""
    return TRAININGS[training](flow.global_function if training == "noisy gan" else lambda function: function)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    ("run", "title"),
    [
        # test_auto_parallel.py has a budget in a run of several jobs as well
        pytest.param(run, title, marks=pytest.mark.slow if "budget" in title else ())
        for run, titles in RUNS.items()
        for title in titles
    ],
)
def test_two_devices_train_as_one_does(trained: Callable[[str], Mapping[str, Ended]], run: str, title: str) -> None:
    found, (training, layout) = trained(run)[title], title.split(", ")
    expected = on_one_device(training)
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0)
    for part in ("models", "optimizers"):
        same_state(found[part], expected[part])
    assert set(found["plans"]) == {1}  # whatever schedules do to learning rates
    assert found["redundant"] <= (0.05 if layout == "parallel=data" else 0.2)
    if layout != "parallel=auto":  # which of them is better is its own affair
        assert bool(found["split"]) == (layout != "parallel=data")


def same_state(found: list[Any], expected: list[Any]) -> None:
    """All that checkpoints hold: the same names and settings, and tensors that are equal but for rounding."""
    (leaves, names), (others, other_names) = (pytree.tree_flatten_with_path(tree) for tree in (found, expected))
    assert names == other_names
    for (path, a), (_, b) in zip(leaves, others, strict=True):
        if isinstance(b, Tensor):
            scale = b.abs().max().clamp(min=1e-6)
            assert (a - b).abs().max() <= 2e-5 * scale, pytree.keystr(path)
        else:
            assert a == b, pytree.keystr(path)


def test_the_momentum_that_a_scheduler_changes_is_read_at_each_call() -> None:
    found, expected = (TRAININGS["sgd in one cycle"](how) for how in (flow.global_function, lambda step: step))
    assert found["plans"] == [1]
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0)
    same_state(found["models"], expected["models"])


# -- gradients between jobs ------------------------------------------------------------------------

Step = Callable[[Tensor], Tensor]


def pair() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Two layers, the second after the first, with an optimizer for each."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3), nn.Linear(3, 1)
    return first, second, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second))


def jobs(clear: str) -> tuple[Step, Step, nn.Module, nn.Module]:
    """A step for each layer.  That of the first, which clears only its own gradients, goes through the second."""
    first, second, optimizer, second_optimizer = pair()

    def train_first(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = second(first(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def train_second(x: Tensor) -> Tensor:
        if clear == "before":
            second_optimizer.zero_grad()
        if clear == "before, to zeros":
            second_optimizer.zero_grad(set_to_none=False)
        loss: Tensor = (second(first(x).detach()) - 1).square().mean()
        loss.backward()
        second_optimizer.step()
        if clear == "after":
            second_optimizer.zero_grad()
        return loss

    return train_first, train_second, first, second


@pytest.mark.parametrize("clear", ["before", pytest.param("before, to zeros", marks=pytest.mark.slow), "after"])
def test_gradients_that_a_job_leaves_to_another_count_unless_that_clears_them(clear: str) -> None:
    *eager, e_first, e_second = jobs(clear)
    *steps, first, second = jobs(clear)
    planned = [flow.global_function(step) for step in steps]
    for x in torch.randn(3, 5, 4):
        for job, step in zip(planned, eager, strict=True):
            torch.testing.assert_close(float(job(x)), step(x).item(), rtol=1e-5, atol=0)
    torch.testing.assert_close(first.state_dict(), e_first.state_dict())
    torch.testing.assert_close(second.state_dict(), e_second.state_dict())


def test_gradients_that_a_job_computes_and_nobody_reads_may_be_left() -> None:
    first, second, *_ = pair()

    @flow.global_function
    def job(x: Tensor) -> Tensor:
        loss: Tensor = second(first(x)).square().mean()
        loss.backward()
        return loss

    x = torch.randn(5, 4)
    assert float(job(x)) == float(job(x))


def test_a_parameter_that_a_step_does_not_use_is_not_updated_and_has_no_gradient_from_elsewhere() -> None:
    first, second, optimizer, _ = pair()
    optimizer.add_param_group({"params": list(second.parameters())})

    @flow.global_function
    def train_first(x: Tensor) -> Tensor:
        loss: Tensor = first(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @flow.global_function
    def leave(x: Tensor) -> Tensor:
        loss: Tensor = second(x[:, :3]).sum()
        loss.backward()
        return loss

    x, before = torch.randn(5, 4), second.weight.detach().clone()
    assert float(train_first(x)) > float(train_first(x))
    assert torch.equal(second.weight.detach(), before)
    float(leave(x))
    assert torch.equal(second.weight.detach(), before)
    train_first(x)  # with the gradients that are there now
    assert not torch.equal(second.weight.detach(), before)


def _returns_a_norm(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    return next(model.parameters()).grad.norm()  # type: ignore[union-attr]


def _clears_nothing(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
    model(x).sum().backward()
    optimizer.step()
    return x


def _steps_alone(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
    optimizer.step()
    return model(x)


@pytest.mark.parametrize("step", [_returns_a_norm, _clears_nothing, _steps_alone])
def test_a_step_may_go_on_with_the_gradients_of_the_call_before(step: Callable[..., Any]) -> None:
    def results(wrap: Callable[[Step], Step]) -> list[Tensor]:
        model, _, optimizer, _ = pair()
        job = wrap(lambda x: step(model, optimizer, x))
        found = [job(x).detach() + 0 for x in torch.linspace(-1, 1, 60).view(3, 5, 4)]
        return [*found, *(p.detach() + 0 for p in model.parameters())]

    for mine, eager in zip(results(flow.global_function), results(lambda step: step), strict=True):
        torch.testing.assert_close(mine, eager)


# -- memory that other jobs need -------------------------------------------------------------------


def test_a_budget_counts_what_other_jobs_hold() -> None:
    def training(width: int, **how: Any) -> Any:
        model = nn.Linear(width, width)
        optimizer = torch.optim.Adam(model.parameters())

        @flow.global_function(**how)
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step(torch.randn(2, width))
        return model, optimizer

    kept = training(128)  # 3 × 66 KB
    with pytest.raises(flow.LayoutError, match=r"of variables that only other jobs use"):
        training(8, memory_budget="198KB")
    del kept
