"""The numbers of an optimizer's groups enter the lineages of the global parameters that it steps.

Its ops have other numbers, computed of these, and fused ones work on the parts.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from actorflow.eager.global_tensor import GlobalTensor
from actorflow.eager.lineage import code_of
from actorflow_compiler.core.step_watchers import watch_steps

# settings as users give them; others may have been computed of tensors
_SETTINGS = ("lr", "betas", "momentum", "dampening", "weight_decay", "eps", "alpha", "rho", "nesterov", "amsgrad")


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if isinstance(p, GlobalTensor)]
        if parameters:
            code = code_of(repr([_number(group.get(name)) for name in _SETTINGS]))
            for p in parameters:
                p._lineage = hash((p._lineage, code))


def _number(setting: Any) -> Any:
    """A setting that is compared; None for a tensor, which may have been computed."""
    kinds = (bool, int, float)
    if isinstance(setting, list | tuple):
        return [x if isinstance(x, kinds) else None for x in setting]
    return setting if isinstance(setting, kinds) else None


watch_steps(_before_step)
