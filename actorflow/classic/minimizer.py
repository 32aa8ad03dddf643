"""The optimizer that ``minimize`` makes for a job, and its step: backward, regularize, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.deferred import DeferredTensor, materialize
from actorflow.regularizers import Regularizer
from actorflow.standins.owned_tensor import real_value

__all__ = ["Minimizer", "StepSettings"]

StepSettings = Callable[[int], Sequence[Mapping[str, float]]]  # steps so far → settings of each parameter group


@dataclass(slots=True, eq=False)
class Minimizer:
    """The optimizer that ``minimize`` made at the first call of its job; it lives as long as the job."""

    job: str
    where: str  # the line of the script that called ``minimize``
    optimizer: torch.optim.Optimizer
    variables: tuple[str, ...]  # names of the variables that it trains
    settings: StepSettings
    clip: Callable[[Iterable[Tensor]], object] | None
    regularize: Mapping[str, Regularizer]  # by name of the variable
    steps: int = 0  # number of calls of the job so far

    def before_call(self) -> None:
        """Set the learning rate and other settings of the next call on the host: they are inputs of the plan."""
        for group, now in zip(self.optimizer.param_groups, self.settings(self.steps), strict=True):
            group.update(now)

    def after_call(self) -> None:
        """Count a call that was issued."""
        self.steps += 1

    def saved(self) -> dict[str, Any]:
        """The number of steps and the optimizer's state of each variable, for ``restore``."""
        kept = pytree.tree_map_only(Tensor, real_value, self.optimizer.state_dict()["state"])
        return {"steps": self.steps, "state": {n: dict(kept[i]) for i, n in enumerate(self.variables) if i in kept}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of ``saved``; a variable that it does not contain starts with fresh state."""
        state = {i: saved["state"][n] for i, n in enumerate(self.variables) if n in saved["state"]}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.steps = int(saved["steps"])

    def run(self, losses: Sequence[Tensor], variables: Mapping[str, Tensor]) -> None:
        """Run one step: backward, regularize, clip, ``step``, ``zero_grad``."""
        trained = {name: variables[name] for name in self.variables}
        total = sum(loss.mean() for loss in losses[1:]) + losses[0].mean()
        torch.autograd.backward(total, inputs=list(trained.values()))
        for name, variable in trained.items():
            gradient, extra = variable.grad, self.regularize.get(name)
            if gradient is not None and extra is not None:
                now = variable.detach()
                gradient = gradient + extra.l1 * now.sign() if extra.l1 else gradient
                variable.grad = gradient + extra.l2 * now if extra.l2 else gradient
        if self.clip is not None:
            self.clip(list(trained.values()))
        if any(isinstance(t, DeferredTensor) for t in pytree.tree_leaves(list(self.optimizer.state.values()))):
            materialize(self.optimizer)  # the optimizer made state for deferred variables; a plan never sees this
        self.optimizer.step()
        self.optimizer.zero_grad()
