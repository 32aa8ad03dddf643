"""Draw messages of the wire that are wrong in some way: any fields of any values, and real traffic, changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import seed
from hypothesis import strategies as st

from actorflow.transport.messages import Contributed, Credit, Filled, Ready
from actorflow.transport.messages import Message as RegisterMessage

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 9, 16, 63, 64, 4096, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
ROUND = 500  # messages that hypothesis draws before it forgets them
LONG = (*NUMBERS, 1 << 40, (1 << 62) - 1, 1 << 62, (1 << 63) - 1)
TEXTS = ("", "call", "raised", "killed", "stdout", "a", "../../etc/passwd", "é\0\n", "x" * 300_000, "h:1", "h:0")
DATA = (b"", b"1234567", b"12345678", b"x" * 16, b"\xff" * 100, bytes(1 << 20), bytes((1 << 20) + 1))
_RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 1 << 32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1 << 64),
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), 1 << 31),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), 1 << 63),
}


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        some = [number for number in (*LONG, -1, -2) if low <= number < high]
        return st.sampled_from(some) | st.integers(low, high - 1)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf"), 1e300])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from(DATA) | st.binary(max_size=40)
    return st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def messages(kind: type[Message], depth: int = 3) -> st.SearchStrategy[Any]:
    """Messages of a kind with any of their fields, each of any value that it can carry."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    chosen = {field.name for one in kind.DESCRIPTOR.oneofs for field in one.fields if len(one.fields) > 1}
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None:
            if depth == 0:
                continue
            one = messages(field.message_type._concrete_class, depth - 1)
        else:
            one = _scalars(field)
        probe = getattr(kind(), field.name)
        is_list = not isinstance(probe, (str, bytes, int, float, Message))
        fields[field.name] = st.lists(one, max_size=3) if is_list else one
    if chosen:
        alternatives = [st.fixed_dictionaries({name: fields[name]}) for name in sorted(chosen & fields.keys())]
        rest = {name: one for name, one in fields.items() if name not in chosen}
        return st.one_of(*alternatives).flatmap(
            lambda pick: st.fixed_dictionaries({}, optional=rest).map(lambda more: kind(**pick, **more))
        )
    return st.fixed_dictionaries({}, optional=fields).map(lambda some: kind(**some))


def register_messages(registers: int) -> st.SearchStrategy[RegisterMessage]:
    """Messages about plan 0 and others, mostly about registers and groups with numbers below ``registers``."""
    plans = st.sampled_from([0, 0, 0, 0, 65, 4096, (1 << 32) - 1])
    numbers = st.integers(0, registers) | st.sampled_from(NUMBERS)
    sequences = st.integers(0, 5) | st.sampled_from(LONG)
    sizes = st.sampled_from([16, 16, 16, 0, 8, 15, 17, 1 << 20, (1 << 64) - 1])
    payloads = st.none() | st.lists(st.sampled_from([bytes(16), bytes(15), b"", bytes(8), bytes(5000)]), max_size=3)
    return st.one_of(
        st.builds(Credit, plans, numbers),
        st.builds(Filled, plans, numbers, sequences),
        st.builds(Contributed, plans, numbers, sequences),
        st.builds(Ready, plans, numbers, sequences, sizes, payloads.map(lambda p: p if p is None else tuple(p))),
    )


def with_another_field(good: Sequence[RegisterMessage]) -> st.SearchStrategy[RegisterMessage]:
    """One of these messages, with another value in a field or two."""

    def change(message: RegisterMessage) -> st.SearchStrategy[RegisterMessage]:
        values: dict[str, st.SearchStrategy[Any]] = {
            "register": st.integers(0, 12) | st.sampled_from(NUMBERS),
            "group": st.integers(0, 12) | st.sampled_from(NUMBERS),
            "step": st.integers(0, 6) | st.sampled_from(LONG),
            "sequence": st.integers(0, 6) | st.sampled_from(LONG),
            "nbytes": st.integers(0, 40) | st.sampled_from(LONG),
            "payload": st.none() | st.lists(st.binary(max_size=20), max_size=3).map(tuple),
        }
        mine = [name for name in values if hasattr(message, name) and name not in ("register", "group")] or ["register"]
        picked = st.lists(st.sampled_from(mine), min_size=1, max_size=2, unique=True)
        drawn = picked.flatmap(lambda names: st.fixed_dictionaries({name: values[name] for name in names}))
        return drawn.map(lambda fields: replace(message, **fields))

    return st.sampled_from(good).flatmap(change)


def in_rounds(attack: Callable[[], None], first: int, enough: Callable[[], bool]) -> None:
    """Have hypothesis draw until it is enough, from seeds that follow from the first; it remembers all of a round."""
    number = 0
    while not enough():
        seed(first + number * 1_000_003)(attack)()
        number += 1


def mutated(recorded: list[bytes], draw: random.Random) -> Iterator[bytes]:
    """Without end: recorded bytes with some changed, cut off, left out, put in, doubled, put in another order."""
    changes: list[Callable[[bytearray], object]] = [
        lambda data: data.__setitem__(draw.randrange(len(data)), draw.randrange(256)),
        lambda data: data.__setitem__(at := draw.randrange(len(data)), data[at] ^ 1 << draw.randrange(8)),
        lambda data: data.__delitem__(slice(draw.randrange(len(data)), None)),
        lambda data: data.__delitem__(draw.randrange(len(data))),
        lambda data: data.insert(draw.randrange(len(data)), draw.randrange(256)),
        lambda data: data.extend(draw.choice(recorded)),
        lambda data: data.__setitem__(slice(0, 0), data[: draw.randrange(len(data))]),
        lambda data: data.reverse(),
        lambda data: data.extend(bytes(draw.randrange(5000))),
    ]
    while True:
        data = bytearray(draw.choice(recorded))
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3, 8))):  # none: a message that comes again
            if data:
                draw.choice(changes)(data)
        yield bytes(data)
