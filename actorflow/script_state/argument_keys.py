"""Keys of values: equal for values with which code does the same, whatever their classes call equal.

``1``, ``1.0`` and ``True`` are equal in Python, and objects are if their class says so; code may tell them apart.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actorflow.script_state.user_code import is_user_file

__all__ = ["attributes_of", "key_of", "plain_text"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
DEEPEST = 20  # objects in objects; a deeper value counts as its class says, so does one that holds itself
MOST = 300  # things in a value, which are looked at in each call; a larger one counts as its class says
UNSET = object()  # what a slot holds that is not set
WHOLE = {"__dict__", "vars", "astuple", "asdict"}  # names in code that reads all attributes


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


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that the script has given to a number, a text or another plain value of a class of its own."""
    return {} if isinstance(value, Enum) else getattr(value, "__dict__", None) or {}


def key_of(value: Any) -> Any:
    """A hashable key that is equal for values of one class that may share a plan.

    Equal objects are told apart by the classes of what their equality compares (``1`` and ``True``), and those of a
    class that has its equality of a builtin one by their attributes too.  What an equality of the script's leaves out
    does not count.  A large value counts as its class says.
    """
    if isinstance(value, PLAIN) and not attributes_of(value):
        return plain_text(value)
    try:
        key = _Keys().key(value)
        hash(key)
    except (_TooLargeError, TypeError):
        return _own_key(value)
    return key


class _TooLargeError(Exception):
    """A value holds too much for being looked through in each call."""


class _Keys:
    """Keys of a value and of what it holds, which may be ``MOST`` things."""

    def __init__(self) -> None:
        self._left = MOST

    def key(self, value: Any, depth: int = 0) -> Any:
        """The key of a value that is held by ``depth`` others."""
        self._left -= 1
        if self._left < 0 or depth > DEEPEST:
            raise _TooLargeError
        kind: Any = type(value)
        if isinstance(value, PLAIN):
            return plain_text(value), self._attributes(value, attributes_of(value), depth)
        if isinstance(value, types.MethodType):  # a new object at each access
            return value.__func__, self.key(value.__self__, depth)
        if kind in (list, tuple, set, frozenset, dict):
            return self._items(value, depth)
        if isinstance(value, Tensor | Enum) or kind.__hash__ is None or _is_default(kind):
            return _IdentityKey(value)
        code = getattr(kind.__eq__, "__code__", None)
        if code is None:  # a builtin class's, which knows no attributes
            items = self._items(value, depth) if isinstance(value, tuple | frozenset) else ()
            return value, items, self._attributes(value, _names(value), depth)
        if is_user_file(code.co_filename):
            return value, self._attributes(value, _compared(value, code.co_names), depth)
        return value  # a library's class defines equality

    def _attributes(self, value: Any, names: Iterable[str], depth: int) -> Any:
        return tuple((name, *self._typed(getattr(value, name, UNSET), depth)) for name in names)

    def _typed(self, value: Any, depth: int) -> tuple[type, Any]:
        return type(value), self.key(value, depth + 1)

    def _items(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return tuple((*self._typed(key, depth), *self._typed(item, depth)) for key, item in value.items())
        items = (self._typed(item, depth) for item in value)
        return frozenset(items) if isinstance(value, set | frozenset) else tuple(items)


def _own_key(value: Any) -> Any:
    """A key that is equal where the value's class says so, and else for the value alone."""
    if isinstance(value, PLAIN):
        return _IdentityKey(value)
    try:
        hash(value)
    except TypeError:
        return _IdentityKey(value)
    return _IdentityKey(value) if isinstance(value, Tensor) else value


def _is_default(kind: Any) -> bool:
    """Whether objects of a class are equal to themselves alone."""
    return kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__


def _names(value: Any) -> list[str]:
    """The names of an object's own attributes."""
    return [*getattr(value, "__dict__", ()), *_slots(type(value))]


def _compared(value: Any, said: Iterable[str]) -> list[str]:
    """The attributes of an object that a method of its class names that says what is equal."""
    names, said = _names(value), set(said)
    return names if said & WHOLE else [name for name in names if name in said]


def _slots(kind: type) -> Iterable[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name
