"""Values of many ranks compared place by place differ where each one, compared with the first, differs."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow_compiler.plan.number_columns import MOVING, NAMED, NUMBERS, NumberColumns, Path
from actorflow_compiler.plan.plan import Actor, FromRegister, OfVariable, Order, Read, Register
from fewer import fewer

numbers = st.integers(-1, 3)
queues = st.sampled_from(["compute", "send:1", "send:12", "send:1>2", "send:x"])
places = st.builds(FromRegister, numbers, st.integers(0, 1)) | st.builds(OfVariable, st.sampled_from("ab"))
few = st.lists(numbers, max_size=3).map(tuple)
orders = st.builds(Order, numbers, queues, few)
reads = st.lists(st.builds(Read, numbers), max_size=2).map(tuple)
registers = st.builds(Register, numbers, numbers, reads, st.just(()))
actors = st.builds(
    Actor, numbers, queues, numbers, queues, st.just("forward"),
    operands=st.lists(places, max_size=3).map(tuple), flops=st.sampled_from([0.0, -0.0, 1.0]),
)  # fmt: skip
loose = st.none() | st.booleans() | numbers | queues | few | st.sampled_from([0.0, -0.0, 1.0])
values = orders | registers | actors | st.lists(loose, min_size=1, max_size=2).map(tuple)


def differences(first: Any, other: Any, path: Path = (), named: bool = False) -> dict[Path, int] | None:
    """By how much the numbers of one thing are more than those of another one; None if anything else differs."""
    kind = type(first)
    if type(other) is not kind:
        return None
    if kind is int:
        if first == other:
            return {}
        return {path: other - first} if first >= 0 <= other else None
    if kind is str and named:
        here, there = NUMBERS.split(first), NUMBERS.split(other)
        if here[::2] != there[::2]:
            return None
        pairs = enumerate(zip(here[1::2], there[1::2], strict=True))
        return {(*path, i): int(b) - int(a) for i, (a, b) in pairs if a != b}
    if kind is tuple or is_dataclass(kind):
        names = [one.name for one in fields(kind)] if kind is not tuple else []
        a, b = ([getattr(x, name) for name in names] if names else x for x in (first, other))
        if len(a) != len(b):
            return None
        inside = [differences(x, y, (*path, i), kind in NAMED) for i, (x, y) in enumerate(zip(a, b, strict=True))]
        known = [one for one in inside if one is not None]
        return {place: by for one in known for place, by in one.items()} if len(known) == len(inside) else None
    return {} if repr(first) == repr(other) else None


def spread(value: Any, columns: dict[Path, int], path: Path = ()) -> dict[Path, int]:
    """The same differences, each at a number of its own: what a tuple's numbers are more is said of each of them."""
    if is_dataclass(value):
        items = [getattr(value, one.name) for one in fields(value)]
    else:
        items = list(value) if type(value) is tuple else []
    found = {}
    if path in columns and type(value) is tuple:
        for i, item in enumerate(items):
            if type(item) is int or type(item) in MOVING:
                found[(*path, i) if type(item) is int else (*path, i, 0)] = columns[path]
        return found
    if not items:
        return {place: by for place, by in columns.items() if place[: len(path)] == path}
    return {place: by for i, item in enumerate(items) for place, by in spread(item, columns, (*path, i)).items()}


@settings(max_examples=fewer(500), deadline=None)
@given(st.data())
def test_all_at_once_differ_where_one_by_one_do(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([orders, registers, actors, values]))
    given_values = data.draw(st.lists(kind, min_size=1, max_size=5))
    compared = NumberColumns(len(given_values))
    compared.compare(given_values, ())
    expected = [differences(given_values[0], other) for other in given_values]
    assert compared.unlike == {k for k, one in enumerate(expected) if one is None}
    for k, one in enumerate(expected):
        if one is not None:
            columns = {path: column[k] for path, column in compared.columns.items()}
            found = {path: by for path, by in spread(given_values[0], columns).items() if by}
            assert found == one


def test_numbers_of_a_tuple_that_move_together_are_one_difference() -> None:
    compared = NumberColumns(3)
    compared.compare([(FromRegister(k, 1), OfVariable("w"), FromRegister(k + 4, 0)) for k in range(3)], (7,))
    assert compared.columns == {(7,): [0, 1, 2]}


W = OfVariable("w")


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ((FromRegister(0, 1), W), (FromRegister(1, 2), W)),
        ((FromRegister(0, 1), W), (FromRegister(1, 1), OfVariable("v"))),
        ((FromRegister(0, 1), W), (FromRegister(1, 1),)),
        ((FromRegister(0, 1), 0.0), (FromRegister(1, 1), -0.0)),
        ((1, 2), (2, 4)),
    ],
)
def test_what_does_not_move_as_a_whole_is_compared_item_by_item(first: Any, other: Any) -> None:
    compared = NumberColumns(2)
    compared.compare([first, other], ())
    assert () not in compared.columns
    expected = differences(first, other)
    assert compared.unlike == (set() if expected is not None else {1})
