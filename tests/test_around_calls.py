"""What is set for all modules, optimizers and ops around a call has its effect as in PyTorch, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import actorflow as flow

Register = Callable[[], Any]  # gives what removes it


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def halve_results() -> Any:
    return module.register_module_forward_hook(lambda m, args, result: result * 0.5)


def halve_arguments() -> Any:
    return module.register_module_forward_pre_hook(lambda m, args: (args[0] * 0.5,))


def halve_gradients() -> Any:
    def hook(m: nn.Module, given: Any, wanted: Any) -> Any:
        return tuple(None if g is None else g * 0.5 for g in given)

    return module.register_module_full_backward_hook(hook)


def _halve_grads(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)


def _halve_weights(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.mul_(0.5)


def halve_before_steps() -> Any:
    return optimizers.register_optimizer_step_pre_hook(_halve_grads)


def halve_after_steps() -> Any:
    return optimizers.register_optimizer_step_post_hook(_halve_weights)


HOOKS = (halve_results, halve_arguments, halve_gradients, halve_before_steps, halve_after_steps)


def trained(decorate: Callable[[Any], Any], register: Register) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    job, generator, found = decorate(step), torch.Generator().manual_seed(1), []
    handle: Any = None
    for call in range(6):
        if call == 2:
            handle = register()
        if call == 4:
            handle.remove()
        found.append(job(torch.randn(8, 6, generator=generator)).detach() + 0)
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("register", HOOKS, ids=lambda register: register.__name__)
def test_hooks_of_all_modules_and_optimizers_run_as_long_as_they_are_there(register: Register) -> None:
    for mine, wanted in zip(trained(flow.global_function, register), trained(lambda f: f, register), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


class Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is torch.tanh else found


class HalvingOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is torch.ops.aten.tanh.default else found


def counting_flops() -> Any:
    return FlopCounterMode(display=False)


@pytest.mark.parametrize("mode", [Halving, HalvingOps, counting_flops])
def test_a_call_under_a_mode_is_refused(mode: Callable[[], Any]) -> None:
    job = flow.global_function(lambda x: torch.tanh(x), type="predict")
    assert job(torch.ones(2)).tolist() == torch.tanh(torch.ones(2)).tolist()
    with mode(), pytest.raises(flow.CallError, match=r"under \w+, a mode that torch's functions .* enter the mode"):
        job(torch.ones(2))
    with torch.device("cpu"):  # a mode, too
        assert job(torch.ones(2)).tolist() == torch.tanh(torch.ones(2)).tolist()


def test_a_function_mode_may_be_entered_in_the_step() -> None:
    def halved(x: Tensor) -> Tensor:
        with Halving():
            return torch.tanh(x)

    assert flow.global_function(halved, type="predict")(torch.ones(2)).tolist() == halved(torch.ones(2)).tolist()


def test_hooks_for_saved_tensors_around_a_call_that_trains_are_refused() -> None:
    model = nn.Linear(2, 2)
    job = flow.global_function(lambda x: model(x).sum().backward())
    with torch.autograd.graph.save_on_cpu(), pytest.raises(flow.CallError, match="hooks for saved tensors"):
        job(torch.ones(2))
    predict = flow.global_function(model.forward, type="predict")
    with torch.autograd.graph.save_on_cpu(), torch.no_grad():
        torch.testing.assert_close(predict(torch.ones(2)) + 0, model(torch.ones(2)))


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_a_transform_of_a_job_is_refused(transform: Callable[[Any], Any]) -> None:
    job = flow.global_function(lambda x: x * x, type="predict")
    with pytest.raises(flow.CallError, match=r"within a transform of torch\.func"):
        transform(job)(torch.ones(3, 2))


def test_a_batch_that_takes_gradients_is_refused_where_they_would_be_lost() -> None:
    job = flow.global_function(lambda x: x * x, type="predict")
    batch = torch.ones(2, requires_grad=True)
    with pytest.raises(flow.CallError, match=r"x, a tensor that takes gradients .*or predict under torch\.no_grad"):
        job(batch)
    with torch.no_grad():
        assert job(batch).tolist() == [1.0, 1.0]
