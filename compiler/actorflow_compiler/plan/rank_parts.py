"""Split a plan into what all ranks share and what each class of ranks has of its own, and put a rank's part together.

Ranks are of one class if their parts are equal but for numbers: of actors, registers, communications and ranks, or
where in a tensor they begin.  For a class the master sends the part of its first rank, the places where other ranks
have other numbers, and by how much each rank's differ.  Most of a rank's numbers differ by as much as many others, so
these are few: what the master writes and sends grows with the classes of a plan, not with its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from google.protobuf.message import DecodeError, EncodeError

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.garbage_collection import young_only
from actorflow_compiler.core.units import ranges_text
from actorflow_compiler.plan.number_columns import MOVING, NAMED, NUMBERS, NumberColumns, Path, fields_of
from actorflow_compiler.plan.origins import Origins
from actorflow_compiler.plan.plan import Actor, FromRegister, Plan, RankItems, Read, Summary
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_protos import plan_pb2 as pb

__all__ = ["PlanParts", "join", "split"]

Changes = dict[int, Any]  # index of a field, an item, or a number in a text → what is added to it, or Changes inside
FIELDS: Mapping[str, int] = {one.name: index for index, one in enumerate(fields(Plan))}
BODY = [one.name for one in fields(Actor)].index("body")
STEPS = [one.name for one in fields(Origins)].index("steps")
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
    groups: dict[object, list[int]] = {}
    order: dict[int, int] = {}
    for index, rank in enumerate(ranks):
        order[rank] = index
        groups.setdefault(_look(plan, rank), []).append(rank)
    found = [one for group in groups.values() for one in _classes(plan, group)]
    found.sort(key=lambda one: order[one.ranks[0]])
    class_of = {rank: number for number, one in enumerate(found) for rank in one.ranks}
    return PlanParts(to_bytes(_shared(plan)), tuple(one.to_bytes() for one in found), class_of)


@young_only()
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
        summary=replace(plan.summary, memory=()), origins=Origins(plan.origins.places),
    )  # fmt: skip


def _own(part: Plan) -> Plan:
    """The rest of a rank's part."""
    return replace(
        part, variables=(), results=(), constants=(), notes=(), summary=Summary(),
        origins=Origins(steps=part.origins.steps),
    )  # fmt: skip


def _look(plan: Plan, rank: int) -> object:
    """What is equal for parts of one class, and quickly found."""
    own = plan.of_rank(rank)
    return (
        tuple([(a.kind, a.stage, a.rate, len(a.operands), len(a.targets), a.rank == rank) for a in own.actors]),
        tuple([(len(r.readers), len(r.tensors)) for r in own.registers]),
    )


@dataclass(frozen=True, slots=True)
class _Class:
    """Parts that are equal but for numbers."""

    ranks: Sequence[int]
    part: Plan  # of the first rank
    columns: Mapping[Path, Sequence[int]]  # where others have other numbers → by how much, for each rank

    def to_bytes(self) -> bytes:
        numbers: dict[tuple[int, ...], int] = {}
        differences = [
            pb.Difference(path=path, column=numbers.setdefault(tuple(column), len(numbers)))
            for path, column in self.columns.items()
        ]
        try:
            data: bytes = pb.PlanClass(
                ranks=self.ranks,
                part=to_bytes(self.part),
                differences=differences,
                columns=(pb.Column(differences=column) for column in numbers),
            ).SerializeToString(deterministic=True)
        except EncodeError as error:  # more than 2 GB
            raise PlanError(f"plan {self.part.name!r} does not fit a message of protobuf: {error}") from error
        return data


# ---- what differs


def _classes(plan: Plan, ranks: Sequence[int]) -> Iterator[_Class]:
    """The classes of ranks whose parts look alike, by their first ranks."""
    while ranks:
        found = _compared(plan, ranks)
        alike = [k for k in range(len(ranks)) if k not in found.unlike]
        columns = {path: [column[k] for k in alike] for path, column in found.columns.items()}
        differing = {path: column for path, column in columns.items() if any(column)}
        yield _Class([ranks[k] for k in alike], _own(plan.for_rank(ranks[0])), differing)
        ranks = [ranks[k] for k in sorted(found.unlike)]


def _compared(plan: Plan, ranks: Sequence[int]) -> NumberColumns:
    """What differs between the parts of ranks that look alike: ``_own(plan.for_rank(rank))``, which are not made."""
    found = NumberColumns(len(ranks))
    parts = [plan.of_rank(rank) for rank in ranks]
    bodies = [_bodies(own, rank) for own, rank in zip(parts, ranks, strict=True)]
    found.compare([tuple([plan.bodies[body] for body in used]) for used, _ in bodies], (FIELDS["bodies"],))
    for i, actors in enumerate(zip(*(own.actors for own in parts), strict=True)):
        path = (FIELDS["actors"], i)
        found.compare_fields(actors, path, but="body")
        found.compare([used.get(actor.id) for actor, (_, used) in zip(actors, bodies, strict=True)], (*path, BODY))
    found.compare([tuple(own.registers) for own in parts], (FIELDS["registers"],))
    found.compare([tuple(own.orders) for own in parts], (FIELDS["orders"],))
    found.compare([(rank,) for rank in ranks], (FIELDS["ranks"],))
    found.compare([tuple(own.calls) for own in parts], (FIELDS["calls"],))
    found.compare([tuple(own.steps) for own in parts], (FIELDS["origins"], STEPS))
    return found


def _bodies(own: RankItems, rank: int) -> tuple[Sequence[int], Mapping[int, int]]:
    """The bodies of a rank's part (``Plan.for_rank``), and for its actors that have one the number there."""
    numbers: dict[int, int] = {}  # body of the plan → its number in the part
    of_actor = {
        a.id: numbers.setdefault(a.body, len(numbers)) for a in own.actors if a.rank == rank and a.body is not None
    }
    return [*numbers], of_actor


# ---- the same numbers put in


def _changes(message: pb.PlanClass, at: int) -> Changes:
    """What the rank at this place of a class has other than the first one.  Raises IndexError, PlanError."""
    root: Changes = {}
    insides: dict[Path, Changes] = {(): root}  # those found so far
    columns = [column.differences[at] for column in message.columns]
    for one in message.differences:
        *path, last = one.path or (None,)
        inside = insides.get(key := tuple(path))
        if inside is None:
            inside = insides[key] = _inside(root, path)
        if last is None or last in inside:
            raise PlanError("a number is there twice, or nowhere")
        inside[last] = columns[one.column]
    return root


def _inside(changes: Changes, path: Sequence[int]) -> Changes:
    """The changes inside of what is at this place."""
    for index in path:
        changes = changes.setdefault(index, {})
        if type(changes) is not dict:
            raise PlanError("one number is inside of another")
    return changes


def _change(value: Any, changes: Changes | int) -> Any:
    """The value with other numbers.  Raises PlanError, or IndexError, where it has no number."""
    kind: Any = type(value)
    if isinstance(changes, int):
        return _moved(value, changes) if kind is tuple else _sum(value, changes) if kind is int else _none(value)
    if kind is tuple:
        items = list(value)
        _change_inside(items, changes)
        return tuple(items)
    inside = fields_of(kind)
    if inside is None:
        _none(value)
    items = list(inside(value))
    _change_inside(items, changes, kind in NAMED)
    return kind(*items)  # in a third of the time of dataclasses.replace, and there are hundreds for each rank


def _moved(items: tuple[Any, ...], by: int) -> tuple[Any, ...]:
    """The items, whose numbers all differ by as much (``number_columns.py``)."""
    kinds = {*map(type, items)}
    if kinds == {int}:
        return tuple([_sum(item, by) for item in items])
    if not kinds.intersection(MOVING):
        _none(items)
    return tuple([
        FromRegister(_sum(item.register, by), item.index) if type(item) is FromRegister
        else Read(_sum(item.actor, by), item.firings) if type(item) is Read
        else item
        for item in items
    ])  # fmt: skip


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
        pieces[2 * index + 1] = str(_sum(int(pieces[2 * index + 1]), by if type(by) is int else _none(by)))
    return "".join(pieces)


def _sum(number: int, by: int) -> int:
    found = number + by
    if not 0 <= found <= LARGEST:
        raise PlanError(f"number {number} is changed by {by}")
    return found


def _none(value: object) -> NoReturn:
    raise PlanError(f"a number was expected, {type(value).__name__} was found")
