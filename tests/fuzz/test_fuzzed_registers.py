"""Thousands of messages about a plan that no rank sends, to a live rank: each is refused, with nothing changed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from actorflow.support.refusals import MessageRefused
from actorflow.transport.messages import Contributed, Credit, Filled, Message, Ready, Region, Stamp
from actorflow.transport.unix_frames import Parser, pack
from fuzz.conftest import Tally
from fuzz.drawn_items import ROUND, in_rounds, mutated, register_messages, with_another_field
from fuzz.register_door import AWAY, INLINE, ME, MEMORY, SHARED, RegisterDoor, rank_of_three

GOOD = (  # what rank 0 or 2 could send next, after two calls
    Ready(0, INLINE, 2, 16, (bytes(16),)),
    Ready(0, MEMORY, 2, 16, None),
    Filled(0, SHARED, 2),
    Contributed(0, 3, 2),
    Credit(0, AWAY),
)


@pytest.fixture(scope="module")
def door() -> Iterator[RegisterDoor]:
    with rank_of_three() as made:
        yield made  # and calls once more


def attack(door: RegisterDoor, peer: int, message: Message, tally: Tally) -> None:
    before = door.state()
    refused = door.say(peer, message)
    assert refused is not None, f"taken from rank {peer}: {message}"
    assert refused.sender == peer
    assert door.state() == before
    tally.add(refused)


def test_structured_messages_are_refused(door: RegisterDoor, messages: int, drawn_from: int, tally: Tally) -> None:
    @settings(max_examples=ROUND, derandomize=False, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(peer=st.sampled_from([0, 0, 0, 2, 7]), message=with_another_field(GOOD) | register_messages(12))
    def each(peer: int, message: Message) -> None:
        if tally.count < messages:
            if door.fits(peer, message):
                tally.add(None)
            else:
                attack(door, peer, message, tally)

    in_rounds(each, drawn_from, lambda: tally.count >= messages)
    tally.check()


def test_repeated_and_reordered_traffic_is_refused(
    door: RegisterDoor, messages: int, drawn_from: int, tally: Tally
) -> None:
    draw = random.Random(drawn_from)
    told = [(peer, message) for peer, message in door.traffic if not isinstance(message, Region | Stamp)]
    while tally.count < messages:
        peer, message = draw.choice(told)
        attack(door, draw.choice((peer, peer, 0, 2)), message, tally)
    tally.check()


def test_changed_frames_are_refused(door: RegisterDoor, messages: int, drawn_from: int, tally: Tally) -> None:
    draw = random.Random(drawn_from)
    recorded = [pack(message) for _, message in door.traffic if not isinstance(message, Region)]
    for data in mutated(recorded, draw):
        if tally.count >= messages:
            break
        peer, parser = draw.choice((0, 2)), Parser(ME)
        try:
            found = parser.feed(data)
        except MessageRefused as error:
            tally.add(error)
            continue
        for message in found:  # the rest is waited for
            if isinstance(message, Stamp) or door.fits(peer, message):
                tally.add(None)
            else:
                attack(door, peer, message, tally)
    tally.check()
