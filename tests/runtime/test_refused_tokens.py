"""What no rank sends about a plan is refused before it changes anything: tokens, credits, memory, steps and stamps."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from actorflow.runtime import early_messages
from actorflow.runtime.call_stamps import CallStamps
from actorflow.runtime.early_messages import EarlyMessages
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.transport.messages import Contributed, Credit, Filled, Message, Ready, Region, Stamp
from actorflow.transport.shared import make_region
from actorflow.transport.unix_frames import FILLED, FRAME, Parser
from fuzz.register_door import AWAY, INLINE, ME, MEMORY, SHARED, RegisterDoor, rank_of_three

Reason = RefusalReason
BYTES = (bytes(16),)


@pytest.fixture(scope="module")
def door() -> Iterator[RegisterDoor]:
    with rank_of_three() as made:
        yield made


NEVER: list[tuple[int, Message, Reason]] = [
    (2, Ready(0, INLINE, 2, 16, BYTES), Reason.NUMBER),  # it is rank 0 that fills it
    (0, Ready(0, 77, 2, 16, BYTES), Reason.NUMBER),
    (0, Ready(0, AWAY, 2, 16, BYTES), Reason.NUMBER),
    (0, Ready(0, INLINE, 1, 16, BYTES), Reason.SEQUENCE),  # again
    (0, Ready(0, INLINE, 3, 16, BYTES), Reason.SEQUENCE),  # one is left out
    (0, Ready(0, INLINE, 2, 15, BYTES), Reason.SIZE),
    (0, Ready(0, INLINE, 2, 16, (bytes(15),)), Reason.SIZE),
    (0, Ready(0, INLINE, 2, 16, (bytes(8), bytes(8))), Reason.SIZE),
    (0, Ready(0, INLINE, 2, 16, None), Reason.VALUE),  # its data would never come
    (0, Ready(0, MEMORY, 2, 16, BYTES), Reason.VALUE),
    (0, Ready(0, SHARED, 2, 16, BYTES), Reason.VALUE),
    (0, Ready(0, SHARED, 2, 16, None), Reason.VALUE),
    (0, Ready(0, MEMORY, 1, 16, None), Reason.SEQUENCE),
    (0, Ready(0, MEMORY, 3, 16, None), Reason.SEQUENCE),
    (0, Ready(0, MEMORY, 2, 12, None), Reason.SIZE),
    (0, Ready(4096, MEMORY, 0, 16, None), Reason.NUMBER),  # a plan that will not come
    (0, Ready(4096, INLINE, 0, 16, BYTES), Reason.NUMBER),
    (0, Filled(0, SHARED, 1), Reason.SEQUENCE),
    (0, Filled(0, SHARED, 3), Reason.SEQUENCE),
    (2, Filled(0, SHARED, 2), Reason.NUMBER),
    (0, Filled(0, INLINE, 2), Reason.NUMBER),
    (2, Credit(0, AWAY), Reason.SLOT),  # no slot is taken
    (0, Credit(0, AWAY), Reason.NUMBER),  # it is rank 2 that has the slots
    (2, Credit(0, INLINE), Reason.NUMBER),
    (2, Credit(1 << 31, AWAY), Reason.NUMBER),
    (0, Contributed(0, 77, 0), Reason.NUMBER),
    (2, Contributed(0, 3, 2), Reason.NUMBER),
    (0, Contributed(0, 3, 1), Reason.SEQUENCE),
    (0, Contributed(0, 3, 3), Reason.SEQUENCE),
]


@pytest.mark.parametrize(("peer", "message", "reason"), NEVER, ids=str)
def test_what_no_rank_sends_about_a_plan_is_refused_and_changes_nothing(
    door: RegisterDoor, peer: int, message: Message, reason: Reason
) -> None:
    before = door.state()
    refused = door.say(peer, message)
    assert refused is not None
    assert (refused.reason, refused.sender) == (reason, peer)
    assert door.state() == before


def test_more_tokens_than_slots_are_refused(door: RegisterDoor) -> None:
    with rank_of_three() as other:
        held = other.job.machine._registers[INLINE]
        held.complete += 2  # as if two tokens were in its slots
        other.job.due[INLINE] += 2
        before = other.state()
        refused = other.say(0, Ready(0, INLINE, 4, 16, BYTES))
        assert refused is not None
        assert refused.reason is Reason.SLOT
        assert other.state() == before
        held.complete -= 2
        other.job.due[INLINE] -= 2


def test_a_step_that_this_rank_has_not_made_possible_is_refused(door: RegisterDoor) -> None:
    with rank_of_three() as other:
        (group,) = other.job.groups.values()
        assert group._heard == {0: 2}
        group.hear(0, 2)
        group.hear(0, 3)  # as it may read one step behind what this rank has put in
        refused = other.say(0, Contributed(0, group.id, 4))
        assert refused is not None
        assert (refused.reason, group._heard) == (Reason.SLOT, {0: 4})
        group._heard[0] = 2


def _memory(seals: bool = True, size: int = 128) -> int:
    if seals:
        return make_region(size, 0, ME)
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size)
    return descriptor


def _pipe() -> int:
    here, there = os.pipe()
    os.close(there)
    return here


REGIONS: dict[str, tuple[int, int, Callable[[], int], Reason]] = {  # sender, group, descriptor, reason
    "again": (0, -1, _memory, Reason.SEQUENCE),
    "again for a group": (0, 3, lambda: _memory(size=256), Reason.SEQUENCE),
    "for no group": (0, 77, _memory, Reason.NUMBER),
    "of a rank that shares nothing": (2, -1, _memory, Reason.MEMORY),
    "of a rank that shares nothing, no memory": (2, -1, _pipe, Reason.MEMORY),
}


@pytest.mark.parametrize("case", REGIONS)
def test_memory_that_was_not_agreed_is_refused_and_its_descriptor_closed(door: RegisterDoor, case: str) -> None:
    sender, group, make, reason = REGIONS[case]
    descriptor = make()
    before = door.state()
    refused = door.say(sender, Region(0, 128, descriptor, group))
    assert refused is not None
    assert refused.reason is reason
    assert door.state() == before
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@pytest.mark.parametrize(
    ("nbytes", "make"),
    [
        (128, lambda: _memory(size=64)),
        (64, _memory),
        (128, lambda: _memory(seals=False)),
        (128, _pipe),
        (128, lambda: os.open("/dev/null", os.O_RDWR)),
        (128, lambda: socket.socket().detach()),
    ],
    ids=["short", "other size", "not sealed", "pipe", "device", "socket"],
)
def test_only_memory_of_the_plans_size_that_nobody_can_change_is_mapped(nbytes: int, make: Callable[[], int]) -> None:
    with rank_of_three() as other:
        other.job._borrowed.discard((0, -1))
        before = other.state()
        refused = other.say(0, Region(0, nbytes, make()))
        assert refused is not None
        assert refused.reason is Reason.MEMORY
        assert other.state() == before


def test_messages_for_plans_to_come_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_messages, "MOST", 2)
    monkeypatch.setattr(early_messages, "ROOM", 100)
    early = EarlyMessages()
    early.keep(1, Credit(3, 1))
    early.keep(2, Ready(3, 1, 0, 90, (bytes(90),)))
    with pytest.raises(MessageRefused, match="104 bytes"):
        early.keep(2, Ready(4, 1, 0, 14, (bytes(14),)))
    early.keep(1, Credit(3, 2))
    with pytest.raises(MessageRefused, match="3 messages for plans that are not here"):
        early.keep(1, Credit(3, 2))
    assert [peer for peer, _ in early.take(3)] == [1, 2, 1]
    early.keep(1, Credit(4, 1))
    early.keep(2, Ready(4, 1, 0, 90, (bytes(90),)))
    with pytest.raises(MessageRefused, match="of a plan below 68"):
        early.keep(3, Credit(68, 1))


def test_stamps_come_in_the_order_of_calls_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorflow.runtime.call_stamps.MOST", 2)
    stamps = CallStamps()
    stamps.arrived(1, Stamp(5, 77))
    for call in (5, 4):
        with pytest.raises(MessageRefused, match=f"the stamp of call {call}; expected one behind 5"):
            stamps.arrived(1, Stamp(call, 77))
    stamps.arrived(2, Stamp(5, 77))
    stamps.arrived(1, Stamp(6, 78))
    with pytest.raises(MessageRefused, match="the stamps of 3 calls that are not made here"):
        stamps.arrived(1, Stamp(7, 79))
    stamps.made(Stamp(5, 77))
    stamps.arrived(1, Stamp(7, 79))
    assert stamps.have([1, 2], 5)


def test_descriptors_that_no_message_takes_are_closed() -> None:
    parser, descriptors = Parser(3), [os.memfd_create("test") for _ in range(2)]
    parser.descriptors.extend(descriptors)
    with pytest.raises(MessageRefused, match="a descriptor without the message of its memory"):
        parser.feed(FRAME.pack(FILLED, 0, 0, 0, 0, 0, 0))
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)
