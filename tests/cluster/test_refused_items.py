"""What no rank sends on a link is refused before it changes anything, and ends the run with the culprit named."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest

from actorflow.control import channels, payloads, proto
from actorflow.control.address_book import AddressBook, check_welcome, welcome_to
from actorflow.control.alone import Alone
from actorflow.control.buffered_callback import BufferedCallback
from actorflow.control.channels import PeerStub
from actorflow.control.drops import DropSet, ReleasedHere
from actorflow.persistence.far_files import HeldRange, serve_held_files
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.roster import Ticket
from actorflow.support.held_files import FileHolder, hold_file
from actorflow.support.refusals import REFUSALS, MessageRefused, RefusalCount, RefusalReason
from actorflow.support.requests import RequestHandlers
from actorflow_protos import runtime_pb2 as pb
from cluster.ranks import LIMIT, Ranks, Word
from fuzz.control_door import ControlDoor, three_ranks

Reason = RefusalReason


@pytest.fixture(scope="module")
def door() -> Iterator[ControlDoor]:
    with three_ranks() as made:
        yield made


def part(step: int, size: int, last: bool = True, **more: object) -> pb.Item:
    return pb.Item(part=pb.Part(step=step, last=last, data=bytes(size), **more))  # type: ignore[arg-type]


def steps(digests: bytes = b"", **more: object) -> pb.Item:
    return pb.Item(steps=pb.Steps(digests=digests, **more))  # type: ignore[arg-type]


def failure(**changes: object) -> pb.Item:
    fields = {"rank": 1, "host": "h", "pid": 1, "kind": "raised", "cause": "c", "noticed_by": 1, **changes}
    return pb.Item(failure=pb.Failure(**fields))  # type: ignore[arg-type]


TO_1 = [pb.Ranks(first=1, end=2)]
NEVER = [  # to, from, item, reason
    (0, 1, pb.Item(), Reason.UNREADABLE),
    (0, 1, pb.Item(hello=pb.Hello(rank=1)), Reason.SEQUENCE),
    (1, 0, pb.Item(hello=pb.Hello(rank=0)), Reason.SENDER),
    (1, 2, pb.Item(welcome=pb.Welcome()), Reason.SENDER),
    (1, 0, pb.Item(welcome=pb.Welcome()), Reason.SEQUENCE),
    (0, 1, steps(b"1234567"), Reason.SIZE),
    (0, 1, steps(b"12345678", wanted=99), Reason.SEQUENCE),
    (0, 1, steps(released=[pb.Released(call=1)]), Reason.LIMIT),
    (0, 1, steps(b"12345678", released=[pb.Released(call=-1)]), Reason.NUMBER),
    (0, 1, steps(b"12345678", released=[pb.Released(dropped=pb.Dropped(plans=[-1]))]), Reason.NUMBER),
    (2, 1, steps(b"12345678"), Reason.SENDER),
    (0, 1, part(0, 1, sender=1), Reason.SEQUENCE),  # it has come before
    (0, 1, part(7, 1, sender=1), Reason.SEQUENCE),  # it has told of no such step
    (1, 0, part(1, 1, receivers=TO_1), Reason.SEQUENCE),
    (1, 0, part(5, 7, last=False, receivers=TO_1), Reason.SIZE),
    (1, 0, part(5, (1 << 20) + 1, receivers=TO_1), Reason.LIMIT),
    (1, 2, part(5, 1), Reason.SENDER),
    (0, 1, part(5, 1, sender=2), Reason.SENDER),  # it is not below rank 1
    (0, 1, part(5, 1, sender=1, receivers=TO_1), Reason.VALUE),
    (1, 0, part(5, 1), Reason.VALUE),  # for nobody
    (1, 0, part(5, 1, receivers=[pb.Ranks(first=2, end=3)]), Reason.NUMBER),
    (1, 0, part(4, 1, receivers=[pb.Ranks(first=1, end=1)]), Reason.NUMBER),
    (1, 0, part(3, 1, receivers=TO_1 * 2), Reason.NUMBER),
    (1, 0, pb.Item(parent=pb.Parent()), Reason.SEQUENCE),
    (0, 1, pb.Item(parent=pb.Parent()), Reason.SENDER),
    (1, 0, pb.Item(alike=pb.Alike(steps=99)), Reason.NUMBER),
    (1, 0, pb.Item(alike=pb.Alike(steps=0)), Reason.NUMBER),
    (0, 1, pb.Item(alike=pb.Alike(steps=1)), Reason.SENDER),
    (1, 0, pb.Item(hurry=pb.Hurry(steps=1 << 63)), Reason.NUMBER),
    (1, 2, pb.Item(hurry=pb.Hurry(steps=1)), Reason.SENDER),
    (1, 0, pb.Item(tell=pb.Tell(step=99)), Reason.NUMBER),
    (0, 1, pb.Item(told=pb.Told(kind="call", text="t")), Reason.SEQUENCE),
    (0, 1, pb.Item(told=pb.Told(kind="dance", text="t")), Reason.VALUE),
    (0, 1, failure(kind="tired"), Reason.VALUE),
    (0, 1, failure(rank=3), Reason.NUMBER),
    (0, 1, failure(noticed_by=-2), Reason.NUMBER),
    (0, 1, failure(cause="x" * (1 << 20)), Reason.LIMIT),
    (0, 1, pb.Item(heard=pb.Heard()), Reason.SEQUENCE),
    (1, 0, pb.Item(farewell=pb.Farewell()), Reason.SEQUENCE),
    (1, 2, pb.Item(farewell=pb.Farewell()), Reason.SENDER),
    (1, 0, pb.Item(near=pb.Near(connected=True)), Reason.SENDER),
    (0, 1, pb.Item(vote=pb.Vote(call=3, rank=1)), Reason.SEQUENCE),
    (0, 1, pb.Item(vote=pb.Vote(call=-3, rank=1)), Reason.NUMBER),
    (2, 1, pb.Item(failed=pb.Failed(call=3)), Reason.SENDER),
    (1, 0, pb.Item(hold=pb.Hold(call=-1)), Reason.NUMBER),
    (1, 0, pb.Item(decision=pb.Decision(failed=pb.Failed(call=3))), Reason.SEQUENCE),
    (0, 1, pb.Item(hold=pb.Hold(call=1)), Reason.SENDER),
    (0, 1, pb.Item(silent=pb.Silent(by=1, rank=9, seconds=1.0)), Reason.NUMBER),
    (0, 1, pb.Item(silent=pb.Silent(by=1, rank=1, seconds=1.0)), Reason.VALUE),
    (0, 1, pb.Item(silent=pb.Silent(by=1, rank=2, seconds=-1.0)), Reason.VALUE),
    (0, 1, pb.Item(silent=pb.Silent(by=1, rank=2, seconds=math.nan)), Reason.VALUE),
    (0, 1, pb.Item(silent=pb.Silent(by=1, rank=2, seconds=1.0, waits="w" * (1 << 20))), Reason.LIMIT),
    (0, 1, pb.Item(ready=pb.Ready(plan=1, register=1, payload=[b"x"])), Reason.VALUE),
]


@pytest.mark.parametrize(("to", "sender", "item", "reason"), NEVER, ids=lambda value: str(value)[:60])
def test_what_no_rank_sends_is_refused_and_changes_nothing(
    door: ControlDoor, to: int, sender: int, item: pb.Item, reason: Reason
) -> None:
    before = door.state(to)
    refused = door.say(to, sender, item)
    assert refused is not None
    assert (refused.reason, refused.sender) == (reason, sender)
    assert f"rank {sender} sent what no rank sends ({reason}): " in str(refused)
    assert door.state(to) == before


def test_bytes_and_fields_of_another_version_are_refused_at_any_depth(door: ControlDoor) -> None:
    known = pb.Item(steps=pb.Steps(released=[pb.Released(call=1, dropped=pb.Dropped(plans=[1]))]))
    known.steps.released[0].dropped.MergeFromString(b"\xf8\x3f\x01")  # field 1023
    before = door.state(0)
    unknown = door.say(0, 1, known)
    assert unknown is not None
    assert (unknown.reason, "3 bytes of fields that are not known" in str(unknown)) == (Reason.UNKNOWN_FIELD, True)
    for data in (b"\xff", b"\x0a\x05\x0a", b"\x0a\x02\x0a\x7f"):
        broken = door.say_bytes(0, 1, data)
        assert broken is not None
        assert broken.reason is Reason.UNREADABLE
    assert door.state(0) == before


def test_a_welcome_must_hold_all_ranks_and_ones_own_ticket(door: ControlDoor) -> None:
    plane = door.plane(1)
    tickets = [plane.tickets[rank] for rank in range(3)]
    good = welcome_to(tickets, ("h", 1), 0)
    check_welcome(good, 3, plane.own)
    wrong = {
        "fewer": welcome_to(tickets[:2], ("h", 1), 0),
        "more": welcome_to([*tickets, tickets[2]], ("h", 1), 0),
        "another order": welcome_to([*tickets[1:], tickets[0]], ("h", 1), 0),
        "no port": welcome_to(tickets, ("h", 0), 0),
        "a port too high": welcome_to(tickets, ("h", 1), 1 << 16),
    }
    changes = (("address", "nowhere"), ("address", ""), ("pid", 1 << 23), ("node", 1 << 20), ("socket", "/tmp"))
    for name, change in changes:
        other = replace(tickets[2], **{name: change})  # type: ignore[arg-type]
        wrong[f"{name} {change}"] = welcome_to([*tickets[:2], other], ("h", 1), 0)
    for name, change in (("host", "elsewhere"), ("pid", 1), ("address", "127.0.0.1:1"), ("machine", "m"), ("node", 1)):
        mine = replace(tickets[1], **{name: change})  # type: ignore[arg-type]
        wrong[f"another {name} of one's own"] = welcome_to([tickets[0], mine, tickets[2]], ("h", 1), 0)
    short = welcome_to(tickets, ("h", 1), 0)
    del short.machines[2]
    wrong["a column that is short"] = short
    for name, welcome in wrong.items():
        with pytest.raises(MessageRefused):
            pytest.fail(f"{name}: {check_welcome(welcome, 3, plane.own)}")


def test_the_book_has_the_tickets_that_ranks_have_shown() -> None:
    made = [
        Ticket(
            rank, rank // 2, 2, 2, f"host {rank}", 7 + rank, f"10.0.0.{rank}:{80 + rank}", "1", "3", "2", "train.py",
            "d", ("--fast",), f"machine {rank // 2}", f"actorflow-{rank:032x}", "Gloo", 15.0, 16,
        )
        for rank in range(4)
    ]  # fmt: skip
    book = AddressBook()
    book.add(made[3])
    assert (dict(book), len(book), 0 in book, book.get(2)) == ({3: made[3]}, 1, False, None)
    book.welcome(welcome_to(made, ("h", 1), 0), made[3])
    assert dict(book) == dict(enumerate(made))
    assert (len(book), 4 in book, -1 in book) == (4, False, False)


@pytest.mark.parametrize(
    ("peer", "items", "reason"),
    [
        (2, [pb.Item(beat=pb.Beat())], Reason.SEQUENCE),  # before it has said who it is
        (2, [pb.Item(hello=pb.Hello(rank=2))], Reason.SENDER),  # who has a link
        (1, [pb.Item(hello=pb.Hello(rank=1))], Reason.SENDER),
        (2, [pb.Item(hello=pb.Hello(rank=1))], Reason.SEQUENCE),
        (7, [pb.Item(hello=pb.Hello(rank=7))], Reason.NUMBER),
        (7, [pb.Item(hello=pb.Hello(rank=7, ticket=pb.Ticket(rank=7)))], Reason.NUMBER),
    ],
)
def test_a_stranger_takes_no_ranks_place(door: ControlDoor, peer: int, items: list[pb.Item], reason: Reason) -> None:
    before = door.state(1)
    refused = door.stranger(1, peer, *items)
    assert refused is not None
    assert refused.reason is reason
    assert door.state(1) == before


def test_a_rank_that_sends_what_none_sends_ends_the_run_and_is_named_on_every_rank(
    joined: Callable[..., Ranks],
) -> None:
    ranks = joined(3)
    before = REFUSALS.of("link").get(Reason.SENDER, 0)
    ranks.clusters[2]._control_plane.links[0].put(pb.Item(alike=pb.Alike(steps=1)))
    for cluster in ranks.clusters:
        assert cluster.failed.wait(LIMIT)
        failure = cluster.failure
        assert failure is not None
        assert (failure.rank, failure.kind, failure.noticed_by) == (2, FailureKind.MALFORMED, 0)
        assert "sent what no rank sends (wrong sender): 'alike' from rank 2 to rank 0" in failure.text
        assert "see who else knows the token" in str(failure.error())
    assert REFUSALS.of("link")[Reason.SENDER] == before + 1


@pytest.mark.parametrize("dropped", [DropSet(frozenset({4})), DropSet(variables=frozenset({"b"}))], ids=str)
def test_a_master_that_says_to_drop_what_a_rank_has_not_released_ends_the_run(
    joined: Callable[..., Ranks], dropped: DropSet
) -> None:
    ranks = joined(3)
    master = ranks.clusters[0]._control_plane
    released = DropSet(frozenset({3}), frozenset({"a"}))
    for cluster in ranks.clusters[1:]:
        cluster.announce_call(0, "digest", "step()", released)
        cluster.want_agreement()
    pause = threading.Event()
    while min(master.steps.told(rank) for rank in (1, 2)) < 1:
        pause.wait(0.01)
    master._loop.call_soon_threadsafe(master._tree_links.down, proto.alike_to(1, released | dropped))
    for cluster in ranks.clusters:
        assert cluster.failed.wait(LIMIT)
        failure = cluster.failure
        assert failure is not None
        assert (failure.rank, failure.kind) == (0, FailureKind.MALFORMED)
        assert "the drop of " in failure.text
        assert "expected what this rank's script has released" in failure.text


def test_what_all_ranks_have_released_is_what_each_of_them_has_told() -> None:
    here = ReleasedHere()
    a, b = (DropSet(variables=frozenset({name})) for name in "ab")
    here.tell(a | b, 5)
    here.forget(b, 9)  # a plan was made by the ninth step, with which it was dropped
    here.tell(b, 12)  # another one of this name
    here.agree(a, 7)
    for gone in (a, a | b):
        with pytest.raises(MessageRefused, match="the drop of a; expected"):
            here.agree(gone, 8)
    here.agree(DropSet(), 9)
    here.agree(b, 12)
    with pytest.raises(MessageRefused, match="the drop of b; expected"):
        here.agree(b, 13)
    here.tell(b, 14)
    here.forget(b, 15)
    here.agree(b, 16)  # the master may not have known of that yet
    assert not here._told
    assert not here._forgotten


@pytest.mark.parametrize(("sender", "to"), [(1, 0), (0, 1)])
def test_a_message_that_is_too_long_is_not_read_and_its_sender_named(
    joined: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, sender: int, to: int
) -> None:
    monkeypatch.setattr(channels, "MOST_BYTES", 1 << 18)
    ranks = joined(2)
    ranks.clusters[sender]._control_plane.links[to].put(pb.Item(part=pb.Part(data=bytes(1 << 19))))
    assert ranks.clusters[to].failed.wait(LIMIT)
    failure = ranks.clusters[to].failure
    assert failure is not None
    assert failure.rank == sender
    if to:
        assert failure.kind is FailureKind.MALFORMED
        assert "too much" in failure.text
    else:  # as a server it sees that the link has ended, and no more: what is read is refused
        assert failure.kind is FailureKind.BROKEN


def test_payloads_that_nobody_takes_are_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "MOST", 20_000)
    monkeypatch.setattr(payloads, "EACH", 4096)

    async def fill() -> None:
        kept = payloads.Payloads()
        for step in range(4):
            kept.add(1, pb.Part(step=step, last=True, data=bytes(900)))
        with pytest.raises(MessageRefused, match="with 19984 that wait; expected at most 20000"):
            kept.add(1, pb.Part(step=4, last=True, data=bytes(900)))
        kept.add(2, pb.Part(step=4, last=True, data=bytes(900)))  # another rank's
        assert len(await kept.take(1, 0)) == 900
        kept.add(1, pb.Part(step=4, last=True, data=bytes(900)))
        for step in range(1, 5):
            await kept.take(1, step)
        assert kept._here == {1: 0, 2: 4996}

    asyncio.run(fill())


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11), (0, 1 << 62), (1 << 62, 1 << 62)])
def test_only_what_lies_in_a_held_file_is_read(start: int, stop: int) -> None:
    holder, descriptor = FileHolder(), os.memfd_create("test")
    os.write(descriptor, b"0123456789")
    hold_file(holder.address, "a", descriptor)
    os.close(descriptor)
    run = Alone()
    serve_held_files(run, holder.address)
    try:
        assert run.pull(0, HeldRange("a", 2, 10)) == b"23456789"
        assert run.pull(0, HeldRange("a", 10, 10)) == b""
        with pytest.raises(MessageRefused, match="expected bytes between 0 and 10") as refused:
            run.pull(0, HeldRange("a", start, stop))
        assert refused.value.reason is Reason.SIZE
    finally:
        holder.close()


def test_a_stranger_with_the_token_is_cut_off_and_counted_and_the_run_goes_on(joined: Callable[..., Ranks]) -> None:
    ranks = joined(2)
    before = REFUSALS.of("link")
    address = f"127.0.0.1:{ranks.clusters[0].settings.master_port}"
    with grpc.insecure_channel(address) as channel:
        for rank, sent in ((5, pb.Item(beat=pb.Beat())), (1, pb.Item(welcome=pb.Welcome()))):
            ended = threading.Event()
            items = iter([pb.Batch(items=[sent])])

            def batches(items: Iterator[pb.Batch] = items, ended: threading.Event = ended) -> Iterator[pb.Batch]:
                yield from items
                ended.wait(LIMIT)  # it does not close by itself

            call = PeerStub(channel).Link(batches(), metadata=channels.metadata("secret", rank), timeout=LIMIT)
            assert list(call) == []
            ended.set()
    after = REFUSALS.of("link")
    assert after.get(Reason.SEQUENCE, 0) - before.get(Reason.SEQUENCE, 0) == 2
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None, None]


def test_messages_that_nobody_takes_yet_are_kept_up_to_a_limit() -> None:
    kept: BufferedCallback[[int]] = BufferedCallback(most=2)
    kept(1)
    kept(2)
    with pytest.raises(MessageRefused, match="3 messages before this rank takes any"):
        kept(3)
    got: list[int] = []
    kept.attach(got.append)
    kept(4)
    assert got == [1, 2, 4]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Word", Reason.UNREADABLE),
        ("Word {", Reason.UNREADABLE),
        ("Word " + "[" * 100_000, Reason.UNREADABLE),
        ('Word {"word": "w"}', Reason.SIZE),
        ("Word []", Reason.SIZE),
        ('Word ["a", "b"]', Reason.SIZE),
        ("Word [1]", Reason.VALUE),
        ("Word [null]", Reason.VALUE),
        ("../etc [1]", Reason.UNREADABLE),
        ("W" * 5000 + " []", Reason.UNREADABLE),
    ],
    ids=lambda text: text[:20],
)
def test_a_request_that_is_none_reaches_no_handler(text: str, reason: Reason) -> None:
    served = RequestHandlers()
    served.serve(Word, lambda word: pytest.fail(f"{word} was answered"))
    with pytest.raises(MessageRefused) as e:
        served.answer(text, 0)
    assert e.value.reason is reason


def test_refusals_are_all_counted_and_a_flood_of_them_is_not_printed() -> None:
    said: list[str] = []
    now = [0.0]
    count = RefusalCount(said.append, lambda: now[0])
    for _ in range(25):
        count.add("link", MessageRefused(Reason.SENDER, "'alike'", "it from rank 0"), "rank 2")
    assert len(said) == 10
    assert said[0] == "a message was refused (link, from rank 2): wrong sender: 'alike'; expected it from rank 0"
    now[0] = 61.0
    count.add("pull", MessageRefused(Reason.SIZE, "9 bytes", "8"))
    assert len(said) == 11
    assert count.text() == "refused messages: 26 (link: wrong sender 25, pull: wrong size 1)"
    assert count.of("link") == {Reason.SENDER: 25}


def test_a_refusal_can_be_copied_and_names_its_sender_once() -> None:
    error = MessageRefused(Reason.SIZE, "x" * 1000, "8 bytes")
    assert str(error.of(3).of(4)).startswith("rank 3 sent what no rank sends (wrong size): xxx")
    assert len(str(error)) < 600
    assert str(copy.copy(error.of(3))) == str(error.of(3))  # as it is raised again on another thread
