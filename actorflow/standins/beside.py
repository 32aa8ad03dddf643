"""Keep a dictionary of actorflow's own with an object of the script, for as long as the object lives.

The dictionary may refer to the object: both are freed together, as a reference cycle.  Pickles of modules contain the
name of this module's class ``_Beside``, so neither may be renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from gc import get_referents
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp

__all__ = ["BESIDE", "CONFIG", "WAS_GLOBAL", "beside", "beside_parts", "is_noted", "keep_layout", "kept_layout"]

BESIDE = "_actorflow_beside"  # the attribute of the object that holds the dictionary
CONFIG = "config"  # the key of what makes ``module.config`` of a module that has none of its own
WAS_GLOBAL = "was global"  # the key of a module whose global tensors a job has taken over
_LAYOUT = "_actorflow_layout"  # the attribute of what was a global tensor; stand-ins get it with the script's own
MANY = 1000  # most objects that are visited in search of modules


class _Beside:
    """The dictionary of one object; copies and pickles of the object get an empty one."""

    __slots__ = ("owner", "values")

    def __init__(self, owner: int = 0) -> None:
        self.owner = owner  # id of the object; a shallow copy of the object shares this instance, but has another id
        self.values: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Beside:
        return _Beside()

    def __reduce__(self) -> tuple[type[_Beside], tuple[()]]:
        return _Beside, ()


def beside(thing: Any) -> dict[Any, Any] | None:
    """The dictionary that is kept with an object; None for an object without a ``__dict__``."""
    attributes = getattr(thing, "__dict__", None)
    if not isinstance(attributes, dict):
        return None
    found = attributes.get(BESIDE)
    if not isinstance(found, _Beside) or found.owner != id(thing):
        found = attributes[BESIDE] = _Beside(id(thing))
    return found.values


def is_noted(thing: Any, key: str) -> bool:
    """Whether the dictionary that is kept with an object has this key; makes none."""
    return BESIDE in getattr(thing, "__dict__", ()) and key in (beside(thing) or ())


def beside_parts(thing: Any) -> list[dict[Any, Any]]:
    """The dictionaries of the modules and optimizers that an object holds, for an object that has none itself.

    They live as long as these modules and optimizers, which may be longer than the object.
    """
    found = (beside(part) for part in _parts(thing))
    return [kept for kept in found if kept is not None]


def _parts(thing: Any) -> Iterator[Any]:
    """The modules and optimizers that an object holds, directly or in its lists, tuples and dictionaries."""
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


def keep_layout(tensor: Tensor, placement: Placement, sbp: NdSbp) -> None:
    """Note with a whole tensor that it was a global one, which a job has taken over, and how that lay."""
    vars(tensor)[_LAYOUT] = (placement, tuple(sbp))


def kept_layout(tensor: Tensor) -> tuple[Placement, NdSbp] | None:
    """How a tensor of a job lay that was a global one; None for any other tensor."""
    kept: tuple[Placement, NdSbp] | None = vars(tensor).get(_LAYOUT)
    return kept
