"""Keep a dictionary of ours beside an object of the script, for as long as the object lives.

The dictionary may refer to the object: both are freed together, as a reference cycle.  Pickles of modules name the
class ``_Beside`` of this module, so it stays here.
"""

from __future__ import annotations

from collections.abc import Iterator
from gc import get_referents
from itertools import islice
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["BESIDE", "beside", "beside_parts"]

BESIDE = "_actorflow_beside"  # the attribute that it is kept in
MANY = 1000  # things that are looked at in search of modules


class _Beside:
    """Belongs to one thing: a copy of that, and what is pickled of it, has none."""

    __slots__ = ("owner", "values")

    def __init__(self, owner: int = 0) -> None:
        self.owner = owner  # its id: of a shallow copy, which shares this, it is another one
        self.values: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Beside:
        return _Beside()

    def __reduce__(self) -> tuple[type[_Beside], tuple[()]]:
        return _Beside, ()


def beside(thing: Any) -> dict[Any, Any] | None:
    """What is kept for a thing; None for one that takes no attributes."""
    attributes = getattr(thing, "__dict__", None)
    if not isinstance(attributes, dict):
        return None
    found = attributes.get(BESIDE)
    if not isinstance(found, _Beside) or found.owner != id(thing):
        found = attributes[BESIDE] = _Beside(id(thing))
    return found.values


def beside_parts(thing: Any) -> list[dict[Any, Any]]:
    """What is kept for the modules and optimizers that a thing holds: instead of its own, where it takes no attributes.

    It lives as long as these do, which may be longer.
    """
    found = (beside(part) for part in _parts(thing))
    return [kept for kept in found if kept is not None]


def _parts(thing: Any) -> Iterator[Any]:
    """The modules and optimizers that a thing holds, also in lists, tuples and dictionaries of its own."""
    seen: set[int] = set()
    pending = [*get_referents(thing)]
    while pending and len(seen) < MANY:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module | Optimizer):
            yield one
        elif isinstance(one, list | tuple | dict):
            pending += islice(one.values() if isinstance(one, dict) else one, MANY)
