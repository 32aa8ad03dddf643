"""Side effects: what a step leaves in Python state, sent between ranks, and put there after each call.

Everything that a step leaves in attributes, globals, dictionaries and closures is a side effect, but for new values of
the plan's variables, which the captured step writes itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.script_state import tree
from actorflow.script_state.key_encoding import decode_key
from actorflow.script_state.search_result import SearchResult
from actorflow.script_state.sources import SchedulerSource, StateSource
from actorflow.standins.lazy_tensor import LazyTensor
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.expressions import Known, NumberSource, SourceKind, has_numbers

__all__ = [
    "DELETED",
    "MANY_VALUES",
    "Rebinding",
    "SideEffect",
    "apply_side_effects",
    "describe_value",
    "is_applied",
    "place_key",
    "scheduler_counts",
    "takes_many_values",
]

MANY_VALUES = 3  # plans that may leave different values at one place; beyond it every call is assumed to change it
DELETED = {"gone": True}


@dataclass(frozen=True, slots=True)
class SideEffect:
    """A value that a step leaves in a source."""

    at: int  # the position of the source in the search's result
    key: Any  # encoded by ``encode_key``
    where: str  # the source's label for the key
    value: tree.Description  # its tensors are numbered as results of the call; ``DELETED`` for a deletion
    read: bool  # whether the step can read it
    plain: bool = True  # whether it is the same after each call: no tensors, nothing computed

    def to_json(self) -> dict[str, Any]:
        """The side effect as JSON, which ranks exchange."""
        return asdict(self)


def apply_side_effects(
    changes: Iterable[SideEffect], sources: Sequence[StateSource], results: Sequence[Tensor],
    known: Known = tree.nothing,
) -> None:  # fmt: skip
    """Apply the side effects of a call: put values where the step has put them.

    ``known`` returns the numbers of the script as they were when the call began.  Results are not waited for.  Raises
    CallError if this rank's script has another object at a place.
    """
    changes = tuple(changes)
    values = [None if c.value == DELETED else tree.rebuild(c.value, results, {}, known) for c in changes]
    for change, value in zip(changes, values, strict=True):
        one, key = sources[change.at], decode_key(change.key, sources)
        if one.label(key) != change.where:
            raise CallError(f"the step leaves something in {change.where}, where this rank has {one.label(key)}")
        if change.value == DELETED:
            one.drop(key)
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, LazyTensor):
                leaf.kept = change.read
        one.put(key, value)


def is_applied(change: SideEffect, sources: Sequence[StateSource]) -> bool:
    """Whether the value of a side effect is in place now."""
    values, key = sources[change.at].values(), decode_key(change.key, sources)
    return bool((describe_value(values[key], []) if key in values else DELETED) == change.value)


def takes_many_values(values: Collection[str], now: str) -> bool:
    """Whether so many plans leave different values at a place that the value is assumed to change in every call."""
    return len(values) >= MANY_VALUES and now not in values


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A place to which a step assigns another tensor, or a list, tuple or dictionary of other tensors."""

    at: int  # the position of its source in the search's result
    key: Any  # encoded by ``encode_key``
    changed: tuple[int, ...]  # results with the old tensors' values, if the step changed those in place before


def place_key(source: NumberSource) -> Any:
    """The key of a number in its source."""
    return source.index if source.index >= 0 and not source.key else source.key


def scheduler_counts(found: SearchResult) -> list[NumberSource]:
    """The numbers of schedulers that a step can read, and may change (``scheduler.step()``)."""
    read = {id(one.holder) for one in found.read_sources if isinstance(one, SchedulerSource)}
    places = []
    for at, one in enumerate(found.sources):
        if isinstance(one, SchedulerSource) and id(one.holder) in read:
            for key, value in one.values().items():
                several = range(len(value)) if isinstance(value, list | tuple) else (-1,)
                if has_numbers(value):
                    places += [NumberSource(SourceKind.PLACE, one.label(key), str(at), key, i) for i in several]
    return places


def describe_value(value: Any, tensors: list[Tensor]) -> tree.Description | None:
    """The description of a value by ``tree.describe``; None if it cannot be described."""
    try:
        return tree.describe(value, tensors)
    except Exception:  # the value may be of any class
        return None
