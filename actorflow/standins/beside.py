"""A thing of the script's goes in; a dictionary of ours that lives as long as the thing does comes out.

What is in it may refer to the thing: both go together, as the parts of any circle do.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BESIDE", "beside"]

BESIDE = "_actorflow_beside"  # the attribute that it is kept in


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
