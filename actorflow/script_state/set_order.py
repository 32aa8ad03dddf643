"""Order the members of a set in the same way on every rank, as far as they can be distinguished.

Objects that hash by address have a different order on each rank.  Members are distinguished by their names, or else by
their contents: the names that plans have given to tensors, or the tensors' values.
"""

from __future__ import annotations

import itertools
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from actorflow_compiler.core.tensor_bytes import contents

__all__ = ["stable_order", "tensor_text"]

CALLED = (type, types.FunctionType, types.BuiltinFunctionType)
DEPTH = 4  # levels of nested objects that are compared
MOST = 1000  # items of an object that are compared


def stable_order(members: Iterable[Any], known: Callable[[Tensor], str | None]) -> list[Any]:
    """The members sorted by type and name, and those with equal names by their contents.

    ``known`` returns the name that a tensor has on all ranks, or None.  Members with equal contents keep their order.
    """
    found: list[Any] = []
    for _, alike in itertools.groupby(sorted(members, key=_name), key=_name):
        group = [*alike]
        found += group if len(group) == 1 else sorted(group, key=lambda one: _content(one, known, DEPTH))
    return found


def _name(thing: Any) -> tuple[str, str]:
    if isinstance(thing, nn.Module | str | int):
        return type(thing).__qualname__, repr(thing)
    called = f"{thing.__module__}.{thing.__qualname__}" if isinstance(thing, CALLED) else ""
    return type(thing).__qualname__, called


def _content(thing: Any, known: Callable[[Tensor], str | None], depth: int) -> str:
    """The contents of an object as text, without addresses."""

    def of(items: Iterable[tuple[Any, Any]]) -> str:
        some = itertools.islice(items, MOST if depth else 0)
        return ", ".join([f"{_content(key, known, 0)}: {_content(item, known, depth - 1)}" for key, item in some])

    if isinstance(thing, Tensor):
        return known(thing) or tensor_text(thing)
    if isinstance(thing, nn.Module):
        named = itertools.chain(thing.named_parameters(), thing.named_buffers())
        return ", ".join([f"{name}: {_content(tensor, known, 0)}" for name, tensor in named])
    if isinstance(thing, str | bytes | int | float | complex | torch.dtype | torch.device | None):
        return repr(thing)
    if isinstance(thing, tuple | list):
        return f"{type(thing).__qualname__}({of(enumerate(thing))})"
    if isinstance(thing, Mapping):
        return f"{type(thing).__qualname__}({of(thing.items())})"
    attributes = getattr(thing, "__dict__", None)
    held = of(attributes.items()) if isinstance(attributes, dict) else ""
    return f"{'.'.join(_name(thing))}({held})"


def tensor_text(tensor: Tensor) -> str:
    """A tensor's dtype and shape, and a checksum of its values if they are in memory."""
    found = f"{tensor.dtype} {tuple(tensor.shape)}" if not tensor.is_nested else f"{tensor.dtype}"
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    if not plain or tensor.device.type not in ("cpu", "cuda"):
        return found
    return f"{found} {zlib.crc32(contents(tensor)):08x}"
