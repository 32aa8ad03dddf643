"""Turn the state of objects into JSON and named tensors, and back; nothing is pickled.

What JSON does not have (tuples, keys that are no strings, NaN, dtypes and so on) is an object with one key that
begins with ``$``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorflow_compiler.core.errors import StateError

__all__ = ["TENSOR", "decode", "encode", "names_in"]

TENSOR = "$tensor"
_METADATA = "_metadata"  # the attribute in which torch's state dictionaries keep the versions of modules


def encode(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The state as JSON; its tensors are added to ``tensors``, with names that begin with ``name``.

    Raises StateError, with the place, for what has no form in JSON.
    """
    return _Encoder(tensors).encode(state, name)


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._inside: set[int] = set()  # ids of the containers around the value

    def encode(self, value: Any, at: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            number = float(value)
            return number if math.isfinite(number) else {"$float": repr(number)}
        if isinstance(value, Tensor):
            return {TENSOR: self._named(value, at)}
        plain = _PLAIN.get(type(value))
        if plain is not None:
            return {plain[0]: plain[1](value)}
        if isinstance(value, np.ndarray):
            return {"$array": self._named(_of_array(value, at), at)}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and not isinstance(value, np.longdouble):
            return {"$number": [str(value.dtype), self.encode(value.item(), at)]}
        if isinstance(value, torch.Generator):
            return {"$generator": [str(value.device), _bytes(value.get_state())]}
        return self._container(value, at)

    def _container(self, value: Any, at: str) -> Any:
        if id(value) in self._inside:
            raise StateError(f"{at} contains itself; a tree of plain values and tensors was expected")
        self._inside.add(id(value))
        try:
            if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
                return self._mapping(value, at)
            if type(value) is list:
                return self._items(value, at)
            if type(value) in (tuple, torch.Size):
                return {"$tuple": self._items(value, at)}
            if type(value) in (set, frozenset):
                return {"$set": [self._items(sorted(value, key=repr), at), type(value) is frozenset]}
        finally:
            self._inside.discard(id(value))
        raise StateError(
            f"{at} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept in a checkpoint; "
            f"tensors, numbers, texts, None, and lists, tuples, sets and dictionaries of them were expected, or an "
            f"object with state_dict() and load_state_dict()"
        )

    def _items(self, values: Any, at: str) -> list[Any]:
        return [self.encode(item, f"{at}.{i}") for i, item in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], at: str) -> Any:
        kind = type(value)
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{at}.{key}") for key, item in value.items()}
        pairs = [[self.encode(key, f"{at} (a key)"), self.encode(item, f"{at}.{key}")] for key, item in value.items()]
        if kind is Counter:
            return {"$counter": pairs}
        if isinstance(value, OrderedDict):
            metadata = getattr(value, _METADATA, None)
            return {
                "$ordered": [pairs, None if metadata is None else self.encode(dict(metadata), f"{at} ({_METADATA})")]
            }
        return {"$dict": pairs}

    def _named(self, tensor: Tensor, at: str) -> str:
        name, count = at, 1
        while name in self._tensors:
            count += 1
            name = f"{at}~{count}"
        self._tensors[name] = tensor
        return name


def _of_array(value: np.ndarray[Any, Any], at: str) -> Tensor:
    try:
        return torch.from_numpy(value.copy())
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{at} is an array of dtype {value.dtype}, which a checkpoint cannot hold; an array of numbers that torch "
            f"has, in this machine's byte order, was expected: array.astype('float64'), for example, or array.tolist()"
        ) from error


def decode(said: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The state from its JSON; ``tensor`` returns the tensor of a name.  Raises StateError for unknown forms."""
    if isinstance(said, list):
        return [decode(item, tensor) for item in said]
    if not isinstance(said, dict):
        return said
    if len(said) != 1 or not next(iter(said)).startswith("$"):
        return {key: decode(item, tensor) for key, item in said.items()}
    ((kind, given),) = said.items()
    if kind == TENSOR:
        return tensor(given)
    if kind == "$array":
        return tensor(given).numpy()
    if kind == "$generator":
        try:
            generator = torch.Generator(given[0])
        except RuntimeError as error:
            raise StateError(f"a generator on {given[0]} was saved, which is not here: {error}") from error
        generator.set_state(_tensor_of(given[1]))
        return generator
    if kind not in _READ:
        raise StateError(f"a value of kind {kind!r} was found in the checkpoint, which this version does not know")
    if kind in _OF_ITEMS:
        given = decode(given, tensor)
    return _READ[kind](given)


def names_in(said: Any) -> list[str]:
    """The names of the tensors in JSON that ``encode`` made, in order; of forms that are not known here, too."""
    if isinstance(said, list):
        return [name for item in said for name in names_in(item)]
    if not isinstance(said, dict):
        return []
    if len(said) == 1 and said.keys() <= {TENSOR, "$array"}:
        return [*said.values()]
    return [name for item in said.values() for name in names_in(item)]


def _ordered(given: Any) -> OrderedDict[Any, Any]:
    pairs, metadata = given
    made = OrderedDict(pairs)
    if metadata is not None:
        setattr(made, _METADATA, metadata)
    return made


def _bytes(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


_PLAIN: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("$complex", lambda value: [value.real, value.imag]),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
}
_OF_ITEMS = {"$tuple", "$set", "$dict", "$ordered", "$counter", "$number"}  # kinds whose contents may have kinds
_READ: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$complex": lambda given: complex(*given),
    "$dtype": lambda given: getattr(torch, given),
    "$device": torch.device,
    "$tuple": tuple,
    "$set": lambda given: frozenset(given[0]) if given[1] else set(given[0]),
    "$dict": dict,
    "$ordered": _ordered,
    "$counter": lambda given: Counter(dict(given)),
    "$number": lambda given: np.dtype(given[0]).type(given[1]),
}
