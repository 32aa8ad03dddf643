"""Make the key under which a call's plan is cached, and describe the call for people."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from actorflow.script_state.arguments import CallArguments
from actorflow_compiler.capture.optimizer_state import is_fused, is_torchs
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.expressions import has_numbers, number_of
from actorflow_compiler.core.torch_internals import only_dispatch, scaler_settings
from actorflow_compiler.custom_ops.optimizers import READ
from actorflow_compiler.values.variables import ScriptState

__all__ = [
    "GrowingModule", "PlanKeyMaker", "call_text", "first_step_differs", "refuse_mixed", "settings_lines", "torch_modes",
]  # fmt: skip

BUFFER = "momentum_buffer"


class GrowingModule(torch.nn.Module):
    """A module whose flags never change, and to which other jobs may add parameters."""


class PlanKeyMaker:
    """Makes the keys of one job's calls.

    Besides the arguments, a key has the flags of the modules and parameters that the search found, the
    state of autocast, and the optimizers' settings that are constants of a plan.  Members of a
    ``GrowingModule`` are left out.
    """

    def __init__(self, state: ScriptState) -> None:
        self.state = state
        self._modules = tuple(m for root in state.modules.values() for m in root.modules())
        growing = [m for m in self._modules if isinstance(m, GrowingModule)]
        apart = {id(t) for m in growing for t in (*m.parameters(), *m.buffers())}
        self._fused = _fused(state)
        self._held = tuple(h for h in state.held.values() if id(h.tensor) not in apart)
        self._groups: dict[tuple[str, int], tuple[list[torch.Tensor], tuple[int, ...]]] = {}

    def key(self, arguments: CallArguments, first: bool) -> tuple[Any, ...]:
        """The key of a call; ``first``: the coming step is an optimizer's first and differs from those after it."""
        training = tuple([m.training for m in self._modules])
        with only_dispatch():  # several times faster for stand-ins
            gradients = tuple([h.tensor.requires_grad for h in self._held])
        settings = self._grouped(), _optimizers(self.state, self._fused), _scalers(self.state)
        return arguments.key, training, gradients, torch_modes(), *settings, first

    def _grouped(self) -> tuple[tuple[int, ...], ...]:
        """The parameters of each group of each optimizer; a plan finds a group's settings by its position."""
        return tuple(
            [
                self._places(name, g, group["params"])
                for name, optimizer in self.state.optimizers.items()
                for g, group in enumerate(optimizer.param_groups)
            ]
        )

    def _places(self, name: str, g: int, parameters: list[torch.Tensor]) -> tuple[int, ...]:
        before, places = self._groups.get((name, g), ([], ()))
        if len(before) != len(parameters) or not all(map(is_, before, parameters)):
            known = {id(h.tensor): at for at, h in enumerate(self.state.held.values())}
            places = tuple([known.get(id(p), -1) for p in parameters])
            self._groups[name, g] = [*parameters], places
        return places

    def rates(self) -> str:
        """The current values of settings read at each call, as text: ``optimizer.0: lr 0.001, weight_decay 0.01``."""
        return "; ".join(
            f"{name}.{g}: {', '.join(f'{key} {_floats(group[key])!r}' for key in self._read(name, group))}"
            for name, optimizer in self.state.optimizers.items()
            for g, group in enumerate(optimizer.param_groups)
        )

    def _read(self, name: str, group: Mapping[str, Any]) -> list[str]:
        if name in self._fused:
            return [key for key in group if key in READ]
        return [key for key, value in group.items() if has_numbers(value) or key == "lr"]


def first_step_differs(state: ScriptState) -> bool:
    """Whether an optimizer's coming step is its first one, or one without state, and differs from those after it."""
    return any(
        group.get("dampening") and group.get("momentum")
        for optimizer in state.optimizers.values()
        if not optimizer.state
        for group in optimizer.param_groups
    )


def refuse_mixed(state: ScriptState, used: Collection[str]) -> None:
    """Raise StateError if a plan would run the first step of some parameters and a later step of others."""
    names = {id(h.tensor): h.name for h in state.held.values()}
    first: dict[bool, str] = {}
    for title, optimizer in state.optimizers.items():
        for group in optimizer.param_groups:
            for p in group["params"] if group.get("dampening") and group.get("momentum") else ():
                if f"{title}.{names.get(id(p))}.{BUFFER}" in used:
                    first.setdefault(optimizer.state.get(p, {}).get(BUFFER) is None, names[id(p)])
    if len(first) == 2:
        raise StateError(
            f"{first[False]} has been stepped by SGD with dampening, and {first[True]} has not, whose first step is "
            f"another one; expected: all of its parameters from the first step on, or dampening=0"
        )


def call_text(arguments: CallArguments, key: tuple[Any, ...]) -> str:
    """A call as source text, with the other parts of its key that can differ between ranks; equal for equal keys."""
    (structure, specs, plain), training, gradients, *others = key
    values = [(path, kind.__qualname__, value if isinstance(value, str) else "") for path, kind, value in plain]
    digest = hashlib.sha256(repr([structure, specs, values, training, gradients, others]).encode()).hexdigest()[:8]
    return (
        f"{arguments.spoken} [{sum(training)} of {len(training)} modules training, {sum(gradients)} of "
        f"{len(gradients)} tensors with gradients, settings {digest}"
    )


def settings_lines(state: ScriptState) -> list[str]:
    """Flags and settings as lines of text, in which ranks that compile a plan find their differences."""
    modules = [(root, n, m) for root, module in state.modules.items() for n, m in module.named_modules()]
    found = [f"autocast, modes and dtype of torch: {torch_modes()}"]
    found += [
        f"module {f'{root}.{n}' if n else root}: {type(m).__name__}, {'training' if m.training else 'evaluating'}"
        for root, n, m in modules
    ]
    for (name, optimizer), *groups in zip(state.optimizers.items(), _optimizers(state, _fused(state)), strict=True):
        found.append(f"optimizer {name}: {type(optimizer).__name__} {groups}")
    for name, settings in zip(state.scalers, _scalers(state), strict=True):
        found.append(f"scaler {name}: growth, backoff and interval {settings}")
    return found


def torch_modes() -> tuple[Any, ...]:
    """Torch's settings in this process by which ops and their decompositions are chosen."""
    kinds = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
    torchs = torch.is_grad_enabled(), torch.get_default_dtype()
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *kinds, *torchs, *strict, _precision()


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set through both of torch's APIs, which only kernels can resolve
        return ""


def _fused(state: ScriptState) -> frozenset[str]:
    """The fused optimizers, whose rates are read at each call."""
    return frozenset(name for name, optimizer in state.optimizers.items() if is_fused(optimizer))


def _optimizers(state: ScriptState, fused: frozenset[str]) -> tuple[Any, ...]:
    """For each group of each optimizer: the number of parameters, and the settings that are not read at each call.

    For an optimizer that is not torch's it also has which parameters have state, since its step may differ without.
    For torch's optimizers this is added if the script's code checks for state.
    """
    return tuple(
        tuple(
            (
                len(group["params"]),
                _kept(optimizer.state, group["params"], state.looks_at_steps, is_torchs(optimizer)),
                *_constants(group, optimizer.defaults, name in fused),
            )
            for group in optimizer.param_groups
        )
        for name, optimizer in state.optimizers.items()
    )


def _kept(kept: Any, parameters: Sequence[torch.Tensor], looked_at: bool, torchs: bool) -> tuple[Any, ...]:
    if not torchs:
        return tuple([bool(kept.get(p)) for p in parameters])
    if not looked_at:
        return ()
    names = [tuple([(key, value is None) for key, value in kept[p].items()]) if p in kept else None for p in parameters]
    return len(kept), *names


def _scalers(state: ScriptState) -> tuple[Any, ...]:
    return tuple(map(scaler_settings, state.scalers.values()))


def _constants(group: Mapping[str, Any], known: Mapping[str, Any], fused: bool) -> Iterator[tuple[str, Any]]:
    """The settings that are constants of a plan; schedulers add keys that the optimizer does not know."""
    for key, value in group.items():
        if key in known and not (fused and key in READ):
            yield key, repr(value) if fused else _constant(value, rate=key == "lr")
        elif fused and key == "momentum":
            yield key, bool(value)  # with momentum 0 there is no buffer


def _constant(value: Any, rate: bool = False) -> str:
    """A setting as text, without numbers (a ``rate`` may be a tensor), on which a plan has conditions of its own."""
    if rate and isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(map(_constant, value))}"
    return type(value).__name__ if number_of(value) else repr(value)


def _floats(value: Any) -> Any:
    """Numbers, also in tensors, as Python floats; other values (None for a rate the optimizer finds) unchanged."""
    if isinstance(value, tuple | list):
        return tuple(map(_floats, value))
    return float(value) if value is not None else None
