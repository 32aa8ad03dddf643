"""Find the state that an optimizer would create for a parameter, by a step on a tiny copy of it."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_as_stepped", "initial_state", "python_state"]

OFF = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}  # the plainest way to step


class _RecordedState(dict[str, Any]):
    """A parameter's state that remembers each value as it was created."""

    def __init__(self) -> None:
        super().__init__()
        self.created: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.created.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As a dictionary's, recorded."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As a dictionary's, recorded."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def initial_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """What the step of one of torch's optimizers starts from, for a parameter like this one.

    Tensors are small: all elements of a created tensor are taken to be equal.
    """
    try:
        return _stepped(optimizer, group, like).created
    except KeyError:  # torch 2.11's Adagrad makes its state when it is made itself
        parameter = _tiny(like)
        known = inspect.signature(type(optimizer)).parameters
        made = type(optimizer)([parameter], **{k: v for k, v in optimizer.defaults.items() if k in known})
        return dict(made.state[parameter])


def python_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """What any optimizer holds of a parameter after a first step, but for tensors; nothing where it cannot be tried."""
    try:
        state = _stepped(optimizer, group, like)
    except Exception:  # a stranger's code, in circumstances that it was not made for
        return {}
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


def _stepped(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> _RecordedState:
    """The state of a tiny parameter without gradient after a step of such an optimizer."""
    parameter = _tiny(like)
    parameter.grad = torch.zeros_like(parameter)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    state: defaultdict[Tensor, Any] = defaultdict(_RecordedState)
    twin.state = state
    twin._optimizer_step_pre_hooks = OrderedDict()  # the user's hooks are not for this step
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.param_groups = [{**group, "params": [parameter], **{k: v for k, v in OFF.items() if k in group}}]
    type(optimizer).step(twin)
    recorder: _RecordedState = state[parameter]
    return recorder


def _tiny(like: Tensor) -> Tensor:
    """A parameter of two elements along each dim."""
    return torch.zeros((2,) * like.dim(), dtype=like.dtype, requires_grad=True)


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let learning-rate schedulers know that the optimizer stepped, so that they do not warn of a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
