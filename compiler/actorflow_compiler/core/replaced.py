"""What torch says is called goes in, to ``__torch_function__``; what is called comes out.

After ``F.relu = mine``, where ``mine`` calls what ``F.relu`` was, that function looks itself up by its name to hand
itself on, finds ``mine``, and ``mine`` would be called once more by everyone whom it is handed to.
"""

from __future__ import annotations

from types import BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Genuine", "original"]

_OWNERS: tuple[Any, ...] = (torch.nn.functional, torch.functional, torch.nn.init, Tensor)
_HAD: list[tuple[Any, dict[str, Any]]] = [
    (owner, {name: getattr(owner, name) for name in dir(owner) if callable(getattr(owner, name, None))})
    for owner in _OWNERS
]
_GENUINE = {id(value) for _, had in _HAD for value in had.values()}
_BUILT_IN = (
    BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType, torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)  # fmt: skip


def original(func: Any) -> Any:
    """What torch had in the place where a script has put ``func``; ``func`` itself if it has put it nowhere."""
    place = _place(func)
    return func if place is None else place[2]


class Genuine(TorchFunctionMode):
    """In which modes that were entered before it, torch's among them, are handed what is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _place(func)
        if place is None:
            return func(*args, **(kwargs or {}))
        owner, name, was = place
        setattr(owner, name, was)
        try:
            return was(*args, **(kwargs or {}))
        finally:
            setattr(owner, name, func)


def _place(func: Any) -> tuple[Any, str, Any] | None:
    if isinstance(func, _BUILT_IN) or id(func) in _GENUINE:
        return None
    for owner, had in _HAD:
        for name, value in vars(owner).items():
            if value is func and had.get(name, func) is not func:
                return owner, name, had[name]
    return None
