"""Let modules of torch.jit be saved, copied and called while plans own their tensors.

torch reads the memory of their tensors by itself, and a stand-in has none: values take the place of the stand-ins for
that time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from actorflow.standins.locations import ScriptAttributeLocation, ScriptListLocation, ScriptTensorLocation
from actorflow.standins.owned_tensor import OwnedTensor, real_value
from actorflow_compiler.core.torch_internals import SCRIPT_MODULE, memory_is_refused, script_attributes, tell_of_scripts

__all__ = ["support_torchscript"]

READING = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter",
           "__copy__", "__deepcopy__")  # fmt: skip
_told: list[bool] = []


def support_torchscript(owned: OwnedTensor) -> None:
    """A module of torch.jit has ``owned`` from now on."""
    memory_is_refused(owned)
    for name in READING:
        plain = vars(SCRIPT_MODULE).get(name)
        if plain is not None and not hasattr(plain, "with_values"):
            setattr(SCRIPT_MODULE, name, _reading(plain))

    if not _told:
        _told.append(True)
        tell_of_scripts(_called)


def _called(plain: Callable[..., Any], script: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of code of torch.jit gives; what a stand-in refuses leaves it as it was raised."""
    OwnedTensor.refused_last = None
    try:
        return plain(script, *args, **kwargs)
    except RuntimeError as error:
        if OwnedTensor.refused_last is None:
            raise
        raise OwnedTensor.refused_last from error


def _reading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What a method does while values are where stand-ins were."""

    @functools.wraps(plain)
    def read(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _values_in(module):
            return plain(module, *args, **kwargs)

    read.with_values = True  # type: ignore[attr-defined]
    return read


@contextlib.contextmanager
def _values_in(root: nn.Module) -> Iterator[None]:
    """In which a module of torch.jit has values, and not stand-ins."""
    values: dict[int, Tensor] = {}
    put: list[tuple[Any, OwnedTensor]] = []

    def value(owned: OwnedTensor) -> Tensor:
        if id(owned) not in values:
            found = real_value(owned)
            values[id(owned)] = nn.Parameter(found, owned.requires_grad) if owned.is_parameter else found
        return values[id(owned)]

    try:
        for place, tensor in _places(root):
            if isinstance(tensor, OwnedTensor):
                put.append((place, tensor))
                place(value(tensor))
        yield
    finally:
        for place, owned in put:
            place(owned)


def _places(root: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Where a module of torch.jit, and those below it, have tensors, and these."""
    for module in root.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        for tensors in (module._parameters, module._buffers):
            for name, tensor in [*tensors.items()]:
                yield ScriptTensorLocation(tensors, name), tensor
        program, names = script_attributes(module)
        for name in names:
            value, place = program.getattr(name), ScriptAttributeLocation(program, name)
            for at, item in enumerate(value) if isinstance(value, list) else [(-1, value)]:
                if isinstance(item, Tensor):
                    yield place if at < 0 else ScriptListLocation(place, at), item
