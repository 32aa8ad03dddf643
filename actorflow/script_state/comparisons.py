"""Detect dataclass objects that a step compares as a whole, including fields that no guard checks.

Dataclasses generate methods such as ``==`` and ``<``, which read all fields without naming them in the user's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from actorflow.script_state.sources import AttributesSource, SlotsSource, StateSource, StoredClassSource

__all__ = ["ComparisonWatch"]

COMPARE = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__")
MADE = "<string>"  # file name in the code of methods that dataclasses generate


class ComparisonWatch:
    """Records which dataclass objects are compared while a step runs in ``watching``."""

    def __init__(self, sources: Sequence[StateSource], read: Sequence[StateSource]) -> None:
        self._classes = dict.fromkeys(
            one.holder for one in sources if isinstance(one, StoredClassSource) and dataclasses.is_dataclass(one.holder)
        )
        self._paths = {id(one.holder): one.path for one in sources}
        self._read = {id(one.holder): one for one in read}
        self._compared: dict[int, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the step runs."""
        were = [(owner, name, owner.__dict__.get(name)) for owner in self._classes for name in COMPARE]
        made = [
            (owner, name, f) for owner, name, f in were
            if isinstance(f, types.FunctionType) and f.__code__.co_filename == MADE
        ]  # fmt: skip
        try:
            for owner, name, function in made:
                setattr(owner, name, self._noting(function))
            yield
        finally:
            for owner, name, function in made:
                setattr(owner, name, function)

    def _noting(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(function)
        def compare(one: Any, other: Any) -> Any:
            if type(one) is type(other):
                self._compared |= {id(one): one, id(other): other}
            return function(one, other)

        return compare

    @property
    def unseen(self) -> tuple[str, str] | None:
        """The path of an object that was compared, and a field of it that no guard checks; None if there is none."""
        for one in self._compared.values():
            holder = getattr(one, "__dict__", one)  # for a class with slots, the object itself
            path = self._paths.get(id(holder))
            if path is None or type(one).__dataclass_params__.frozen:  # made in the step, or immutable
                continue
            guard = self._read.get(id(holder))
            guarded = guard.read() if isinstance(guard, AttributesSource | SlotsSource) else {}
            for field in dataclasses.fields(one):
                value = getattr(one, field.name, None)
                inner = isinstance(value, list | dict | set) and id(value) not in self._read
                if field.compare and (field.name not in guarded or inner):
                    return path, field.name
        return None
