"""Find the original of a torch function that a script has replaced (``F.relu = mine``), and call the replacement once.

After ``F.relu = mine``, where ``mine`` calls the original, torch's ``F.relu`` looks itself up by its name to hand
itself to ``__torch_function__``.  It finds ``mine``, so a ``__torch_function__`` that calls its argument would call
``mine`` a second time.
"""

from __future__ import annotations

from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actorflow_compiler.core.torch_internals import OpOverload, OpOverloadPacket

__all__ = ["UnpatchedMode", "original"]

_OWNERS: tuple[Any, ...] = (torch.nn.functional, torch.functional, torch.nn.init, Tensor)
_ORIGINALS: list[tuple[Any, dict[str, Any]]] = [
    (owner, {name: getattr(owner, name) for name in dir(owner) if callable(getattr(owner, name, None))})
    for owner in _OWNERS
]
_UNPATCHED = {id(value) for _, originals in _ORIGINALS for value in originals.values()}
_BUILT_IN = (
    BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType, OpOverload,
    OpOverloadPacket,
)  # fmt: skip


def original(func: Any) -> Any:
    """The function of torch that a script has replaced by ``func``; ``func`` itself if it replaces none."""
    found = _replaced(func)
    return func if found is None else found[2]


class UnpatchedMode(TorchFunctionMode):
    """Pass the original function, not its replacement, on to the modes that were entered before this one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _replaced(func)
        if found is None:
            return func(*args, **(kwargs or {}))
        owner, name, was = found
        setattr(owner, name, was)
        try:
            return was(*args, **(kwargs or {}))
        finally:
            setattr(owner, name, func)


def _replaced(func: Any) -> tuple[Any, str, Any] | None:
    """The function of torch that a script has replaced by ``func``: (owner, attribute name, original function)."""
    if isinstance(func, _BUILT_IN) or id(func) in _UNPATCHED:
        return None
    for owner, originals in _ORIGINALS:
        for name, value in vars(owner).items():
            if value is func and originals.get(name, func) is not func:
                return owner, name, originals[name]
    return None
