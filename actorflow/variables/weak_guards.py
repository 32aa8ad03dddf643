"""Recognise the objects that a plan was captured with when a later search finds them, by weak references."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from actorflow.script_state.argument_keys import attributes_of, plain_text
from actorflow.script_state.name_registry import NameRegistry
from actorflow.script_state.object_search import PLAIN
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.sources import StateSource
from actorflow.standins.owned_tensor import OwnedTensor
from actorflow_compiler.values.variables import ScriptState

__all__ = ["WeakGuards", "names_in", "owned_in"]

CONTAINERS = (list, dict, set)  # their items are compared as sources of their own
NEVER = ("never",)


def names_in(state: ScriptState) -> set[str]:
    """The names of everything that a search found; equal names always mean the same objects."""
    return {*state.held, *state.modules, *state.optimizers, *state.scalers}


def owned_in(state: ScriptState) -> set[str]:
    """The names of the modules, optimizers, scalers and owned tensors.

    Plain tensors are left out, because others may replace them.
    """
    owned = {name for name, held in state.held.items() if isinstance(held.tensor, OwnedTensor)}
    return owned | (names_in(state) - state.held.keys())


class WeakGuards:
    """Weak references to the objects that a plan works on, while its job works on others.

    ``read`` are the sources that its code reads, with their values.  ``died`` is called, on any thread, when a module,
    an optimizer, a scaler or a variable's stand-in has died.
    """

    def __init__(
        self,
        found: SearchResult,
        read: Sequence[tuple[StateSource, Mapping[Any, Any]]],
        names: NameRegistry,
        died: Callable[[Any], None],
    ) -> None:
        state = found.state
        self.names = names_in(state)
        self._names = names
        self._sources = _paths(found.sources)
        self._read = [(type(one), one.path, [(_known(k), self._said(v)) for k, v in had.items()]) for one, had in read]
        tensors = [held.tensor for held in state.held.values() if isinstance(held.tensor, OwnedTensor)]
        things = [*state.modules.values(), *state.optimizers.values(), *state.scalers.values(), *tensors]
        self._refs = [weakref.ref(thing, died) for thing in things]

    @property
    def gone(self) -> bool:
        """Whether one of the objects has died."""
        return any(ref() is None for ref in self._refs)

    def is_there(self, found: SearchResult) -> bool:
        """Whether a search has found the objects that the plan was made with, unchanged."""
        if names_in(found.state) != self.names or _paths(found.sources) != self._sources:
            return False
        now = found.read_sources
        if [(kind, path) for kind, path, _ in self._read] != _paths(now):
            return False
        return all(
            [(_known(key), self._said(value)) for key, value in one.read().items()] == had
            for one, (_, _, had) in zip(now, self._read, strict=True)
        )

    def _said(self, value: Any) -> Any:
        """A comparable form of a value: equal if code would do the same with it, and without references to objects."""
        if isinstance(value, Tensor):
            return "tensor", self._names.known(self._names.current(value))
        if isinstance(value, PLAIN):
            given = attributes_of(value)
            if not all(isinstance(one, PLAIN) for one in given.values()):
                return NEVER, object()
            return type(value), plain_text(value), tuple((name, self._said(one)) for name, one in given.items())
        if isinstance(value, tuple):
            return type(value), tuple(map(self._said, value))
        if isinstance(value, CONTAINERS):
            return "container", type(value)
        if hasattr(value, "__func__") and hasattr(value, "__self__"):
            return "method", self._said(value.__func__), self._said(value.__self__)
        try:
            return "thing", _WeakIdentity(value)
        except TypeError:
            return NEVER, object()


class _WeakIdentity:
    """Equal to another reference to the same object for as long as that object lives."""

    __slots__ = ("_ref",)

    def __init__(self, thing: Any) -> None:
        self._ref = weakref.ref(thing)

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return isinstance(other, _WeakIdentity) and mine is not None and mine is other._ref()

    __hash__ = None  # type: ignore[assignment]


def _paths(sources: Sequence[StateSource]) -> list[tuple[type, str]]:
    return [(type(one), one.path) for one in sources]


def _known(key: Any) -> Any:
    """A comparable form of a source's key: plain keys themselves, others by identity."""
    if isinstance(key, PLAIN):
        return key
    try:
        return "thing", _WeakIdentity(key)
    except TypeError:
        return NEVER, object()
