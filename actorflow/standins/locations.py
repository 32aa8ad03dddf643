"""Locations that hold a tensor (an item, an attribute, a closure's cell), in which another one can be put."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

__all__ = [
    "AttributeLocation", "CellLocation", "ClassAttributeLocation", "ImmutableItemLocation", "ItemLocation",
    "KeyLocation", "PartialArgsLocation", "ScriptAttributeLocation", "ScriptListLocation", "ScriptTensorLocation",
    "TensorLocation",
]  # fmt: skip


class TensorLocation(Protocol):
    """A place that holds a tensor; calling it puts another tensor there."""

    def __call__(self, tensor: Tensor) -> None:
        """Put a tensor there."""

    def get(self) -> Any:
        """What is there now."""


class ItemLocation:
    """An item of a dictionary or list (attributes are items of their object's ``__dict__``)."""

    __slots__ = ("_container", "_key")

    def __init__(self, container: Any, key: Any) -> None:
        self._container, self._key = container, key

    def __call__(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        self._container[self._key] = tensor

    def get(self) -> Any:
        """What is there now; None if the item is gone."""
        try:
            return self._container[self._key]
        except (KeyError, IndexError):
            return None


class KeyLocation:
    """A key of a dictionary."""

    __slots__ = ("_dictionary", "_key")

    def __init__(self, dictionary: Any, key: Tensor) -> None:
        self._dictionary, self._key = dictionary, key

    def __call__(self, tensor: Tensor) -> None:
        """Put a tensor there; the order of the items stays."""
        items = list(self._dictionary.items())
        if any(key is self._key for key, _ in items):
            self._dictionary.clear()
            self._dictionary.update((tensor if key is self._key else key, item) for key, item in items)
        self._key = tensor

    def get(self) -> Any:
        """What is there now; None if the item is gone."""
        return next((key for key in self._dictionary if key is self._key), None)


class ScriptTensorLocation(ItemLocation):
    """An item of what a module of torch.jit has: torch holds the tensor itself, beside whoever holds its object."""


class ScriptAttributeLocation:
    """A tensor that a module of torch.jit has as an attribute, and not as a parameter or a buffer."""

    __slots__ = ("_name", "_program")

    def __init__(self, program: Any, name: str) -> None:
        self._program, self._name = program, name

    def __call__(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        self._program.setattr(self._name, tensor)

    def get(self) -> Any:
        """What is there now."""
        return self._program.getattr(self._name)


class AttributeLocation:
    """An attribute that is not in a ``__dict__``: a slot, a default, a cell's content."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        object.__setattr__(self._owner, self._name, tensor)  # frozen dataclasses too

    def get(self) -> Any:
        """What is there now; None if the attribute is gone."""
        return getattr(self._owner, self._name, None)


class ClassAttributeLocation(AttributeLocation):
    """An attribute of a class."""

    def __call__(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        setattr(self._owner, self._name, tensor)

    def get(self) -> Any:
        """What is there now; None if the attribute is gone."""
        return vars(self._owner).get(self._name)


class ImmutableItemLocation:
    """An item of something that cannot be changed in place: its holder gets a new one."""

    __slots__ = ("_holder", "_index", "_rebuild")

    def __init__(self, holder: TensorLocation, index: int, rebuild: Callable[[list[Any]], Any]) -> None:
        self._holder, self._index, self._rebuild = holder, index, rebuild

    def __call__(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        items = list(self._holder.get())
        items[self._index] = tensor
        self._holder(self._rebuild(items))

    def get(self) -> Any:
        """What is there now; None if the item is gone."""
        now = self._holder.get()
        return now[self._index] if isinstance(now, tuple | list) and self._index < len(now) else None


class PartialArgsLocation:
    """The positional arguments of a ``functools.partial``."""

    def __init__(self, partial: functools.partial[Any]) -> None:
        self._partial = partial

    def __call__(self, tensor: Any) -> None:
        """Put something there."""
        p = self._partial
        p.__setstate__((p.func, tensor, p.keywords, vars(p) or None))  # type: ignore[attr-defined]

    def get(self) -> Any:
        """The arguments."""
        return self._partial.args


class ScriptListLocation(ImmutableItemLocation):
    """An item of a list that a module of torch.jit has."""

    def __init__(self, holder: ScriptAttributeLocation, index: int) -> None:
        super().__init__(holder, index, list)


class CellLocation:
    """The content of a closure's cell."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __call__(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        self._cell.cell_contents = tensor

    def get(self) -> Any:
        """What is there now."""
        return self._cell.cell_contents
