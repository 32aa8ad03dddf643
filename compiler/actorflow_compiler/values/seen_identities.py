"""Let ``id``, ``hash`` and ``type`` in a traced step give what they give for the script's own tensors.

The stand-ins that a trace puts in their places are other objects, of another class.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import GenericAlias, ModuleType
from typing import Any

from torch import Tensor, nn

from actorflow_compiler.core.torch_internals import FakeTensor
from actorflow_compiler.core.user_code import STDLIB, is_users

__all__ = ["original_ids", "plain_types"]

_type = type


@contextmanager
def original_ids(originals: Mapping[str, Tensor], stand_ins: Mapping[str, Tensor]) -> Iterator[None]:
    """While this is open, ``id`` and ``hash`` of a stand-in that the script's own code calls are those of its original.

    A script may have collected them before: ``no_decay = {id(p) for p in …}``.  Libraries see the stand-ins' own.
    """
    ids, hashes = builtins.id, builtins.hash
    of = {ids(stand_in): originals[name] for name, stand_in in stand_ins.items()}

    def of_original(plain: Callable[[object], int]) -> Callable[[object], int]:
        def seen(thing: object, /) -> int:
            original = of.get(ids(thing))
            return plain(thing if original is None or not is_users(sys._getframe(1).f_code.co_filename) else original)

        return seen

    builtins.id, builtins.hash = of_original(ids), of_original(hashes)
    try:
        yield
    finally:
        builtins.id, builtins.hash = ids, hashes


@contextmanager
def plain_types() -> Iterator[None]:
    """While this is open, ``type(x)`` in the script's modules is ``torch.Tensor`` or ``nn.Parameter`` for a stand-in.

    A module with a ``type`` of its own keeps that.
    """
    modules = [m for m in [*sys.modules.items()] if isinstance(m[1], ModuleType)]
    spaces = [vars(m) for name, m in modules if name == "__main__" or is_users(str(getattr(m, "__file__", STDLIB)))]
    changed = [space for space in spaces if "type" not in space]
    for space in changed:
        space["type"] = _SeenType
    try:
        yield
    finally:
        for space in changed:
            if space.get("type") is _SeenType:
                del space["type"]


class _SeenTypeOfAll(_type):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self is not _SeenType:  # a metaclass that was made in the step
            return super().__call__(*args, **kwargs)
        if len(args) != 1 or kwargs:
            return _type(*args, **kwargs)
        found = _type(args[0])
        if found is not FakeTensor:
            return found
        return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor

    def __getitem__(self, item: Any) -> Any:
        return GenericAlias(_type, item)

    def __instancecheck__(self, one: Any) -> bool:
        return isinstance(one, _type)

    def __subclasscheck__(self, one: Any) -> bool:
        return issubclass(one, _type)


class _SeenType(_type, metaclass=_SeenTypeOfAll):
    """What ``type`` is in the script's modules."""
