"""Guards: check before a call that the Python state that a plan was captured with is still the same.

A plan is valid for the Python state that its capture could read.  Plain values are compared by type and value, and
everything else by identity.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from operator import attrgetter
from types import FunctionType, MethodType, NoneType
from typing import Any

import numpy as np
from torch import Tensor

from actorflow.script_state.argument_keys import attributes_of, plain_text
from actorflow.script_state.imports import is_loaded
from actorflow.script_state.object_search import PLAIN
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.sources import (
    AttributesSource,
    Getter,
    HooksSource,
    ItemsSource,
    KindSource,
    MappingSource,
    StateSource,
    TensorAttributesSource,
)
from actorflow.script_state.user_code import is_user_file
from actorflow_compiler.core.torch_internals import hooks_made
from actorflow_compiler.numbers.symbolic import current_value, is_sym_number

__all__ = ["ABSENT", "Guards", "StandsFor", "same", "summarize"]

StandsFor = Callable[[Tensor, Tensor], bool]
ABSENT = "nothing"  # how messages name a value that does not exist
LONGEST = 60  # longest text of a value in a message, in characters
_END = object()
_ATTRIBUTES = attrgetter("__dict__")
INTERNED = (NoneType, bool, Enum, FunctionType, type)  # types with few values, each a single object
CONTAINERS = (dict, OrderedDict, list, set, tuple)  # their truth value is a cheap test for being empty


class Guards:
    """The values that code could read when a plan was requested, which are compared before each call.

    ``stands_for`` says whether a tensor may replace another one without making a difference.
    """

    def __init__(self, found: SearchResult, stands_for: StandsFor) -> None:
        self.stands_for = stands_for
        self._sources, self._awaited = found.read_sources, found.awaited
        self._own: dict[tuple[int, type], set[Any]] = {}
        self._set: dict[tuple[int, type], set[Any]] = {}  # keys that code only sets, and that are checked too
        self._take()

    def renew(self) -> None:
        """Expect the current values from now on."""
        self._take()

    def exclude(self, places: Iterable[tuple[StateSource, Any]]) -> None:
        """Stop checking values, by source and key, that the plan itself changes; it states for which it is valid."""
        for one, key in places:
            self._own.setdefault((id(one.holder), type(one)), set()).add(key)
        if self._own:
            self._take()

    def watch_stored(self, found: SearchResult, changed: Iterable[tuple[StateSource, Any]]) -> None:
        """Also check values that code only sets, if the step left the previous value: calls do not set them.

        Values that are ``changed``, given by source and key, are set by each call, whatever the previous value is.
        Only values of ``INTERNED`` types are added: for others the capture sees whether the step has set them.
        """
        leaves = {(id(one.holder), key) for one, key in changed}
        for one, key in found.stored_only():
            if isinstance(one.values()[key], INTERNED) and (id(one.holder), key) not in leaves:
                self._set.setdefault((id(one.holder), type(one)), set()).add(key)
                self._sources = self._sources if one in self._sources else (*self._sources, one)
        if self._set:
            self._take()

    def _read(self, one: StateSource) -> dict[Any, Any]:
        """The values of a source that are checked."""
        at = id(one.holder), type(one)
        found = one.read()
        if at in self._set:
            found = found | {key: value for key, value in one.values().items() if key in self._set[at]}
        return {key: value for key, value in found.items() if key not in self._own[at]} if at in self._own else found

    def _now_of(self, one: StateSource, old: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """The values of a source that are compared with the ``old`` ones."""
        return one.compared(self._read(one), old)

    @property
    def read(self) -> list[tuple[StateSource, Mapping[Any, Any]]]:
        """The sources that are checked, with the expected values."""
        return [*zip(self._sources, self._before, strict=True)]

    def _take(self) -> None:
        """Keep the current values in forms that can be compared fast."""
        self._before = [self._read(one) for one in self._sources]
        fast: dict[Getter, list[Any]] = {}
        self._slow = []
        self._keyed: list[dict[str, Any]] = []
        for one, old in zip(self._sources, self._before, strict=True):
            gets = one.fast_getters(old) if (id(one.holder), type(one)) not in self._own else None
            if gets is None:
                self._slow += [(one, old)] if old or not isinstance(one, HooksSource) else []
            elif old or not isinstance(
                one, MappingSource | ItemsSource | TensorAttributesSource
            ):  # their lengths are compared
                if isinstance(one, MappingSource) and one.has_plain_keys:
                    self._keyed.append(one.holder)
                    gets = (dict.values,)
                for get in gets:
                    fast.setdefault(get, []).append(one.holder)
        sized = (AttributesSource, MappingSource, ItemsSource)
        holders = [one.holder for one in self._sources if isinstance(one, sized)]
        self._of_kinds = [one.holder for one in self._sources if isinstance(one, KindSource)]
        self._empty = [holder for holder in holders if type(holder) in CONTAINERS and not holder]  # hooks, mostly
        self._sized = [holder for holder in holders if type(holder) not in CONTAINERS or holder]
        self._lengths = list(map(len, self._sized))
        self._bare = [one.holder for one, old in zip(self._sources, self._before, strict=True) if _is_bare(one, old)]
        self._keys = list(map(tuple, self._keyed))
        self._own_attributes = self._attributes()
        self._fast = [*fast.items()]
        self._values = [*chain.from_iterable(self._now())]
        self._addresses = _addresses(self._values, len(self._values))  # kept alive, so unique
        self._made = hooks_made()

    def _now(self) -> Iterator[Iterable[Any]]:
        """The current values, followed by an end mark, so that a different number of values is noticed."""
        kinds = map(type, self._of_kinds)
        return chain.from_iterable([*(map(get, holders) for get, holders in self._fast), (kinds,), ((_END,),)])

    def _attributes(self) -> list[int]:
        """For each tensor to which the script has given no attributes, the number of its attributes."""
        return list(map(len, map(_ATTRIBUTES, self._bare)))

    def _untouched(self) -> bool:
        """Whether all values are identical to the expected ones: the fast check of every call."""
        try:
            identical = _addresses(chain.from_iterable(self._now()), len(self._values)) == self._addresses
        except (KeyError, ValueError, AttributeError):  # a value no longer exists
            return False
        return (
            identical
            and not any(self._empty)
            and list(map(len, self._sized)) == self._lengths
            and list(map(tuple, self._keyed)) == self._keys
            and self._attributes() == self._own_attributes
            and hooks_made() == self._made
            and all(_identical(self._now_of(one, old), old) for one, old in self._slow)
        )

    def difference(self) -> str:
        """The first change since the plan was captured, as text; empty if the plan is still valid.

        A module of the user that the step has imported first was not searched: the next call is to look into it.
        """
        for name in self._awaited:
            if is_loaded(name) and is_user_file(getattr(sys.modules[name], "__file__", None)):
                return f"{name} changed from {ABSENT} to a module"
        if self._untouched():
            return ""
        for one, old in zip(self._sources, self._before, strict=True):
            found = self._difference(one, old)
            if found:
                return found
        self._take()  # equal, but perhaps not identical
        return ""

    def _difference(self, one: StateSource, old: Mapping[Any, Any]) -> str:
        now = self._now_of(one, old)
        for key in (*old, *(key for key in now if key not in old)):
            was, is_now = old.get(key, ABSENT), now.get(key, ABSENT)
            if (key in old) != (key in now) or not self._same(was, is_now):
                there = summarize(was) if key in old else ABSENT
                return f"{one.label(key)} changed from {there} to {summarize(is_now) if key in now else ABSENT}"
        if isinstance(one, MappingSource) and [*old] != [*now]:
            return f"the order of {one.path or 'keyword arguments'} changed"
        return ""

    def _same(self, old: Any, new: Any) -> bool:
        return same(old, new, self.stands_for)


def _addresses(things: Iterable[Any], count: int) -> bytes:
    """The addresses of ``count`` objects as bytes, for one fast comparison: a NumPy object array stores addresses.

    Raises ValueError if there are fewer objects; further ones are ignored.
    """
    there = np.fromiter(things, object, count)
    return np.ndarray(count, np.intp, buffer=there.data).tobytes()


def _is_bare(one: StateSource, old: Mapping[Any, Any]) -> bool:
    return isinstance(one, TensorAttributesSource) and not old


def _identical(now: Mapping[Any, Any], old: Mapping[Any, Any]) -> bool:
    """Whether a source has the same values as before; tensors are compared by identity."""
    if now is old:
        return True
    return now.keys() == old.keys() and all(value is old[key] or same(old[key], value) for key, value in now.items())


def same(old: Any, new: Any, stands_for: Callable[[Tensor, Tensor], bool] = lambda old, new: False) -> bool:
    """Whether code behaves the same with the new value as with the old one."""
    if old is new:
        return True
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return stands_for(old, new)
    if type(old) is not type(new) or is_sym_number(old):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all(same(a, b, stands_for) for a, b in zip(old, new, strict=True))
    if isinstance(old, PLAIN):
        return plain_text(old) == plain_text(new) and _same_attributes(attributes_of(old), attributes_of(new))
    if isinstance(old, MethodType):
        return old.__func__ is new.__func__ and old.__self__ is new.__self__
    return False


def _same_attributes(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return old.keys() == new.keys() and all(same(value, new[name]) for name, value in old.items())


def summarize(value: Any) -> str:
    """A short text for a value, for messages."""
    value = current_value(value)
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (*PLAIN, tuple)):
        text = repr(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    name = getattr(value, "__qualname__", "") or f"a {type(value).__name__}"
    return str(name)
