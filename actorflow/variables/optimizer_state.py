"""Find the state that an optimizer would create for a parameter, by a step on a tiny copy of the parameter."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_as_stepped", "initial_state", "python_state"]

OFF = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}  # the plainest form of a step


class _RecordedState(dict[str, Any]):
    """A parameter's state that also records the first value of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.created: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.created.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Like ``dict.setdefault``, recorded."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Like ``dict.update``, recorded."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def initial_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """The state that one of torch's optimizers creates in its first step, for a parameter like ``like``.

    Tensors in it are tiny: all elements of a tensor that an optimizer creates are assumed to be equal.
    """
    try:
        return _stepped(optimizer, group, like).created
    except KeyError:  # torch 2.11's Adagrad creates its state in its constructor
        parameter = _tiny(like)
        known = inspect.signature(type(optimizer)).parameters
        made = type(optimizer)([parameter], **{k: v for k, v in optimizer.defaults.items() if k in known})
        return dict(made.state[parameter])


def python_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """The state of a parameter after a first step of any optimizer, without tensors; empty if the step fails."""
    try:
        state = _stepped(optimizer, group, like)
    except Exception:  # code of a library or of the user, under conditions that it was not written for
        return {}
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


def _stepped(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> _RecordedState:
    """The state of a tiny parameter with a gradient of zeros, after a step of such an optimizer."""
    parameter = _tiny(like)
    parameter.grad = torch.zeros_like(parameter)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    state: defaultdict[Tensor, Any] = defaultdict(_RecordedState)
    twin.state = state
    twin._optimizer_step_pre_hooks = OrderedDict()  # the user's hooks must not run in this step
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.param_groups = [{**group, "params": [parameter], **{k: v for k, v in OFF.items() if k in group}}]
    type(optimizer).step(twin)
    recorder: _RecordedState = state[parameter]
    return recorder


def _tiny(like: Tensor) -> Tensor:
    """A parameter like ``like``, with two elements along each dim."""
    return torch.zeros((2,) * like.dim(), dtype=like.dtype, requires_grad=True)


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer as stepped, so that learning-rate schedulers do not warn of a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
