"""Let torch.jit modules be saved, copied and called while plans own their tensors.

torch reads the memory of their tensors directly, but a stand-in has no memory.  So values replace the stand-ins while
these methods run.
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
    """Note that a torch.jit module holds the stand-in ``owned`` from now on."""
    memory_is_refused(owned)
    for name in READING:
        plain = vars(SCRIPT_MODULE).get(name)
        if plain is not None and not hasattr(plain, "with_values"):
            setattr(SCRIPT_MODULE, name, _reading(plain))

    if not _told:
        _told.append(True)
        tell_of_scripts(_called)


def _called(plain: Callable[..., Any], script: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch.jit code; if a stand-in refuses an op, its original error is raised."""
    OwnedTensor.refused_last = None
    try:
        return plain(script, *args, **kwargs)
    except RuntimeError as error:
        if OwnedTensor.refused_last is None:
            raise
        raise OwnedTensor.refused_last from error


def _reading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs with values in place of stand-ins."""

    @functools.wraps(plain)
    def read(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _values_in(module):
            return plain(module, *args, **kwargs)

    read.with_values = True  # type: ignore[attr-defined]
    return read


@contextlib.contextmanager
def _values_in(root: nn.Module) -> Iterator[None]:
    """A context in which a torch.jit module holds values instead of stand-ins."""
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
    """The tensors of a torch.jit module and of the modules below it, each with its location."""
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
