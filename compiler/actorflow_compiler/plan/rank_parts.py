"""Split a plan into what all ranks share and what each class of ranks has of its own, and put a rank's part together.

Ranks are of one class if their parts are equal but for numbers: of actors, registers, communications and ranks, or
where in a tensor they begin.  For a class the master sends the part of its first rank, the places where other ranks
have other numbers, and by how much each rank's differ.  Most of a rank's numbers differ by as much as many others, so
these are few: what the master writes and sends grows with the classes of a plan, not with its ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

from google.protobuf.message import DecodeError, EncodeError

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.units import ranges_text
from actorflow_compiler.plan.origins import Origins
from actorflow_compiler.plan.plan import Actor, Order, Plan, Summary
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_protos import plan_pb2 as pb

__all__ = ["PlanParts", "join", "split"]

Path = tuple[int, ...]  # indices of fields and items, from a plan to a number in it
Changes = dict[int, Any]  # index of a field, an item, or a number in a text → what is added to it, or Changes inside
NUMBERS = re.compile(r"(0|[1-9][0-9]*)")  # in names and queues: ``send2F0:5>9``
NAMED = (Actor, Order)  # whose texts may have a rank's number in them
LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PlanParts:
    """A plan as messages to its ranks."""

    shared: bytes  # equal for all ranks
    classes: tuple[bytes, ...]
    class_of: Mapping[int, int]  # rank → its class

    def of(self, rank: int) -> bytes:
        """What a rank needs beside ``shared``; equal for all ranks of its class."""
        return self.classes[self.class_of[rank]]


def split(plan: Plan, ranks: Iterable[int]) -> PlanParts:
    """The messages to these ranks of a whole plan.  Raises PlanError for what protobuf cannot hold."""
    alike: dict[object, list[_Class]] = {}
    classes: list[_Class] = []
    class_of: dict[int, int] = {}
    for rank in ranks:
        part = _own(plan.for_rank(rank))
        candidates = alike.setdefault(_look(part), [])
        found = next((one for one in candidates if one.takes(rank, part)), None)
        if found is None:
            found = _Class(len(classes), rank, part)
            candidates.append(found)
            classes.append(found)
        class_of[rank] = found.number
    return PlanParts(to_bytes(_shared(plan)), tuple(one.to_bytes() for one in classes), class_of)


def join(shared: bytes, of_class: bytes, rank: int) -> Plan:
    """``plan.for_rank(rank)`` of the plan that was split; whether it is legal is for ``verify``.

    Raises PlanError for bytes that are no such messages, or not for this rank.
    """
    common, message = from_bytes(shared), pb.PlanClass()
    try:
        message.ParseFromString(of_class)
        if rank not in message.ranks:
            raise PlanError(f"they are for ranks {ranges_text(sorted({*message.ranks}))}")
        part = _change(from_bytes(message.part), _changes(message, list(message.ranks).index(rank)))
    except (DecodeError, PlanError, IndexError) as error:
        raise PlanError(
            f"plan {common.name!r}: the part of rank {rank} was expected, and cannot be made of {len(of_class)} bytes: "
            f"{error}"
        ) from error
    return replace(
        common,
        bodies=part.bodies,
        actors=part.actors,
        registers=part.registers,
        orders=part.orders,
        ranks=part.ranks,
        calls=part.calls,
        origins=Origins(common.origins.places, part.origins.steps),
    )


def _shared(plan: Plan) -> Plan:
    """What is equal in the parts of all ranks."""
    return replace(
        plan, bodies=(), actors=(), registers=(), orders=(), ranks=(), considered=(), calls=(),
        origins=Origins(plan.origins.places),
    )  # fmt: skip


def _own(part: Plan) -> Plan:
    """The rest of a rank's part."""
    return replace(
        part, variables=(), results=(), constants=(), notes=(), summary=Summary(),
        origins=Origins(steps=part.origins.steps),
    )  # fmt: skip


def _look(part: Plan) -> object:
    """What is equal for parts of one class, and quickly found."""
    return (
        tuple((a.kind, a.stage, a.rate, len(a.operands), len(a.targets)) for a in part.actors),
        tuple((len(r.readers), len(r.tensors)) for r in part.registers),
        tuple(len(body.steps) for body in part.bodies),
    )


class _Class:
    """Parts that are equal but for numbers."""

    def __init__(self, number: int, rank: int, part: Plan) -> None:
        self.number, self.part = number, part
        self.ranks: dict[int, dict[Path, int]] = {rank: {}}  # rank → where it has another number, and by how much

    def takes(self, rank: int, part: Plan) -> bool:
        """Take in a part, if it is of this class."""
        found: dict[Path, int] = {}
        if _differ(self.part, part, (), found):
            self.ranks[rank] = found
            return True
        return False

    def to_bytes(self) -> bytes:
        columns: dict[tuple[int, ...], int] = {}
        places = dict.fromkeys(path for found in self.ranks.values() for path in found)
        vectors = ((path, tuple(found.get(path, 0) for found in self.ranks.values())) for path in places)
        differences = [
            pb.Difference(path=path, column=columns.setdefault(vector, len(columns))) for path, vector in vectors
        ]
        try:
            data: bytes = pb.PlanClass(
                ranks=self.ranks,
                part=to_bytes(self.part),
                differences=differences,
                columns=(pb.Column(differences=vector) for vector in columns),
            ).SerializeToString(deterministic=True)
        except EncodeError as error:  # more than 2 GB
            raise PlanError(f"plan {self.part.name!r} does not fit a message of protobuf: {error}") from error
        return data


# ---- what differs


@cache
def _fields_of(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """What returns the fields of a dataclass of this type; None for other types."""
    if not is_dataclass(kind):
        return None
    names = [one.name for one in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _differ(first: Any, other: Any, path: Path, found: dict[Path, int]) -> bool:
    """Note how much more the numbers of ``other`` are; whether nothing else differs."""
    kind = type(first)
    if type(other) is not kind:
        return False
    if kind is int:
        return first == other or _note(first, other, path, found)
    if kind is str:
        return bool(first == other)
    if kind is tuple:
        if len(first) != len(other):
            return False
        if _moved(first, other):
            return _note(first[0], other[0], path, found)
        return _differ_inside(first, other, path, found)
    inside = _fields_of(kind)  # type: ignore[arg-type]  # mypy says that types are not hashable
    if inside is not None:
        return _differ_inside(inside(first), inside(other), path, found, kind in NAMED)
    return repr(first) == repr(other)  # tells -0.0 from 0.0


def _differ_inside(
    first: tuple[Any, ...], other: tuple[Any, ...], path: Path, found: dict[Path, int], named: bool = False
) -> bool:
    """As ``_differ``, for what is inside of two things of equal lengths; texts of a ``named`` one may have numbers."""
    for i, (a, b) in enumerate(zip(first, other, strict=True)):
        if a is b:
            continue
        kind = type(a)
        if kind is int and type(b) is int:
            if a != b and not _note(a, b, (*path, i), found):
                return False
            continue
        inside = _differ_in_text if named and kind is str and type(b) is str else _differ
        if not inside(a, b, (*path, i), found):
            return False
    return True


def _note(first: int, other: int, path: Path, found: dict[Path, int]) -> bool:
    found[path] = other - first
    return first >= 0 <= other


def _moved(first: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether the items are numbers, all of which differ by as much."""
    if not first or type(first[0]) is not int or type(other[0]) is not int or first[0] == other[0]:
        return False
    if any(type(one) is not int or one < 0 for one in (*first, *other)):
        return False
    by = other[0] - first[0]
    return all(b - a == by for a, b in zip(first, other, strict=True))


@lru_cache(maxsize=1024)  # each text of the first rank of a class is compared with those of all others
def _pieces(text: str) -> list[str]:
    return NUMBERS.split(text)


def _differ_in_text(first: str, other: str, path: Path, found: dict[Path, int]) -> bool:
    """As ``_differ``, for texts that may have other numbers in them."""
    if first == other:
        return True
    here, there = _pieces(first), NUMBERS.split(other)
    if here[::2] != there[::2]:
        return False
    for i, (a, b) in enumerate(zip(here[1::2], there[1::2], strict=True)):
        if a != b:
            found[*path, i] = int(b) - int(a)
    return True


# ---- the same numbers put in


def _changes(message: pb.PlanClass, at: int) -> Changes:
    """What the rank at this place of a class has other than the first one.  Raises IndexError, PlanError."""
    root: Changes = {}
    columns = [column.differences[at] for column in message.columns]
    for one in message.differences:
        by = columns[one.column]
        path = tuple(one.path)
        inside = root
        for index in path[:-1]:
            inside = inside.setdefault(index, {})
            if type(inside) is not dict:
                raise PlanError("one number is inside of another")
        if not path or path[-1] in inside:
            raise PlanError("a number is there twice, or nowhere")
        inside[path[-1]] = by
    return root


def _change(value: Any, changes: Changes | int) -> Any:
    """The value with other numbers.  Raises PlanError, or IndexError, where it has no number."""
    kind: Any = type(value)
    if type(changes) is int:
        if kind is tuple and value:
            return tuple([_sum(item, changes) if type(item) is int else _none(item) for item in value])
        return _sum(value, changes) if kind is int else _none(value)
    assert not isinstance(changes, int)
    if kind is tuple:
        items = list(value)
        _change_inside(items, changes)
        return tuple(items)
    inside = _fields_of(kind)
    if inside is None:
        return _none(value)
    items = list(inside(value))
    _change_inside(items, changes, kind in NAMED)
    return kind(*items)  # in a third of the time of dataclasses.replace, and there are hundreds for each rank


def _change_inside(items: list[Any], changes: Changes, named: bool = False) -> None:
    for index, inside in changes.items():
        item = items[index]
        if named and type(item) is str and type(inside) is dict:
            items[index] = _changed_text(item, inside)
        elif type(item) is int and type(inside) is int:
            items[index] = _sum(item, inside)
        else:
            items[index] = _change(item, inside)


def _changed_text(text: str, changes: Changes) -> str:
    pieces = NUMBERS.split(text)
    for index, by in changes.items():
        pieces[2 * index + 1] = str(_sum(int(pieces[2 * index + 1]), by))
    return "".join(pieces)


def _sum(number: int, by: Any) -> int:
    if not isinstance(by, int) or not 0 <= number + by <= LARGEST:
        raise PlanError(f"number {number} is changed by {by}")
    return number + by


def _none(value: object) -> Any:
    raise PlanError(f"a number was expected, {type(value).__name__} was found")
