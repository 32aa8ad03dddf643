"""Thousands of items that no rank sends, on the links of live ranks: each is refused, with nothing changed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from actorflow.control.message_rules import CHUNK, COUNT, LONGEST
from actorflow.rendezvous.failure import FailureKind
from actorflow_protos import runtime_pb2 as pb
from fuzz.conftest import Tally
from fuzz.control_door import WORLD, ControlDoor, three_ranks
from fuzz.drawn_items import ROUND, in_rounds, mutated
from fuzz.drawn_items import messages as drawn_messages

REGISTER = ("ready", "credit", "stamp")  # what is in them is checked where the plans are
ITEMS = drawn_messages(pb.Item)


@pytest.fixture(scope="module")
def door() -> Iterator[ControlDoor]:
    with three_ranks() as made:
        yield made


def could_be(item: pb.Item, to: int, sender: int) -> bool:
    """Whether rank ``sender`` could send this now, after a gather and a scatter, so that it may change something."""
    kind = item.WhichOneof("kind")
    if kind in ("beat", "bye") or (kind in REGISTER and not (kind == "ready" and item.ready.payload)):
        return True
    if kind == "ready":
        return item.ready.inline
    if kind == "failure":
        it = item.failure
        return it.kind in list(FailureKind) and it.rank < WORLD and it.noticed_by >= -1 and _short(it.cause, it.host)
    if kind == "steps" and to == 0:
        digests, odd = divmod(len(item.steps.digests), 8)
        return not odd and item.steps.wanted <= 2 + digests and len(item.steps.released) <= digests
    if kind == "part" and 0 in (to, sender):
        size, last = len(item.part.data), item.part.last
        due = item.part.step == 1 if to == 0 else item.part.step >= 2
        return due and (size == CHUNK or (last and size < CHUNK))
    if kind == "hurry" and sender == 0:
        return 1 <= item.hurry.steps < COUNT
    if kind == "near":
        return sender > to
    if kind == "failed" and to == 0:
        it = item.failed
        return 0 <= it.call < COUNT and _short(it.text, it.message, it.cause, it.line)
    if kind == "hold" and sender == 0:
        return 0 <= item.hold.call < COUNT and _short(item.hold.line)
    if kind == "silent" and to == 0:
        it = item.silent
        return it.rank in (1, 2) and it.rank != sender and 0 <= it.seconds < math.inf and _short(it.waits)
    return False


def _short(*texts: str) -> bool:
    return all(len(text) <= LONGEST for text in texts)


PAIRS = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_structured_items_are_refused(door: ControlDoor, messages: int, drawn_from: int, tally: Tally) -> None:
    @settings(max_examples=ROUND, derandomize=False, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(pair=st.sampled_from(PAIRS), item=ITEMS)
    def attack(pair: tuple[int, int], item: pb.Item) -> None:
        to, sender = pair
        if tally.count >= messages:
            return
        if could_be(item, to, sender):
            tally.add(None)
            return
        before = door.state(to)
        refused = door.say(to, sender, item)
        assert refused is not None, f"rank {to} has taken this from rank {sender}: {item}"
        assert refused.sender == sender
        assert door.state(to) == before
        tally.add(refused)

    in_rounds(attack, drawn_from, lambda: tally.count >= messages)
    tally.check()


def test_changed_traffic_is_refused(door: ControlDoor, messages: int, drawn_from: int, tally: Tally) -> None:
    draw = random.Random(drawn_from)
    for data in mutated([one for _, _, one in door.traffic], draw):
        if tally.count >= messages:
            break
        to, sender = draw.choice(PAIRS)
        try:
            items = list(pb.Batch.FromString(data).items)
        except DecodeError:
            items = [pb.Item()]
        if not items or any(could_be(item, to, sender) for item in items):
            tally.add(None)
            continue
        before = door.state(to)
        refused = door.say_bytes(to, sender, data)
        assert refused is not None, f"rank {to} has taken this from rank {sender}: {data!r}"
        assert door.state(to) == before
        tally.add(refused)
    tally.check()


def test_strangers_are_cut_off(door: ControlDoor, messages: int, drawn_from: int, tally: Tally) -> None:
    @settings(max_examples=ROUND, derandomize=False, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(peer=st.integers(1, 9), item=ITEMS)
    def attack(peer: int, item: pb.Item) -> None:
        if tally.count >= messages:
            return
        before = door.state(1)
        refused = door.stranger(1, peer, item)
        assert refused is not None, f"rank 1 has taken this from a stranger that says it is rank {peer}: {item}"
        assert door.state(1) == before
        tally.add(refused)

    in_rounds(attack, drawn_from, lambda: tally.count >= messages)
    tally.check()


def test_the_run_goes_on(door: ControlDoor) -> None:
    """The last test of this file: what was refused has harmed nobody."""
    run = door.ranks
    assert run.each(lambda cluster: cluster.gather("after", b"%d" % cluster.rank)) == [[b"0", b"1", b"2"], None, None]
    assert run.each(lambda cluster: cluster.goodbye()) == [None] * WORLD
