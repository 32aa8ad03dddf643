"""Gathers, scatters, calls and the end of scripts, over real links."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from actorflow.control import step_agreement
from actorflow.control.cluster import Cluster
from actorflow.control.drops import DropSet
from actorflow.rendezvous.failure import Failure
from actorflow_compiler.core.errors import CallError, ClusterError
from cluster.ranks import LIMIT, Ranks, Word

Joined = Callable[[int], Ranks]


def test_a_gather_brings_every_payload_to_the_master(joined: Joined) -> None:
    ranks = joined(3)
    results = ranks.each(lambda cluster: cluster.gather("names", b"rank %d" % cluster.rank))
    assert results == [[b"rank 0", b"rank 1", b"rank 2"], None, None]


def test_a_scatter_gives_each_rank_its_payload_however_large(joined: Joined) -> None:
    ranks = joined(3)
    payloads = [b"", b"x" * 5_000_001, b"y" * (1 << 20)]
    assert ranks.each(lambda c: c.scatter("plans", payloads if c.rank == 0 else None)) == payloads


def test_ranks_are_told_of_a_call_only_when_all_have_made_it(joined: Joined) -> None:
    ranks = joined(2)
    gone: list[list[int]] = [[], []]  # the calls up to which all have made all, as each rank was told
    all_gone = [threading.Event(), threading.Event()]

    def hear(cluster: Cluster) -> None:
        def on_go(call: int, _: DropSet) -> None:
            gone[cluster.rank].append(call)
            if call == 2:
                all_gone[cluster.rank].set()

        cluster.on_call_agreed(on_go)

    ranks.each(hear)
    first, second = ranks.clusters
    for call in range(3):
        first.announce_call(call, "d", "step()")
    for cluster in ranks.clusters:
        cluster.serve(Word, lambda asked: [asked.word.encode()])
    assert second.pull(0, Word("round")) + first.pull(1, Word("trip")) == b"roundtrip"  # so the calls have arrived
    assert gone == [[], []]
    for call in range(3):
        second.announce_call(call, "d", "step()")
    assert all(event.wait(LIMIT) for event in all_gone)
    assert gone[0] == gone[1] == sorted(gone[0])
    assert gone[0][-1] == 2


@pytest.mark.parametrize("world", [2, 5])
def test_the_master_hears_of_many_calls_at_once_however_many_ranks_there_are(
    joined: Joined, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr(step_agreement, "SPACING", LIMIT)  # no time of its own comes for a rank to tell of its steps
    ranks = joined(world)
    heard: list[str] = []
    known = [threading.Event() for _ in range(world)]

    def hear(cluster: Cluster) -> None:
        plane = cluster._control_plane
        for kind, handle in plane._items.items() if cluster.rank == 0 else ():
            plane._items[kind] = lambda link, item, kind=kind, handle=handle: (heard.append(kind), handle(link, item))
        cluster.on_call_agreed(lambda call, _: known[cluster.rank].set() if call == 499 else None)

    ranks.each(hear)
    ranks.each(lambda cluster: [cluster.announce_call(call, "d", "step()") for call in range(500)])
    assert "steps" not in heard
    ranks.clusters[-1].want_agreement()
    assert all(event.wait(LIMIT) for event in known)
    assert heard.count("steps") == world - 1
    assert set(heard) <= {"steps", "beat"}


def test_a_rank_that_wants_to_know_makes_slow_ranks_tell_what_they_do_at_once(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that do so only after they were asked, one step after the other."""
    monkeypatch.setattr(step_agreement, "SPACING", 2 * LIMIT)
    ranks = joined(3)
    hurried: list[SimpleQueue[int]] = [SimpleQueue() for _ in range(3)]  # the steps that each rank was asked for
    known: list[SimpleQueue[int]] = [SimpleQueue() for _ in range(3)]  # the calls that each rank was told of

    def hear(cluster: Cluster) -> None:
        steps, rank = cluster._control_plane.steps, cluster.rank
        hurry = steps.hurry_up
        monkeypatch.setattr(steps, "hurry_up", lambda steps: (hurry(steps), hurried[rank].put(steps)))
        cluster.on_call_agreed(lambda call, _: known[rank].put(call))

    ranks.each(hear)
    asking, *slow = (ranks.clusters[rank] for rank in (1, 0, 2))
    for first in (0, 2):
        for call in (first, first + 1):
            asking.announce_call(call, "d", "step()")
        asking.want_agreement()
        assert [hurried[cluster.rank].get(timeout=LIMIT) for cluster in slow] == [first + 2] * 2
        for call in (first, first + 1):
            for cluster in slow:
                assert all(one.empty() for one in known)
                cluster.announce_call(call, "d", "step()")
            assert [one.get(timeout=LIMIT) for one in known] == [call] * 3


def test_a_gather_does_not_end_where_ranks_have_made_other_calls_before(joined: Joined) -> None:
    ranks = joined(3)

    def work(cluster: Cluster) -> object:
        for call in range(5):
            cluster.announce_call(call, str(cluster.rank == 1 and call == 3), f"step({cluster.rank})")
        return cluster.scatter("it is whole", cluster.gather("a checkpoint", b""))

    results = ranks.each(work)
    assert [type(e) for e in results] == [CallError] * 3
    for e in results:
        assert "made call 4: step(1)" in str(e)


def test_a_differing_call_ends_every_rank_with_both_texts(joined: Joined) -> None:
    ranks = joined(3)
    told: list[SimpleQueue[Failure]] = [SimpleQueue() for _ in ranks.clusters]
    for cluster in ranks.clusters:
        cluster.on_failure(told[cluster.rank].put)

    def work(cluster: Cluster) -> None:
        cluster.announce_call(0, str(cluster.rank == 2), f"train_step(f32[{8 - cluster.rank // 2}, 4])")
        cluster.gather("after", b"")
        cluster.goodbye()

    results = ranks.each(work)
    assert [type(e) for e in results] == [CallError] * 3
    for part in ("train_step(f32[8, 4])", "train_step(f32[7, 4])", "rank 2 made call 1"):
        assert part in str(results[1])
    blamed = {one.get(timeout=LIMIT).rank for one in told}  # perhaps after a script's call has raised
    assert len(blamed) == 1  # whichever of those that differ is heard of last
    assert all(one.empty() for one in told)


def test_a_script_that_ends_while_others_call_ends_every_rank(joined: Joined) -> None:
    ranks = joined(2)

    def work(cluster: Cluster) -> None:
        cluster.announce_call(0, "d", "step()")
        if cluster.rank == 0:
            cluster.announce_call(1, "d", "step()")
            cluster.gather("results", b"")
        cluster.goodbye()

    results = ranks.each(work)
    assert [type(e) for e in results] == [CallError, CallError]
    assert "rank 1 came to the end of its script after 1 call" in str(results[0])
    assert "rank 0 made call 2: step()" in str(results[0])


def test_steps_in_another_order_are_an_error_not_a_hang(joined: Joined) -> None:
    ranks = joined(2)
    one, two = ranks.clusters
    results = ranks.apart(lambda: one.gather("a", b""), lambda: two.scatter("b", None))
    assert [type(e) for e in results] == [CallError, CallError]
    assert "gather 'a'" in str(results[1])
    assert "scatter 'b'" in str(results[1])


def test_a_rank_that_has_said_goodbye_serves_until_all_have(joined: Joined) -> None:
    ranks = joined(2)
    one, two = ranks.clusters
    two.serve(Word, lambda asked: [b"state of ", asked.word.encode()])

    def pull_then_leave() -> bytes:
        state = one.pull(1, Word("weights"))
        one.goodbye()
        return state

    assert ranks.apart(pull_then_leave, two.goodbye) == [b"state of weights", None]


def test_an_abort_wakes_every_waiter_and_ends_every_process(joined: Joined) -> None:
    ranks = joined(3)
    first, second, third = ranks.clusters
    aborted = threading.Event()

    def abort() -> None:
        second.abort("raised", "raised ValueError: boom (train.py:12: x = y)")
        aborted.set()
        second.end()

    results = ranks.apart(first.goodbye, abort, third.goodbye)
    assert aborted.is_set()
    for e in (results[0], results[2]):
        assert isinstance(e, ClusterError)
        assert "rank 1 (" in str(e)
        assert "raised ValueError: boom (train.py:12: x = y)" in str(e)
    for cluster in (first, third):
        cluster.end(3)
    assert ranks.exits == {0: [3], 1: [1], 2: [3]}


def test_a_main_thread_that_never_wakes_does_not_keep_its_process_alive(joined: Joined) -> None:
    ranks = joined(2)
    ranks.clusters[1].abort("raised", "raised ValueError: boom")
    assert ranks.clusters[0].failed.wait(LIMIT)
    ranks.clusters[0]._ending.wait()  # nobody releases it: the main thread is stuck
    assert ranks.exits[0] == [1]


def test_an_error_that_a_lost_rank_caused_is_explained_by_it(joined: Joined) -> None:
    ranks = joined(2)
    one, two = ranks.clusters
    broken = ValueError("an actor failed")
    broken.__cause__ = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4242")
    explained, _ = ranks.apart(lambda: one.explain(broken), lambda: two.abort("killed", "was killed"))
    assert isinstance(explained, ClusterError)
    assert "rank 1" in str(explained)


def test_an_error_of_ones_own_is_not_explained_away(joined: Joined) -> None:
    ranks = joined(2)
    error = ValueError("shapes do not match")
    assert ranks.clusters[0].explain(error) is error


def test_what_ends_with_the_run_ends_when_all_have_said_goodbye(joined: Joined) -> None:
    ranks = joined(2)
    heard: list[bool] = []
    last = threading.Event()

    def leave(cluster: Cluster) -> None:
        cluster.on_end(lambda: heard.append(last.is_set()))
        if cluster.rank:
            last.set()
        cluster.goodbye()

    assert ranks.each(leave) == [None, None]
    assert heard == [True, True]
