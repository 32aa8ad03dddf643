"""Keys of values: equal for values with which code does the same, whatever their classes call equal.

``1``, ``1.0`` and ``True`` are equal in Python, and objects are if their class says so; code may tell them apart.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actorflow.script_state.user_code import is_user_class

__all__ = ["has_attributes", "key_of", "plain_text"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
DEEPEST = 8  # objects in objects; those further down are compared by identity
UNSET = object()  # what a slot holds that is not set
LARGEST = 1000  # items of a container; a larger one is compared by identity


class _IdentityKey:
    """A key that is equal only to keys of the same object, for as long as it lives.

    It holds a weak reference where the object allows one, so that an object at a reused address is another key.
    """

    __slots__ = ("_get", "_id")

    def __init__(self, thing: object) -> None:
        self._get: Callable[[], object]
        self._id = id(thing)  # the hash must not change when the object is gone
        try:
            self._get = weakref.ref(thing)
        except TypeError:
            self._get = partial(_given, thing)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        mine = self._get()
        return isinstance(other, _IdentityKey) and mine is not None and mine is other._get()

    def __hash__(self) -> int:
        return self._id


def _given(thing: object) -> object:
    return thing


def plain_text(value: Any) -> str:
    """A text that is equal for equal plain values of one class, whatever ``__repr__`` a class of the user's has.

    It distinguishes 0.0 from -0.0, and nan equals nan.
    """
    kind: Any = type(value)
    if kind.__module__ == "builtins":
        return repr(value)
    base = next((base for base in kind.__mro__ if base.__module__ == "builtins" and base is not object), kind)
    return str(base.__repr__(value))


def has_attributes(value: Any) -> bool:
    """Whether the script has given attributes to a number, a text or another plain value of a class of its own."""
    return bool(getattr(value, "__dict__", None)) and not isinstance(value, Enum)


def key_of(value: Any, depth: int = 0) -> Any:
    """A hashable key that is equal for values of one class that may share a plan.

    An object whose class says what is equal has what it holds as its key, and any other is equal to itself alone.
    """
    kind: Any = type(value)
    if isinstance(value, PLAIN):
        return _IdentityKey(value) if has_attributes(value) else plain_text(value)
    if isinstance(value, types.MethodType):  # a new object at each access
        return value.__func__, key_of(value.__self__, depth)
    if isinstance(value, Tensor | Enum) or depth > DEEPEST:
        return _IdentityKey(value)
    if kind in (list, tuple, set, frozenset, dict):
        return _items_key(kind, value, depth)
    if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
        return _IdentityKey(value)
    try:
        hash(value)
    except TypeError:
        return _IdentityKey(value)
    if is_user_class(kind) or dataclasses.is_dataclass(value):
        names = [*getattr(value, "__dict__", ()), *_slots(kind)]
        return tuple((name, *_typed(getattr(value, name, UNSET), depth)) for name in names) or value
    return value  # a library's class defines equality


def _typed(value: Any, depth: int) -> tuple[type, Any]:
    return type(value), key_of(value, depth + 1)


def _items_key(kind: type, value: Any, depth: int) -> Any:
    if len(value) > LARGEST:
        return _IdentityKey(value)
    if kind is dict:
        return tuple((*_typed(key, depth), *_typed(item, depth)) for key, item in value.items())
    items = (_typed(item, depth) for item in value)
    return frozenset(items) if kind in (set, frozenset) else tuple(items)


def _slots(kind: type) -> Iterable[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name
