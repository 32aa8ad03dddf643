"""Whole first-generation jobs on one device, in this process."""

from __future__ import annotations

import threading
from typing import Any, Tuple  # noqa: UP035 (as scripts of the time write it)
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import actorflow as flow
import actorflow.typing as tp
from actorflow.classic import job_body
from actorflow.classic.callbacks import callbacks
from actorflow.classic.variables import REGISTRY
from actorflow.script_state.search import find_state
from actorflow.script_state.seeds import CallSeeds
from actorflow.session import process

SIZE = 6


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A beginning for names of variables that no other test has."""
    return str(request.node.name)


def arrays(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.normal(size=(SIZE, 4)), random.integers(0, 3, SIZE)


def test_a_job_that_makes_its_variables_trains_and_predicts_as_eager_pytorch_does(prefix: str) -> None:
    def net(x: Any) -> Any:
        return flow.layers.dense(x, 3, kernel_initializer=flow.truncated_normal(0.1), name=prefix)

    @flow.global_function(type="train")
    def train_job(
        x: tp.Numpy.Placeholder((SIZE, 4), dtype=flow.float), y: tp.Numpy.Placeholder((SIZE,), dtype=flow.int32)
    ) -> Tuple[tp.Numpy, tp.Numpy]:  # noqa: UP006
        logits = net(x)
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([1], [0.5, 0.1]), momentum=0.9).minimize(loss)
        return loss, logits

    @flow.global_function(type="predict")
    def predict_job(x: tp.Numpy.Placeholder((SIZE, 4), dtype=flow.float)) -> tp.Numpy:
        return net(x)

    eager = nn.Linear(4, 3)
    first = predict_job(arrays()[0])
    eager.load_state_dict({k: REGISTRY[f"{prefix}-{k}"].detach().clone() for k in ("weight", "bias")})
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.5, momentum=0.9)
    for number in range(4):
        x, y = arrays(number)
        optimizer.param_groups[0]["lr"] = 0.5 if number <= 1 else 0.1
        logits = eager(torch.tensor(x, dtype=torch.float))
        if not number:
            np.testing.assert_allclose(first, logits.detach(), rtol=1e-5, atol=1e-6)
        loss = cross_entropy(logits, torch.tensor(y), reduction="none")
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found, its_logits = train_job(x, y)
        assert type(found) is type(its_logits) is np.ndarray
        np.testing.assert_allclose(found, loss.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(predict_job(x), eager(torch.tensor(x, dtype=torch.float)).detach(), rtol=1e-5, atol=1e-6)
    assert len(train_job.plans) == len(predict_job.plans) == 1


def test_a_job_that_forgets_the_rehearsal_for_a_shape_trains_on_with_it(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(name: str) -> list[float]:
        @flow.global_function(type="train")
        def job(x: torch.Tensor) -> torch.Tensor:
            y = flow.layers.dense(x, 3, kernel_initializer=flow.constant_initializer(0.2), name=name)
            loss = (y - 1).square().mean()
            flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([2], [0.5, 0.1]), momentum=0.9).minimize(loss)
            return loss

        found = [job(torch.full((rows, 4), 0.1 * rows)).item() for rows in (4, 5, 6, 4, 4, 5)]
        assert len(job.body._found) <= job_body.MOST_FOUND
        return found

    expected = losses(f"{prefix}-all")
    monkeypatch.setattr(job_body, "MOST_FOUND", 1)
    assert losses(f"{prefix}-one") == expected


def test_one_device_in_the_mirrored_view_takes_and_gives_lists_of_one(prefix: str) -> None:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())

    @flow.global_function("predict", config)
    def job(x: tp.ListNumpy.Placeholder((SIZE, 4)), scale: Any) -> Any:
        weight = flow.get_variable(prefix, shape=(4, 2), initializer=flow.ones_initializer())
        return {"out": x @ weight * scale, "same": 3}

    x, _ = arrays()
    found = job([x], torch.tensor([2.0, 3.0]))
    assert found["same"] == 3
    assert [tuple(item.shape) for item in found["out"]] == [(SIZE, 2)]  # known before the value is
    np.testing.assert_allclose(found["out"][0], x.sum(1, keepdims=True) * [2.0, 3.0], rtol=1e-5)


def test_a_callback_gets_the_result_of_its_own_call(prefix: str) -> None:
    @flow.global_function("predict")
    def job(x: tp.Numpy.Placeholder((SIZE, 4))) -> tp.Callback[Tuple[tp.Numpy, tp.Numpy]]:  # noqa: UP006
        return x * 2, x.sum()

    found: list[Any] = []
    for number in range(3):
        job(arrays(number)[0])(found.append)
    callbacks.finish()
    for number, (double, total) in enumerate(found):
        np.testing.assert_allclose(double, 2 * arrays(number)[0], rtol=1e-6)
        np.testing.assert_allclose(total, arrays(number)[0].sum(), rtol=1e-5)
    assert len(found) == 3
    with pytest.raises(flow.CallError, match="a function was expected"):
        job(arrays()[0])(None)
    job(arrays()[0])(lambda _: found.append(threading.current_thread()))
    process.finish()
    assert found[3] is not threading.main_thread()


def test_the_settings_hold_inside_of_the_function_only(prefix: str) -> None:
    config = flow.function_config()
    config.default_data_type(torch.float64)
    config.default_placement_scope(flow.scope.placement("cpu", "0:0"))

    @flow.global_function("predict", config)
    def job() -> tp.Numpy:
        weight = flow.get_variable(prefix, shape=(2,), initializer=flow.ones_initializer())
        assert weight.dtype == torch.float64
        return weight + torch.zeros(2)

    assert job().dtype == np.float64
    assert torch.get_default_dtype() == torch.float32
    assert job.plan is not None
    assert job.plan.summary.stages == ("cpu:[0]",)


def test_a_function_without_marks_of_the_first_generation_is_run_once_and_not_rehearsed() -> None:
    runs = Mock()
    model = nn.Linear(4, 2)

    @flow.global_function(type="predict")
    def job(x: torch.Tensor) -> torch.Tensor:
        runs(x.shape)
        return model(x)

    for _ in range(2):
        job(torch.ones(3, 4))
    runs.assert_called_once_with((3, 4))


def test_helpers_of_the_function_may_make_the_variables(prefix: str) -> None:
    class Net:
        def __call__(self, x: Any) -> Any:
            return x * flow.get_variable(prefix, shape=(4,), initializer=flow.ones_initializer())

    net = Net()
    job = flow.global_function(type="predict")(lambda x: net(x))
    assert torch.equal(job(torch.ones(2, 4)) + 0, torch.ones(2, 4))


def test_ordinary_models_and_optimizers_are_untouched_by_a_rehearsal() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    eager = nn.Linear(4, 3)
    eager.load_state_dict(model.state_dict())
    eager_optimizer = torch.optim.Adam(eager.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any, x: Any, y: Any) -> Any:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @flow.global_function
    def job(x: tp.Numpy.Placeholder((SIZE, 4)), y: tp.Numpy.Placeholder((SIZE,), dtype=torch.int64)) -> tp.Numpy:
        return step(model, optimizer, x, y)

    for number in range(3):
        x, y = arrays(number)
        expected = step(eager, eager_optimizer, torch.tensor(x, dtype=torch.float), torch.tensor(y))
        np.testing.assert_allclose(job(x, y), expected.item(), rtol=1e-5)


def test_a_second_minimize_and_a_variable_of_another_shape_are_refused_with_both_lines(prefix: str) -> None:
    def weight(*shape: int) -> Any:
        return flow.get_variable(prefix, shape=shape, initializer=flow.ones_initializer())

    @flow.global_function
    def twice(x: torch.Tensor) -> Any:
        loss = (x * weight(4)).sum()
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.1])).minimize(loss)
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.1])).minimize(loss)
        return loss

    with pytest.raises(flow.CallError, match=r"a second minimize was found in job 'twice'; the first is(.|\n)*SGD"):
        twice(torch.ones(2, 4))
    other = flow.global_function(type="predict")(lambda x: x + weight(2, 4))
    with pytest.raises(flow.StateError, match=r"shape=\[2, 4\] was found; it was made with shape=\[4\]"):
        other(torch.ones(2, 4))
    job = flow.global_function(type="predict")(lambda x: x + weight(4))
    assert torch.equal(job(torch.ones(2, 4)) + 0, torch.full((2, 4), 2.0))  # nothing is left of what failed


def test_a_method_keeps_the_settings_of_its_job() -> None:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())

    class Trainer:
        @flow.global_function("predict", config)
        def double(self, x: tp.ListNumpy.Placeholder((2,))) -> tp.ListNumpy:
            return x * 2

    (found,) = Trainer().double([np.ones(2)])
    np.testing.assert_array_equal(found, [2, 2])


def test_variables_of_other_jobs_make_no_plan_anew(prefix: str) -> None:
    def ones(name: str) -> Any:
        return flow.get_variable(f"{prefix}-{name}", shape=(4,), initializer=flow.ones_initializer())

    first = flow.global_function(type="predict")(lambda x: x + ones("a"))
    second = flow.global_function(type="predict")(lambda x: x + ones("b"))
    for job, size in ((first, 2), (second, 2), (first, 3), (first, 2), (second, 2)):
        job(torch.ones(size, 4))
    assert (len(first.plans), len(second.plans)) == (2, 1)


def test_devices_of_a_mirrored_job_draw_numbers_of_their_own() -> None:
    together, first, second = CallSeeds(), CallSeeds(), CallSeeds()
    starts = [(together.next(3), first.next(3, 0), second.next(3, 1)) for _ in range(3)]
    assert all(a == b != c for a, b, c in starts)
    assert len({start for of_call in starts for start in of_call}) == 6


def test_only_code_that_names_makers_of_variables_is_rehearsed() -> None:
    def makes(function: Any) -> bool:
        job = flow.global_function(type="predict")(function)
        return job.body.makes_state(find_state(function))

    renamed, module = flow.layers.dense, flow.layers

    class Model:
        layers = (nn.Linear(4, 4),)

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.nn.functional.layer_norm(layer(x), (4,))
            return x

    model = Model()
    assert not makes(lambda x: model(x))
    assert makes(lambda x: flow.layers.layer_norm(x))
    assert makes(lambda x: renamed(x, 3))
    assert makes(lambda x: module.dense(x, 3))
    assert makes(lambda x: flow.get_variable("x"))
