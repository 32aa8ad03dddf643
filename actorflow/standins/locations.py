"""Locations that hold a tensor (an item, an attribute, a closure's cell), and in which it can be replaced."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

__all__ = [
    "AttributeLocation", "CellLocation", "ClassAttributeLocation", "FrozenMemberLocation", "ImmutableItemLocation",
    "ItemLocation", "KeyLocation", "MemberLocation", "PartialArgsLocation", "ReferentLocation",
    "ScriptAttributeLocation", "ScriptListLocation", "ScriptTensorLocation", "TensorLocation",
]  # fmt: skip


class TensorLocation(Protocol):
    """A location that holds a tensor; calling it with another tensor replaces it."""

    def __call__(self, tensor: Tensor) -> None:
        """Replace the tensor at this location."""

    def get(self) -> Any:
        """The object that is at this location now."""


class ItemLocation:
    """An item of a dictionary or list (attributes are items of their object's ``__dict__``)."""

    __slots__ = ("_container", "_key")

    def __init__(self, container: Any, key: Any) -> None:
        self._container, self._key = container, key

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        self._container[self._key] = tensor

    def get(self) -> Any:
        """See ``TensorLocation``; None if the item is gone."""
        try:
            return self._container[self._key]
        except (KeyError, IndexError):
            return None


class KeyLocation:
    """A tensor that is a key of a dictionary."""

    __slots__ = ("_dictionary", "_key")

    def __init__(self, dictionary: Any, key: Tensor) -> None:
        self._dictionary, self._key = dictionary, key

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``; the order of the dictionary's items is kept."""
        items = list(self._dictionary.items())
        if any(key is self._key for key, _ in items):
            self._dictionary.clear()
            self._dictionary.update((tensor if key is self._key else key, item) for key, item in items)
        self._key = tensor

    def get(self) -> Any:
        """See ``TensorLocation``; None if the key is gone."""
        return next((key for key in self._dictionary if key is self._key), None)


class MemberLocation:
    """A tensor that is a member of a set; the order of a set is that of addresses, also for another tensor."""

    __slots__ = ("_member", "_members")

    def __init__(self, members: set[Any], member: Tensor) -> None:
        self._members, self._member = members, member

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        if self.get() is not None:
            self._members.discard(self._member)
            self._members.add(tensor)
        self._member = tensor

    def get(self) -> Any:
        """See ``TensorLocation``; None if the member is gone."""
        return next((one for one in self._members if one is self._member), None)


class FrozenMemberLocation:
    """A tensor that is a member of a frozen set: replacing it puts a new set into the holder."""

    __slots__ = ("_holder", "_member")

    def __init__(self, holder: TensorLocation, member: Tensor) -> None:
        self._holder, self._member = holder, member

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        if self.get() is not None:
            before = self._holder.get()
            self._holder(type(before)(tensor if one is self._member else one for one in before))
        self._member = tensor

    def get(self) -> Any:
        """See ``TensorLocation``; None if the member is gone."""
        now = self._holder.get()
        return next((one for one in now if one is self._member), None) if isinstance(now, frozenset) else None


class ReferentLocation:
    """The tensor that a weak reference refers to: replacing it puts a new reference into the holder.

    The reference that the script has made, which may have a callback, comes back with its own tensor.
    """

    __slots__ = ("_holder", "_reference")

    def __init__(self, holder: TensorLocation, reference: weakref.ref[Tensor]) -> None:
        self._holder, self._reference = holder, reference

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        reference: Any = self._reference if self._reference() is tensor else weakref.ref(tensor)
        self._holder(reference)

    def get(self) -> Any:
        """See ``TensorLocation``; None if there is no reference any more, or it is dead."""
        now = self._holder.get()
        return now() if isinstance(now, weakref.ref) else None


class ScriptTensorLocation(ItemLocation):
    """A parameter or buffer of a torch.jit module: torch itself holds the tensor, besides the Python objects."""


class ScriptAttributeLocation:
    """A tensor attribute of a torch.jit module that is neither a parameter nor a buffer."""

    __slots__ = ("_name", "_program")

    def __init__(self, program: Any, name: str) -> None:
        self._program, self._name = program, name

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        self._program.setattr(self._name, tensor)

    def get(self) -> Any:
        """See ``TensorLocation``."""
        return self._program.getattr(self._name)


class AttributeLocation:
    """An attribute that is not in a ``__dict__``: a slot, or the defaults of a function."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        object.__setattr__(self._owner, self._name, tensor)  # works for frozen dataclasses as well

    def get(self) -> Any:
        """See ``TensorLocation``; None if the attribute is gone."""
        return getattr(self._owner, self._name, None)


class ClassAttributeLocation(AttributeLocation):
    """An attribute of a class."""

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        setattr(self._owner, self._name, tensor)

    def get(self) -> Any:
        """See ``TensorLocation``; None if the attribute is gone."""
        return vars(self._owner).get(self._name)


class ImmutableItemLocation:
    """An item of an immutable container: replacing it puts a new container, built by ``rebuild``, into its holder."""

    __slots__ = ("_holder", "_index", "_rebuild")

    def __init__(self, holder: TensorLocation, index: int, rebuild: Callable[[list[Any]], Any]) -> None:
        self._holder, self._index, self._rebuild = holder, index, rebuild

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        items = list(self._holder.get())
        items[self._index] = tensor
        self._holder(self._rebuild(items))

    def get(self) -> Any:
        """See ``TensorLocation``; None if the item is gone."""
        now = self._holder.get()
        return now[self._index] if isinstance(now, tuple | list) and self._index < len(now) else None


class PartialArgsLocation:
    """The positional arguments of a ``functools.partial``, as one tuple."""

    def __init__(self, partial: functools.partial[Any]) -> None:
        self._partial = partial

    def __call__(self, tensor: Any) -> None:
        """Replace the tuple of arguments."""
        p = self._partial
        p.__setstate__((p.func, tensor, p.keywords, vars(p) or None))  # type: ignore[attr-defined]

    def get(self) -> Any:
        """The tuple of arguments."""
        return self._partial.args


class ScriptListLocation(ImmutableItemLocation):
    """An item of a list attribute of a torch.jit module."""

    def __init__(self, holder: ScriptAttributeLocation, index: int) -> None:
        super().__init__(holder, index, list)


class CellLocation:
    """The content of a closure's cell."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __call__(self, tensor: Tensor) -> None:
        """See ``TensorLocation``."""
        self._cell.cell_contents = tensor

    def get(self) -> Any:
        """See ``TensorLocation``."""
        return self._cell.cell_contents
