"""Frames and the Unix socket that carries them: whole, in order, and nothing else is taken for one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorflow.runtime.inbox import Inbox
from actorflow.transport.messages import Contributed, Credit, Filled, Message, Ready, Region, Stamp
from actorflow.transport.unix_frames import BYE_FRAME, CREDIT, FILLED, FRAME, INLINE, READY, REGION, SIZE, Parser, pack
from actorflow.transport.unix_link import UnixLink
from actorflow_compiler.core.errors import ClusterError

SECONDS = 200.0  # which only a hang takes
NUMBERS = st.integers(0, 2**32 - 1)
LONG = st.integers(0, 2**64 - 1)
MESSAGES = st.one_of(
    st.builds(Credit, NUMBERS, NUMBERS),
    st.builds(Filled, NUMBERS, NUMBERS, LONG),
    st.builds(Contributed, NUMBERS, NUMBERS, LONG),
    st.builds(Stamp, LONG, LONG),
    st.builds(Ready, NUMBERS, NUMBERS, LONG, LONG, st.none()),
    st.builds(
        lambda plan, register, sequence, payload: Ready(plan, register, sequence, sum(map(len, payload)), payload),
        NUMBERS,
        NUMBERS,
        LONG,
        st.lists(st.binary(max_size=50)).map(tuple),
    ),
)


@given(st.lists(MESSAGES), st.lists(st.integers(1, 100), min_size=1))
def test_messages_survive_however_their_bytes_are_cut(messages: list[Message], cuts: list[int]) -> None:
    data, parser, found = b"".join(map(pack, messages)) + BYE_FRAME, Parser(3), []
    at = turn = 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        found += parser.feed(memoryview(data)[at : at + size])
        at, turn = at + size, turn + 1
    assert found == messages
    assert parser.bye


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", "a frame with bits that mean nothing"),
        (FRAME.pack(99, 0, 0, 0, 0, 0, 0), "a frame of kind 99"),
        (FRAME.pack(0, 0, 0, 0, 0, 0, 0), "a frame of kind 0"),
        (
            FRAME.pack(INLINE, 1, 0, 0, 0, 0, 1 << 60) + (1 << 60).to_bytes(8, "little"),
            "a token of 1152921504606846976 bytes",
        ),
        (FRAME.pack(INLINE, 1, 0, 0, 0, 0, 4) + (8).to_bytes(8, "little"), "a token of 8 bytes that says 4"),
        (FRAME.pack(CREDIT, 0, 0, 0, 0, 1, 0), "a frame with bits that mean nothing"),
        (FRAME.pack(FILLED, 0, 0, 0, 0, 1, 1), "a frame with bits that mean nothing"),
        (FRAME.pack(READY, 1, 0, 0, 0, 0, 0), "a frame with bits that mean nothing"),
        (FRAME.pack(REGION, 0, 0, 0, 0, 0, 0), "memory without its descriptor"),
    ],
)
def test_bytes_that_are_no_messages_are_an_error_that_names_the_rank(data: bytes, what: str) -> None:
    assert len(data) >= SIZE
    with pytest.raises(ClusterError, match=f"rank 3 sent .*{what}.* on its Unix socket"):
        Parser(3).feed(data)


@pytest.fixture
def links() -> Iterator[tuple[UnixLink, UnixLink, list[int]]]:
    """Two ends, 0 and 1, and the peers whose end was not announced."""
    lost: list[int] = []
    mine, theirs = socket.socketpair()
    yield UnixLink(1, mine, lambda: lost.append(1)), UnixLink(0, theirs, lambda: lost.append(0)), lost
    mine.close()
    theirs.close()


def read(link: UnixLink, count: int) -> list[Message]:
    """Wait for some messages, or the end."""
    inbox, found = Inbox(), []
    inbox.watch(link)
    while len(found) < count and not link.ended:
        inbox.look(wait=True)
        inbox.items.clear()
        found += link.receive()
    inbox.close()
    return found


def test_what_the_owner_sends_leaves_with_its_flush_and_what_others_send_at_once(
    links: tuple[UnixLink, UnixLink, list[int]],
) -> None:
    a, b, _ = links
    a.own()
    a.send(Credit(0, 1))
    a.send(Credit(0, 2))
    assert (a.unsent, b.receive()) == (True, [])
    a.flush()
    assert (a.unsent, b.receive()) == (False, [Credit(0, 1), Credit(0, 2)])
    thread = threading.Thread(target=a.send, args=(Credit(0, 3),))
    thread.start()
    thread.join(SECONDS)
    assert b.receive() == [Credit(0, 3)]


def test_a_full_socket_never_blocks_its_owner_and_loses_nothing(links: tuple[UnixLink, UnixLink, list[int]]) -> None:
    a, b, _ = links
    a.own()
    sent: list[Message] = []
    while not a.stuck:
        sent.append(Ready(0, 1, len(sent), 60_000, (os.urandom(60_000),)))
        a.send(sent[-1])
        a.flush()
    sent += [Credit(0, n) for n in range(1000)]
    for message in sent[-1000:]:
        a.send(message)
    other = threading.Thread(target=a.send, args=(Credit(9, 9),))  # waits for the peer
    other.start()
    assert read(b, len(sent) + 1) == [*sent, Credit(9, 9)]
    other.join(SECONDS)
    assert not a.stuck


def test_descriptors_travel_in_order_with_their_regions(links: tuple[UnixLink, UnixLink, list[int]]) -> None:
    a, b, _ = links
    a.own()
    wanted: list[Message] = []
    for n in range(40):
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, n)
        a.send(Filled(0, n, n))
        group = n - 1  # -1: none
        a.send(Region(0, n, descriptor, group))
        wanted += [Filled(0, n, n), Region(0, n, -1, group)]
    a.flush()
    found = read(b, 80)
    for region in found[1::2]:
        assert isinstance(region, Region)
        assert os.fstat(region.descriptor).st_size == region.nbytes
        os.close(region.descriptor)
    plain = [replace(m, descriptor=-1) if isinstance(m, Region) else m for m in found]
    assert plain == wanted


def test_a_peer_that_closes_is_told_of_unless_it_said_goodbye(links: tuple[UnixLink, UnixLink, list[int]]) -> None:
    a, b, lost = links
    b.send(Credit(0, 1))
    b.close()
    assert read(a, 2) == [Credit(0, 1)]
    assert a.ended
    assert b.receive() == []  # the owner sees its own end too
    a.send(Credit(0, 2))  # dropped without an error
    assert lost == []


def test_a_peer_that_is_gone_is_told_of_once(links: tuple[UnixLink, UnixLink, list[int]]) -> None:
    a, b, lost = links
    b._socket.close()
    for n in range(3):
        a.send(Credit(0, n))
    assert a.receive() == []
    assert (a.ended, lost) == (True, [1])


def test_an_inbox_wakes_its_owner_for_what_any_thread_puts() -> None:
    inbox, taken, count = Inbox(), [], 5000

    def own() -> None:
        while len(taken) < 3 * count:
            inbox.look(wait=True)
            while inbox.items:
                taken.append(inbox.items.popleft())

    def put(name: int) -> None:
        for n in range(count):
            inbox.put(name, n)

    owner = threading.Thread(target=own, daemon=True)
    putters = [threading.Thread(target=put, args=(name,)) for name in range(3)]
    for thread in (owner, *putters):
        thread.start()
    owner.join(SECONDS)
    assert not owner.is_alive()
    for name in range(3):
        assert [n for who, n in taken if who == name] == list(range(count))
    inbox.close()


def test_an_inbox_with_patience_sees_what_comes_without_being_woken(
    links: tuple[UnixLink, UnixLink, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = links
    rung: list[int] = []
    ring = os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", lambda bell, count: rung.append(count) or ring(bell, count))
    inbox, looking = Inbox(patience=SECONDS), threading.Event()
    monkeypatch.setattr(os, "sched_yield", looking.set)
    inbox.watch(b, "message")

    def put() -> None:
        looking.wait(SECONDS)
        inbox.put("call")

    putter = threading.Thread(target=put)
    putter.start()
    assert inbox.look(wait=True)
    putter.join(SECONDS)
    assert (list(inbox.items), rung) == ([("call",)], [])
    inbox.items.clear()
    looking.clear()
    sender = threading.Thread(target=lambda: looking.wait(SECONDS) and a.send(Credit(0, 1)))
    sender.start()
    assert inbox.look(wait=True)
    sender.join(SECONDS)
    assert (list(inbox.items), b.receive()) == ([("message",)], [Credit(0, 1)])
    inbox.close()


@pytest.mark.parametrize(("patience", "sockets"), [(0.0, True), (SECONDS, False)])
def test_an_inbox_sleeps_at_once_without_patience_or_sockets(
    links: tuple[UnixLink, UnixLink, list[int]], monkeypatch: pytest.MonkeyPatch, patience: float, sockets: bool
) -> None:
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("it looks for what may come"))
    inbox = Inbox(patience)
    if sockets:
        inbox.watch(links[1])
    putter = threading.Timer(0.05, inbox.put, ("call",))
    putter.start()
    assert inbox.look(wait=True)
    putter.join(SECONDS)
    inbox.close()
