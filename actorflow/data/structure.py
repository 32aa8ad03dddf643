"""Take a batch apart into its tensors and the containers around them, and put such containers together again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from actorflow_compiler.core.errors import DataError

__all__ = ["Structure", "as_tensor", "take_apart"]


class ContainerKind(StrEnum):
    """What holds the parts of a structure."""

    LEAF = "leaf"  # no container: a tensor, or anything else
    SEQUENCE = "sequence"
    FIELDS = "fields"  # a named tuple or a dataclass
    MAPPING = "mapping"


@dataclass(frozen=True, slots=True)
class Structure:
    """Containers without what is in them."""

    kind: ContainerKind
    type: str = ""  # module:name of a container
    keys: tuple[str | int, ...] = ()  # of a mapping; the names of fields
    parts: tuple[Structure, ...] = ()

    def put_together(self, leaves: Sequence[Any]) -> Any:
        """The containers around these leaves.  Raises DataError for a type that this process does not have."""
        rest = iter(leaves)
        return self._around(lambda: next(rest))

    def _around(self, leaf: Callable[[], Any]) -> Any:
        if self.kind is ContainerKind.LEAF:
            return leaf()
        made = [part._around(leaf) for part in self.parts]
        kind = _type_of(self.type)
        if self.kind is ContainerKind.SEQUENCE:
            return kind(made)
        if self.kind is ContainerKind.FIELDS:
            return kind(**dict(zip(map(str, self.keys), made, strict=True)))
        return kind(dict(zip(self.keys, made, strict=True)))

    @staticmethod
    def leaf() -> Structure:
        """A tensor, or anything else that is no container."""
        return LEAF

    def to_json(self) -> Any:
        """As JSON, from which ``from_json`` makes an equal one."""
        return [self.kind.value, self.type, list(self.keys), [part.to_json() for part in self.parts]]

    @staticmethod
    def from_json(said: Any) -> Structure:
        """The inverse of ``to_json``."""
        kind, type_, keys, parts = said
        return Structure(ContainerKind(kind), type_, tuple(keys), tuple(map(Structure.from_json, parts)))


def as_tensor(leaf: Any) -> Any:
    """An array of numbers as a tensor, which shares its memory where that may be written; anything else as it is."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    native = leaf.dtype.newbyteorder("=")
    array = np.asarray(leaf, native, "C") if leaf.flags.writeable else np.array(leaf, native, order="C")
    try:
        return torch.from_numpy(array)
    except TypeError:  # numbers that torch has not
        return leaf


LEAF = Structure(ContainerKind.LEAF)


def take_apart(value: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> tuple[Structure, list[tuple[str, Any]]]:
    """The containers of a batch, and its leaves, each with where it is: ``"labels"``, ``"0.mask"``, ``""``.

    Lists, tuples, named tuples, mappings whose keys are texts or numbers, and dataclasses are containers, but for those
    of which ``is_leaf`` says that they are none.
    """
    leaves: list[tuple[str, Any]] = []
    return _apart(value, "", leaves, is_leaf), leaves


def _apart(value: Any, at: str, leaves: list[tuple[str, Any]], is_leaf: Callable[[Any], bool]) -> Structure:
    def parts(items: Mapping[Any, Any]) -> tuple[Structure, ...]:
        return tuple(_apart(item, f"{at}.{key}" if at else str(key), leaves, is_leaf) for key, item in items.items())

    kind = type(value)
    if is_leaf(value):
        leaves.append((at, value))
        return LEAF
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = dict(zip(value._fields, value, strict=True))
        return Structure(ContainerKind.FIELDS, _named(kind), tuple(fields), parts(fields))
    if kind in (list, tuple):
        return Structure(ContainerKind.SEQUENCE, _named(kind), (), parts(dict(enumerate(value))))
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return Structure(ContainerKind.MAPPING, _named(kind), tuple(value), parts(value))
    if dataclasses.is_dataclass(kind) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return Structure(ContainerKind.FIELDS, _named(kind), tuple(own), parts(own))
    leaves.append((at, value))
    return LEAF


def _named(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _type_of(name: str) -> Any:
    """A class that this process has imported, by module and name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise DataError(
            f"batches are of type {path} of {module}, which this rank has not; expected: a type that the script "
            f"imports or defines at its top on every rank"
        )
    return found
