"""What an optimizer over global parameters has loaded gets the layouts of its parameters before the next step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from actorflow.eager.convert import from_whole, moved, without_terms
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.eager.layout import everywhere
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.step_watchers import watch_steps

_examined: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()  # what they kept in the last step


def _lay_out(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Make the plain tensors that an optimizer keeps of global parameters global; they are whole, equal on all ranks.

    A state dict of a run on one device has such ones, and one of other layouts has those.  Raises StateError for a
    tensor that has the shape of this rank's part.
    """
    if _examined.get(optimizer) is optimizer.state:  # loading puts another one there
        return
    _examined[optimizer] = optimizer.state
    for parameter, kept in optimizer.state.items():
        if isinstance(parameter, GlobalTensor) and isinstance(kept, dict):
            for name, value in kept.items():
                if isinstance(value, Tensor) and value.dim():
                    kept[name] = _like(name, value, parameter)


def _like(name: str, value: Tensor, parameter: GlobalTensor) -> Tensor:
    own = without_terms(parameter._spec.layout)
    layout = own if value.shape == parameter.shape else everywhere(own.placement)
    if isinstance(value, GlobalTensor):
        return value if value._spec.layout is layout or value.shape != parameter.shape else moved(value, layout)
    part = parameter._local.shape
    if value.shape == part != parameter.shape:
        raise StateError(
            f"{name} of shape {tuple(part)} was loaded into an optimizer for a parameter of shape "
            f"{tuple(parameter.shape)}, which lies as {own}: that is this rank's part; the whole was expected, as "
            f"flow.save writes it"
        )
    with torch.no_grad():
        return from_whole(value, layout)


watch_steps(_lay_out)
