"""Items of a program go in; which values lie in the memory of variables, and which variables are read late, comes out.

An actor that overwrites a variable while others have yet to read it, or a view of it, would give them the new value or
wait for them for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from actorflow_compiler.lower import Item

# ops of actorflow, and one of torch whose schema does not say so, whose result lies in their first operand's memory
_VIEWS = frozenset({
    "actorflow.carve", "actorflow.unpack", "actorflow.identity", "actorflow.constrain", "actorflow.accumulate",
    "actorflow.last", "actorflow.mine", "actorflow.each", "aten._unsafe_view.default",
})  # fmt: skip


@functools.cache
def is_view(op: str) -> bool:
    """Whether an op's results lie in the memory of its first operand."""
    namespace, _, rest = op.partition(".")
    if namespace == "actorflow" or op in _VIEWS:
        return op in _VIEWS
    name, _, overload = rest.partition(".")
    returns = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def held_in(
    items: Sequence[Item], alias: Mapping[tuple[int, int], int], variables: Collection[int]
) -> dict[int, frozenset[int]]:
    """Local value → the variables, local values as well, in whose memory it lies on some rank; themselves included."""
    found = {v: frozenset((v,)) for v in variables}
    for item in items:
        for value, source in _passed_on(item, alias):
            if source in found:
                found[value] = found.get(value, frozenset()) | found[source]
    return found


def _passed_on(item: Item, alias: Mapping[tuple[int, int], int]) -> Iterator[tuple[int, int]]:
    """Pairs of a value that an item makes and the one in whose memory it lies."""
    for rank in item.placement.ranks:
        yield from ((v, alias[(v, rank)]) for v in item.writes if (v, rank) in alias)
    for steps in item.steps.values():
        for step in steps:
            reads = [*step.reads()]
            if reads and is_view(step.op):
                yield from ((out, reads[0]) for out in step.outs if out >= 0)


def read_late(
    items: Sequence[Item], held: Mapping[int, frozenset[int]], updates: Mapping[int, int], results: Collection[int]
) -> set[int]:
    """Which variables somebody reads whom their new value does not wait for, by themselves or by a view.

    ``updates`` are variables and what they become, local values; ``results`` are read, too.
    """
    maker = {v: k for k, item in enumerate(items) for v in item.writes}
    readers: dict[int, set[int]] = {v: set() for v in updates}
    for k, item in enumerate(items):
        for v in item.reads:
            for variable in held.get(v, ()):
                if variable in readers:
                    readers[variable].add(k)
    late = {variable for r in results for variable in held.get(r, ()) if r != variable}
    for variable, new in updates.items():
        if readers[variable] and not readers[variable] <= _before(items, maker, new):
            late.add(variable)
    return late & updates.keys()


def _before(items: Sequence[Item], maker: Mapping[int, int], value: int) -> set[int]:
    """The items that a value is made of."""
    found: set[int] = set()
    left = [maker[value]] if value in maker else []
    while left:
        k = left.pop()
        if k not in found:
            found.add(k)
            left += [maker[v] for v in items[k].reads if v in maker]
    return found
