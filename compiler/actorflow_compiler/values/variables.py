"""The state of a step (parameters, buffers, optimizer state, tensors), where it is held, and stand-ins put there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from actorflow_compiler.core.errors import CaptureError
from actorflow_compiler.plan.plan import VariableKind
from actorflow_compiler.values.seen_identities import original_ids

WITH_PARAMETERS = (
    VariableKind.OPTIMIZER,
    VariableKind.GRADIENT,
)  # kinds of variables that have the layout of their parameter
RECURRENT = ("_flat_weights", "_flat_weight_refs")  # lists of parameters that recurrent layers compute with


def attributes_given(tensor: Tensor) -> dict[str, Any]:
    """The attributes that a script has set on a tensor or a stand-in."""
    if type(tensor) not in (Tensor, nn.Parameter) and not hasattr(type(tensor), "name_in_plan"):
        return {}
    return {name: value for name, value in vars(tensor).items() if not hasattr(type(tensor), name)}


@dataclass(slots=True)
class StateTensor:
    """A tensor of the script and every place that holds it."""

    name: str
    kind: VariableKind
    tensor: Tensor
    places: list[Callable[[Tensor], None]] = field(default_factory=list)  # each function puts another tensor there

    def put(self, tensor: Tensor) -> None:
        """Put ``tensor`` in every place."""
        for place in self.places:
            place(tensor)


@dataclass(slots=True)
class ScriptState:
    """What the search through a job's script found.  Names are unique over all kinds."""

    held: dict[str, StateTensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)  # roots, by name
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    scalers: dict[str, torch.amp.GradScaler] = field(default_factory=dict)  # that are enabled
    beside: dict[str, str] = field(default_factory=dict)  # tensor → the tensor with which it is placed
    named: frozenset[str] = frozenset()  # globals and attributes that the script's functions name
    looks_at_steps: bool = False  # whether functions of the script read ``optimizer.state``

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of a tensor that was found."""
        return next((h.name for h in self.held.values() if h.tensor is tensor), None)


def group_names(state: ScriptState) -> dict[tuple[str, str], str]:
    """(optimizer, parameter) → ``optimizer.group``: the parameter group whose learning rate the optimizer uses for it.

    Raises CaptureError if an optimizer holds a parameter that the search did not find.
    """
    by_id = {id(h.tensor): h.name for h in state.held.values()}
    found: dict[tuple[str, str], str] = {}
    for name, optimizer in state.optimizers.items():
        for g, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in by_id:
                    raise CaptureError(
                        f"optimizer {name!r} updates a parameter of shape {tuple(p.shape)} "
                        f"that belongs to no module or variable the job can reach; pass model=… to global_function"
                    )
                found[name, by_id[id(p)]] = f"{name}.{g}"
    return found


@contextlib.contextmanager
def stand_ins(state: ScriptState, make: Callable[[Tensor], Tensor]) -> Iterator[dict[str, Tensor]]:
    """Put ``make(tensor)`` in every place of every held tensor; restore the originals at the end.

    Recurrent layers also keep their parameters in lists, which they rebuild for the stand-ins; these are restored, too.
    """
    new: dict[str, Tensor] = {}
    layers = {m for root in state.modules.values() for m in root.modules() if isinstance(m, nn.RNNBase)}
    lists = [(vars(m), key, vars(m)[key]) for m in layers for key in RECURRENT if key in vars(m)]
    try:
        for held in state.held.values():
            new[held.name] = make(held.tensor)
            held.put(new[held.name])
        for held in state.held.values():  # attributes that are tensors have stand-ins by now
            vars(new[held.name]).update(attributes_given(held.tensor))
        before = {name: dict(vars(fake)) for name, fake in new.items()}
        with original_ids({held.name: held.tensor for held in state.held.values()}, new):
            yield new
        _refuse_attributes(state, new, before)
    finally:
        for held in state.held.values():
            if held.name in new:
                held.put(held.tensor)
        for attributes, key, value in lists:
            attributes[key] = value


def _refuse_attributes(
    state: ScriptState, fakes: Mapping[str, Tensor], before: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise CaptureError if the step has set an attribute, named by the script, of a tensor of the script."""
    for name, fake in fakes.items():
        for key, value in vars(fake).items():
            as_it_was = key in before[name] and before[name][key] is value
            if not as_it_was and key in state.named and not hasattr(type(fake), key):
                raise CaptureError(
                    f"the step sets the attribute {key!r} of {name}, a tensor, which would be done once, when it is "
                    f"captured, and not in every call; expected: an attribute of a module or an object of yours"
                )


def real_optimizer_state(state: ScriptState) -> dict[str, Tensor]:
    """The optimizer tensors that exist already, named ``optimizer.parameter.key``."""
    by_id = {id(h.tensor): h.name for h in state.held.values()}
    return {
        f"{name}.{by_id[id(p)]}.{key}": value
        for name, optimizer in state.optimizers.items()
        for p, values in optimizer.state.items()
        if id(p) in by_id
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
