"""Find the original of a torch function that a script has replaced (``F.relu = mine``), and call the replacement once.

After ``F.relu = mine``, where ``mine`` calls the original, torch's ``F.relu`` looks itself up by its name to hand
itself to ``__torch_function__``.  It finds ``mine``, so a ``__torch_function__`` that calls its argument would call
``mine`` a second time.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actorflow_compiler.core.torch_internals import OpOverload, OpOverloadPacket

__all__ = ["UnpatchedMode", "original"]

_OWNERS: tuple[Any, ...] = (torch.nn.functional, torch.functional, torch.nn.init, Tensor)
_BUILT_IN = (
    BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType, OpOverload,
    OpOverloadPacket,
)  # fmt: skip


def original(func: Any) -> Any:
    """The function of torch that a script has replaced by ``func``; ``func`` itself if it replaces none."""
    patch = _patch(func)
    return func if patch is None else patch.replaced


class UnpatchedMode(TorchFunctionMode):
    """Pass the original function, not its replacement, on to the modes that were entered before this one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        patch = _patch(func)
        if patch is None:
            return func(*args, **(kwargs or {}))
        setattr(patch.owner, patch.name, patch.was)
        try:
            return patch.replaced(*args, **(kwargs or {}))
        finally:
            setattr(patch.owner, patch.name, patch.by)


@dataclass(frozen=True, slots=True)
class _Patch:
    """An attribute of torch's that a script has replaced."""

    owner: Any  # a module, or Tensor
    name: str
    was: Any  # the value that torch gave the attribute
    by: Any  # the script's value
    replaced: Callable[..., Any]  # the function in whose place torch called the script's


def _patch(func: Any) -> _Patch | None:
    """What a script has replaced by ``func``, or by the property of which ``func`` is the getter or the setter."""
    if type(func) is MethodWrapperType and type(func.__self__) is property:
        patch = _patch_by(func.__self__)
        accessor = None if patch is None else getattr(patch.was, func.__name__, None)
        return None if patch is None or accessor is None else replace(patch, replaced=accessor)
    if id(func) in _UNPATCHED or isinstance(func, _BUILT_IN):
        return None
    return _patch_by(func)


def _patch_by(value: Any) -> _Patch | None:
    for owner, originals in _ORIGINALS:
        for name, now in vars(owner).items():
            if now is value and originals.get(name, value) is not value:
                return _Patch(owner, name, originals[name], value, originals[name])
    return None


def _originals(owner: Any) -> dict[str, Any]:
    """Torch's own functions, methods and properties of ``owner`` by name, also of those that are replaced already."""
    found = {name: getattr(owner, name) for name in dir(owner) if name != "__dict__"}
    for name, value in vars(owner).items():
        if not _is_of_torch(value):
            found[name] = _hidden(owner, name)
    return {name: value for name, value in found.items() if callable(value) or hasattr(value, "__get__")}


def _is_of_torch(value: Any) -> bool:
    """Whether torch itself may have given an attribute this value."""
    value = value.fget if isinstance(value, property) else value
    if type(value) is FunctionType:  # also torch.compile(F.relu) has its code in torch, and the module of F.relu
        name, file = str(value.__module__), value.__code__.co_filename
        wraps = hasattr(value, "__wrapped__") and file != getattr(sys.modules.get(name), "__file__", None)
        return name.partition(".")[0] == "torch" and file.startswith(_FOLDER) and not wraps
    return isinstance(value, (*_BUILT_IN, classmethod, staticmethod, type)) or not callable(value)


def _hidden(owner: Any, name: str) -> Any:
    """What a script replaced before this module was imported; None if nothing is left that could call it."""
    if owner is Tensor:
        in_python = (f for f in _functions_of_torch() if f.__qualname__ == f"Tensor.{name}")
        return next(in_python, getattr(_METHODS_IN_C, name, None))
    return next((f for f in _functions_of_torch() if f.__name__ == name and f.__module__ == owner.__name__), None)


@functools.cache
def _functions_of_torch() -> tuple[FunctionType, ...]:
    """Those that anything refers to."""
    return tuple(value for value in gc.get_objects() if type(value) is FunctionType and _is_of_torch(value))


_FOLDER = os.path.dirname(torch.__file__) + os.sep
_METHODS_IN_C = Tensor.__mro__[1]  # no script can change its attributes
_ORIGINALS: list[tuple[Any, dict[str, Any]]] = [(owner, _originals(owner)) for owner in _OWNERS]
_UNPATCHED = {id(value) for _, originals in _ORIGINALS for value in originals.values()}
_functions_of_torch.cache_clear()
