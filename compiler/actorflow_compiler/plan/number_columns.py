"""Compare the parts of many ranks with that of the first one, place by place: by how much each rank's numbers differ.

Parts are dataclasses and tuples of numbers and texts.  Each place is compared for all ranks at once, and a thing that
several of them have in common is compared once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, get_args

from actorflow_compiler.plan.plan import Actor, FromRegister, Operand, Order, Read, Target

__all__ = ["MOVING", "NAMED", "NUMBERS", "NumberColumns", "Path", "fields_of"]

Path = tuple[int, ...]  # indices of fields and items, to a number: of a text, the index among the numbers in it
NUMBERS = re.compile(r"(0|[1-9][0-9]*)")  # in names and queues: ``send2F0:5>9``
NAMED = (Actor, Order)  # whose texts may have a rank's number in them
MOVING = (FromRegister, Read)  # whose first number is that of a register or an actor
PLACES = (*get_args(Operand), *get_args(Target), Read)  # what tuples with these consist of

_Where = Sequence[int]  # for each rank the index of its value among those that are compared


class NumberColumns:
    """What is found when values of some ranks are compared with those of the first rank."""

    def __init__(self, count: int) -> None:
        self.count = count  # of ranks
        self.columns: dict[Path, list[int]] = {}  # where numbers differ → by how much, for each rank
        self.unlike: set[int] = set()  # the indices of ranks in which more than numbers differs, in whose place is 0

    def compare(self, values: Sequence[Any], path: Path) -> None:
        """Compare what all ranks have at this place."""
        self._compare(values, range(self.count), path, named=False)

    def compare_fields(self, values: Sequence[Any], path: Path, but: str) -> None:
        """Compare dataclasses of one type in all fields but one."""
        where = range(self.count)
        kind = type(values[0])
        for i, one in enumerate(fields(kind)):
            if one.name != but:
                self._compare([*map(attrgetter(one.name), values)], where, (*path, i), kind in NAMED)

    def _compare(self, values: Sequence[Any], where: _Where, path: Path, named: bool) -> None:
        distinct = {id(value): value for value in values}
        if len(distinct) == 1:
            return
        if len(distinct) < len(values):
            index = dict(zip(distinct, range(len(distinct)), strict=True))
            at = [index[id(value)] for value in values]
            values, where = [*distinct.values()], [at[k] for k in where]
        kind = type(values[0])
        values = self._of_one(values, where, [type(value) is kind for value in values])
        inside = fields_of(kind)  # type: ignore[arg-type]  # mypy says that types are not hashable
        if kind is int:
            self._numbers(values, where, path)
        elif kind is str and named:
            self._texts(values, where, path)
        elif kind is tuple:
            self._tuples(values, where, path)
        elif inside is not None:
            for i, column in enumerate(zip(*map(inside, values), strict=True)):
                self._compare(column, where, (*path, i), kind in NAMED)
        else:
            text = repr(values[0])  # tells -0.0 from 0.0
            self._of_one(values, where, [repr(value) == text for value in values])

    def _of_one(self, values: Sequence[Any], where: _Where, like: Sequence[bool]) -> Sequence[Any]:
        """The values, with the first one for those that are not ``like`` it, whose ranks are noted."""
        if all(like):
            return values
        self.unlike.update(k for k, at in enumerate(where) if not like[at])
        return [value if same else values[0] for value, same in zip(values, like, strict=True)]

    def _numbers(self, values: Sequence[int], where: _Where, path: Path) -> None:
        first = values[0]
        if min(values) < 0:
            values = self._of_one(values, where, [value == first or value >= 0 <= first for value in values])
        self._note([value - first for value in values], where, path)

    def _note(self, column: Sequence[int], where: _Where, path: Path) -> None:
        if any(column):
            self.columns[path] = [column[at] for at in where]

    def _texts(self, values: Sequence[str], where: _Where, path: Path) -> None:
        """Compare texts that may have other numbers in them."""
        pieces = [NUMBERS.split(value) for value in values]
        between = pieces[0][::2]
        pieces = [*self._of_one(pieces, where, [one[::2] == between for one in pieces])]
        for i in range(1, len(pieces[0]), 2):
            first = int(pieces[0][i])
            self._note([int(one[i]) - first for one in pieces], where, (*path, i // 2))

    def _tuples(self, values: Sequence[tuple[Any, ...]], where: _Where, path: Path) -> None:
        length = len(values[0])
        values = self._of_one(values, where, [len(value) == length for value in values])
        if not length:
            return
        moves = _moves(values)
        if moves is not None:
            self._note(moves, where, path)
            return
        for i in range(length):
            self._compare([*map(itemgetter(i), values)], where, (*path, i), named=False)


def _moves(values: Sequence[tuple[Any, ...]]) -> list[int] | None:
    """By how much all numbers in each tuple are more than those in the first one; None where they are not.

    Items are numbers, or operands, targets or readers; of these the numbers of registers and actors may differ.
    """
    kinds = {type(item) for item in values[0]}
    if kinds != {int} and not (kinds.intersection(MOVING) and kinds.issubset(PLACES)):
        return None
    first, rest = _parted(values[0])
    found = []
    for value in values:
        numbers, others = _parted(value)
        if others != rest or any(type(number) is not int or number < 0 for number in numbers):
            return None
        by = numbers[0] - first[0]
        if [number - by for number in numbers] != first:
            return None
        found.append(by)
    return found


def _parted(items: tuple[Any, ...]) -> tuple[list[int], list[object]]:
    """The numbers in items of a tuple that may differ, and all else."""
    numbers: list[int] = []
    others: list[object] = []
    for item in items:
        kind = type(item)
        if kind is FromRegister:
            numbers.append(item.register)
            others.append((kind, item.index))
        elif kind is Read:
            numbers.append(item.actor)
            others.append((kind, item.firings))
        elif kind is int:
            numbers.append(item)
        else:
            others.append(item)
    return numbers, others


@cache
def fields_of(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """What returns the fields of a dataclass of this type; None for other types."""
    if not is_dataclass(kind):
        return None
    names = [one.name for one in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
