"""Register messages and pulls between ranks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from actorflow.control import pull
from actorflow.control.alone import Alone
from actorflow.control.cluster import Cluster
from actorflow.rendezvous.settings import Settings
from actorflow.runtime.inbox import Inbox
from actorflow.runtime.lines import PeerSockets
from actorflow.transport.messages import Credit, Line, Message, Ready
from actorflow_compiler.core.errors import ClusterError
from cluster.ranks import LIMIT, Ranks, Word

Joined = Callable[..., Ranks]


def hear(cluster: Cluster, callback: Callable[[int, Message], object]) -> None:
    """Give a callback what comes over the network, and what a thread reads from Unix sockets."""

    def read(line: Line) -> None:
        inbox = Inbox()
        lines = PeerSockets(inbox, callback)
        lines.watch(line)
        while lines:
            inbox.look(wait=True)
            while inbox.items:
                work, *arguments = inbox.items.popleft()
                work(*arguments)
        inbox.close()

    cluster.on_message(callback)
    cluster.on_line(lambda line: threading.Thread(target=read, args=(line,), daemon=True).start())


@pytest.mark.parametrize("local", [True, False])
def test_messages_arrive_whole_and_in_order_in_both_directions(joined: Joined, local: bool) -> None:
    ranks = joined(3, local=local)
    count = 3000
    heard: dict[int, list[tuple[int, Message]]] = {1: [], 2: []}
    done = {1: threading.Event(), 2: threading.Event()}

    def sent(sequence: int) -> Message:
        if sequence % 3 == 0:
            return Credit(plan=1, register=sequence)
        payload = (b"p" * (sequence % 50), b"") if sequence % 3 == 1 else None
        nbytes = sequence if payload is None else sequence % 50
        return Ready(plan=1, register=7, sequence=sequence, nbytes=nbytes, payload=payload)

    def talk(cluster: Cluster) -> None:
        if cluster.rank == 0:
            return

        def on_message(peer: int, message: Message) -> None:
            heard[cluster.rank].append((peer, message))
            if len(heard[cluster.rank]) == count:
                done[cluster.rank].set()

        hear(cluster, on_message)
        cluster.connect([3 - cluster.rank])
        assert cluster.local_peers == ({3 - cluster.rank} if local else set())
        for sequence in range(count):
            cluster.send(3 - cluster.rank, sent(sequence))
        assert done[cluster.rank].wait(LIMIT)

    assert ranks.each(talk) == [None] * 3
    for rank in (1, 2):
        assert heard[rank] == [(3 - rank, sent(sequence)) for sequence in range(count)]


def test_messages_that_come_before_the_callback_are_kept(joined: Joined) -> None:
    ranks = joined(2)
    one, two = ranks.clusters
    one.send(1, Credit(1, 1))
    two.serve(Word, lambda _: [b""])
    one.pull(1, Word(""))
    heard: list[Message] = []
    both = threading.Event()
    two.on_message(lambda peer, message: (heard.append(message), len(heard) == 2 and both.set()))
    one.send(1, Credit(1, 2))
    assert both.wait(LIMIT)
    assert heard == [Credit(1, 1), Credit(1, 2)]


@pytest.mark.parametrize("local", [True, False])
def test_many_threads_may_send_at_once(joined: Joined, local: bool) -> None:
    ranks = joined(2, local=local)
    one, two = ranks.clusters
    assert ranks.apart(lambda: one.connect([1]), lambda: two.connect([0])) == [None, None]
    heard: list[Credit] = []
    done = threading.Event()
    hear(two, lambda peer, message: (heard.append(message), len(heard) == 4000 and done.set()))
    senders = [lambda plan=plan: [one.send(1, Credit(plan, n)) for n in range(1000)] for plan in range(4)]
    ranks.apart(*senders)
    assert done.wait(LIMIT)
    for plan in range(4):
        assert [message.register for message in heard if message.plan == plan] == list(range(1000))


def test_a_message_to_a_rank_without_a_link_is_an_error(joined: Joined) -> None:
    ranks = joined(3)
    (e,) = ranks.apart(lambda: ranks.clusters[1].send(2, Credit(1, 1)))
    assert isinstance(e, ClusterError)
    assert "connect first" in str(e)


def test_links_between_all_ranks_close_without_a_failure(joined: Joined) -> None:
    ranks = joined(4)
    failures: list[object] = []
    for cluster in ranks.clusters:
        cluster.on_failure(failures.append)
    ranks.each(lambda cluster: cluster.connect(range(4)))
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 4
    assert not any(cluster._thread.is_alive() for cluster in ranks.clusters)
    assert failures == []


def test_twenty_megabytes_are_pulled_from_any_rank_by_any_other(joined: Joined) -> None:
    ranks = joined(3)

    def handler(asked: Word) -> Iterator[bytes]:
        for n in range(4):
            yield bytes([n]) * 5_000_000
        yield asked.word.encode()

    for cluster in ranks.clusters:
        cluster.serve(Word, handler)
    whole = b"".join(bytes([n]) * 5_000_000 for n in range(4)) + b"weights"
    pulls = ranks.each(lambda cluster: cluster.pull((cluster.rank + 1) % 3, Word("weights")) == whole)
    assert pulls == [True] * 3


def test_an_error_of_the_serving_rank_travels_as_text(joined: Joined) -> None:
    ranks = joined(2)

    def handler(asked: Word) -> Iterator[bytes]:
        yield b"something"
        raise KeyError(f"no variable {asked.word}")

    ranks.clusters[1].serve(Word, handler)
    (e,) = ranks.apart(lambda: ranks.clusters[0].pull(1, Word("w")))
    assert isinstance(e, ClusterError)
    assert "rank 1 could not serve Word(word='w')" in str(e)
    assert "no variable w" in str(e)
    (e,) = ranks.apart(lambda: ranks.clusters[1].pull(0, Word("w")))
    assert "Word was asked for, which is not served here, or not yet" in str(e)


def serving() -> int:
    """How many threads of this process answer pulls, or have."""
    return sum(one.name.startswith("actorflow-serve") for one in threading.enumerate())


def ask(cluster: Cluster, word: str) -> Future[bytes]:
    """Have a rank pull something from rank 0 which need not come, and hang up when it is cancelled."""
    plane = cluster._control_plane

    async def call() -> bytes:
        channel = await plane._channel(0, plane.tickets[0].address)
        return await plane.pulls.pull(channel, plane._metadata(), Word(word))

    return asyncio.run_coroutine_threadsafe(call(), cluster._loop)


def test_pulls_that_wait_for_a_script_hold_no_thread_and_are_not_without_end(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "MOST", 6)
    ranks = joined(3)
    master, bad, good = ranks.clusters
    waits: SimpleQueue[Future[None]] = SimpleQueue()

    def when(asked: Word) -> Future[None]:
        future: Future[None] = Future()
        if asked.word == "never":
            waits.put(future)
        else:
            future.set_result(None)
        return future

    master.serve(Word, lambda asked: [asked.word.encode()], when)
    threads = serving()
    asking = [ask(bad, "never") for _ in range(6)]
    there = [waits.get(timeout=LIMIT) for _ in range(6)]
    assert serving() == threads
    with pytest.raises(ClusterError, match=r"too much\).* 7 pulls of rank 1 at a time; expected at most 6"):
        bad.pull(0, Word("now"))
    assert good.pull(0, Word("now")) == b"now"
    gone = [threading.Event() for _ in there]
    for future, event in zip(there, gone, strict=True):
        future.add_done_callback(lambda _, event=event: event.set())
    asking[0].cancel()
    while not any(event.wait(0.01) for event in gone):
        pass
    assert sum(future.cancelled() for future in there) == 1
    assert bad.pull(0, Word("now")) == b"now"
    for future in there:
        if not future.cancelled():
            future.set_result(None)
    assert [one.result(LIMIT) for one in asking[1:]] == [b"never"] * 5


def test_answers_that_block_for_one_rank_keep_no_other_from_being_served(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it awaits them no longer, and asks again."""
    monkeypatch.setattr(pull, "TURNS", 2)
    ranks = joined(3)
    master, bad, good = ranks.clusters
    blocked: list[Word] = []
    release, pause = threading.Event(), threading.Event()

    def handler(asked: Word) -> Iterator[bytes]:
        if asked.word == "block":
            blocked.append(asked)
            assert release.wait(LIMIT)
        return iter([asked.word.encode()])

    master.serve(Word, handler)

    def until_under_way(count: int) -> None:
        while master._control_plane.pulls._desks[1].under_way != count:
            pause.wait(0.01)

    for _ in range(2):
        asking = [ask(bad, "block") for _ in range(12)]
        until_under_way(12)
        assert good.pull(0, Word("now")) == b"now"
        assert len(blocked) == 2
        for one in asking:
            one.cancel()
        until_under_way(0)
    release.set()
    assert bad.pull(0, Word("now")) == b"now"


@pytest.mark.parametrize("character", ["x", "漢", "😀", "\udc80"], ids=ascii)
def test_an_error_that_is_too_long_to_travel_arrives_shortened(joined: Joined, character: str) -> None:
    ranks = joined(2)

    def handler(asked: Word) -> Iterator[bytes]:
        raise KeyError(f"no variable {character * 100_000}")

    ranks.clusters[1].serve(Word, handler)
    (e,) = ranks.apart(lambda: ranks.clusters[0].pull(1, Word("w")))
    assert isinstance(e, ClusterError)
    assert "rank 1 could not serve Word(word='w'): KeyError: 'no variable" in str(e)
    assert len(str(e)) > 300


def test_a_pull_that_blocks_is_woken_by_a_failure(joined: Joined) -> None:
    ranks = joined(2)
    one, two = ranks.clusters
    asked, never = threading.Event(), threading.Event()

    def handler(_: Word) -> list[bytes]:
        asked.set()
        never.wait(LIMIT)
        return []

    two.serve(Word, handler)

    def abort() -> None:
        asked.wait(LIMIT)
        two.abort("raised", "raised ValueError: boom")

    e, _ = ranks.apart(lambda: one.pull(1, Word("w")), abort)
    never.set()
    assert isinstance(e, ClusterError)
    assert "raised ValueError: boom" in str(e)


def test_alone_everything_answers_at_once() -> None:
    alone = Alone()
    gone: list[int] = []
    alone.on_call_agreed(lambda call, _: gone.append(call))
    alone.announce_call(0, "d", "step()")
    alone.serve(Word, lambda asked: [asked.word.encode()])
    assert (gone, alone.gather("x", b"a"), alone.scatter("x", [b"b"])) == ([0], [b"a"], b"b")
    assert alone.pull(0, Word("k")) == b"k"
    alone.goodbye()


def test_a_pretended_cluster_takes_all_ranks_to_do_the_same() -> None:
    assert Alone(Settings(world=4, pretend=True)).gather("x", b"a") == [b"a"] * 4
