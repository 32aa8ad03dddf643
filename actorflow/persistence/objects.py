"""The state of a script's objects, with stand-ins in place of the values that plans own.

What an optimizer keeps of a parameter is named by the parameter's name in the saved modules, where it has one, so that
it is found again when parameters are in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from actorflow.standins.owned_tensor import keeping_stand_ins
from actorflow_compiler.core.errors import StateError

__all__ = [
    "as_object", "has_state", "is_loaded", "names_of_parameters", "refuse_other_kind", "state_of", "with_indices",
    "with_names",
]  # fmt: skip

_MAY_BE_ABSENT = {  # of versions of torch, of flags of an optimizer, and of schedules in an optimizer's groups
    "amsgrad", "base_momentum", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused",
    "initial_lr", "max_lr", "max_momentum", "maximize", "min_lr", "swa_lr", "verbose",
}  # fmt: skip
_KEPT = {  # of each parameter, by optimizer
    "Adadelta": {"square_avg", "acc_delta"}, "Adagrad": {"sum"}, "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"}, "Adamax": {"exp_avg", "exp_inf"}, "ASGD": {"ax", "eta", "mu"},
    "NAdam": {"exp_avg", "exp_avg_sq", "mu_product"}, "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg"}, "Rprop": {"prev"},
}  # fmt: skip


def has_state(value: Any) -> bool:
    """Whether a value is an object whose state is saved and loaded, not a value itself."""
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, Tensor | Mapping)


def is_loaded(value: Any) -> bool:
    """Whether a saved value is put into the object that was saved: it has state, or is a random generator."""
    return has_state(value) or isinstance(value, torch.Generator)


def as_object(value: Any) -> Any:
    """An object with ``load_state_dict()`` in place of a random generator; anything else as it is."""
    return _GeneratorState(value) if isinstance(value, torch.Generator) else value


class _GeneratorState:
    """A random generator as an object with state."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> Tensor:
        """Its state."""
        return self._generator.get_state()

    def load_state_dict(self, state: Any) -> None:
        """Put it into a state, or that of a loaded generator.  Raises StateError for anything else."""
        found = state.get_state() if isinstance(state, torch.Generator) else state
        if not isinstance(found, Tensor):
            raise StateError(f"a {type(state).__name__} was found; the state of a random generator was expected")
        self._generator.set_state(found)


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


def refuse_other_kind(name: str, state: Any, value: Any) -> None:
    """Raise StateError if a state is that of another kind of optimizer, or of schedule, as far as its names tell."""
    if not isinstance(value, Optimizer | LRScheduler) or not isinstance(state, Mapping):
        return
    if isinstance(value, LRScheduler):
        own, saved, kind = {*value.state_dict()}, {*state}, "schedule"
    elif not _is_torchs(state):
        raise StateError(
            f"{name} is a {type(value).__qualname__}; the state of an optimizer was expected, and one of "
            f"{_listed(state)} was found"
        )
    else:
        own, kind = {*value.defaults}, "optimizer"
        saved = {key for group in state["param_groups"] for key in group} - {"params"}
    own, saved = ({key for key in some if str(key)[:1] != "_"} - _MAY_BE_ABSENT for some in (own, saved))
    absent, extra = own - saved, saved - own
    if absent and extra:
        raise StateError(
            f"{name} is a {type(value).__qualname__}, which has {_listed(absent)}; the checkpoint has {_listed(extra)} "
            f"instead, as another kind of {kind} has: the kind that was saved was expected"
        )
    kept = _KEPT.get(type(value).__name__, set()) if type(value).__module__.startswith("torch.optim") else set()
    for of_parameter in state["state"].values() if kept else ():
        if of_parameter and not kept <= of_parameter.keys():
            raise StateError(
                f"{name} is a {type(value).__qualname__}, which keeps {_listed(kept)} of a parameter; the checkpoint "
                f"has {_listed(of_parameter)}, as another kind of optimizer has: the kind that was saved was expected"
            )


def _listed(names: Iterable[object]) -> str:
    some = sorted(map(str, names))
    return ", ".join(some[:6]) + (" …" if len(some) > 6 else "") if some else "nothing"


def _is_torchs(state: Any) -> bool:
    return (
        isinstance(state, dict) and isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)
    )
