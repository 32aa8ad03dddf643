"""The state of a script's objects, with stand-ins in place of the values that plans own.

What an optimizer keeps of a parameter is named by the parameter's name in the saved modules, where it has one, so that
it is found again when parameters are in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from actorflow.standins.owned_tensor import keeping_stand_ins
from actorflow_compiler.core.errors import StateError

__all__ = ["has_state", "names_of_parameters", "state_of", "with_indices", "with_names"]


def has_state(value: Any) -> bool:
    """Whether a value is an object whose state is saved and loaded, not a value itself."""
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, Tensor | Mapping)


def state_of(name: str, value: Any, names: Mapping[int, str]) -> Any:
    """The state of an object, or the value itself.  ``names`` are those of parameters, by id.

    Raises StateError for an object that has ``state_dict`` but not ``load_state_dict``.
    """
    if not has_state(value):
        return value
    if not callable(getattr(value, "load_state_dict", None)):
        raise StateError(
            f"{name} is a {type(value).__qualname__}, which has state_dict() and no load_state_dict(): nothing could "
            f"be loaded into it; expected: both, or plain values"
        )
    with keeping_stand_ins():
        state = value.state_dict()
    return with_names(state, value, names) if isinstance(value, Optimizer) else state


def names_of_parameters(objects: Mapping[str, Any]) -> dict[int, str]:
    """The names of the parameters of all modules among the objects, by id.

    They begin with the module's: a module may be loaded without others that it was saved with.  A parameter of several
    modules, or with several names, has its first.
    """
    found: dict[int, str] = {}
    for prefix, module in objects.items():
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters(prefix):
                found.setdefault(id(parameter), name)
    return found


def with_names(state: Any, optimizer: Optimizer, names: Mapping[int, str]) -> Any:
    """An optimizer's state dictionary with names in place of numbers; numbers where a parameter has no name."""
    if not _is_torchs(state):
        return state
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(parameters) != len(numbers) or any(id(p) not in names for p in parameters):
        return state
    called = {number: names[id(p)] for number, p in zip(numbers, parameters, strict=True)}
    return {
        **state,
        "state": {called.get(number, number): value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [called[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def with_indices(state: Any, name: str, optimizer: Optimizer, names: Mapping[int, str]) -> Any:
    """A saved state with the numbers that parameters have in this optimizer.

    Raises StateError if it has other parameters.
    """
    if not _is_torchs(state):
        return state
    groups, saved = optimizer.param_groups, state["param_groups"]
    counts, before = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if len(counts) != len(before) or sum(counts) != sum(before):
        raise StateError(
            f"{name} has {len(counts)} groups of {counts} parameters; in the checkpoint it has {len(before)}, of "
            f"{before}"
        )
    own = [names.get(id(parameter)) for group in groups for parameter in group["params"]]
    said = [one for group in saved for one in group["params"]]
    if None in own or not all(isinstance(one, str) for one in said):
        if counts != before:
            raise StateError(f"{name} has groups of {counts} parameters; in the checkpoint they have {before}")
        order = {one: number for number, one in enumerate(said)}  # no names: by their order
    else:
        order = {str(one): number for number, one in enumerate(own)}
        for mine, group in zip(groups, saved, strict=True):
            other = sorted({str(names[id(p)]) for p in mine["params"]} ^ set(group["params"]))
            if other:
                raise StateError(
                    f"{name} does not step the same parameters, or not in the same groups, as in the checkpoint: "
                    f"{', '.join(other[:5])}{' …' if len(other) > 5 else ''} is in one of them alone"
                )
    numbers = iter(range(len(own)))
    return {
        **state,
        "state": {order.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [next(numbers) for _ in mine["params"]]}
            for mine, group in zip(groups, saved, strict=True)
        ],
    }


def _is_torchs(state: Any) -> bool:
    return (
        isinstance(state, dict) and isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)
    )
