"""How a rank ends its run, and how a process whose run has failed ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from actorflow.control import cluster as clusters
from actorflow.control.cluster import Cluster
from actorflow.launch import entry
from actorflow.launch.watch import RankWatch
from actorflow.rendezvous import failure as failures
from actorflow.rendezvous.failure import Failure, FailureKind
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError
from cluster.ranks import LIMIT, Ranks, until

Joined = Callable[..., Ranks]
BOOM = "raised ValueError: boom (train.py:12)"


def test_an_abort_is_the_failure_of_every_rank_by_the_time_that_it_returns_here(joined: Joined) -> None:
    ranks = joined(3)
    heard: list[tuple[int, Failure]] = []
    for cluster in ranks.clusters:
        cluster.on_failure(lambda failure, rank=cluster.rank: heard.append((rank, failure)))
    second = ranks.clusters[1]
    second.abort(FailureKind.RAISED, BOOM)
    assert second.failed.is_set()
    for cluster in ranks.clusters:
        assert cluster.failed.wait(LIMIT)
        cluster._ending.wait()
    assert sorted(rank for rank, _ in heard) == [0, 1, 2]
    assert {(f.rank, f.kind, f.cause, f.noticed_by) for _, f in heard} == {(1, "raised", BOOM, 1)}


def test_the_first_of_several_aborts_is_what_everybody_is_told(joined: Joined) -> None:
    ranks = joined(2)
    one, two = ranks.clusters
    two.abort(FailureKind.RAISED, BOOM)
    two.abort(FailureKind.ENDED, "was told to end")
    assert one.failed.wait(LIMIT)
    one.abort(FailureKind.RAISED, "raised RuntimeError: what came of it")
    for cluster in ranks.clusters:
        found = cluster.failure
        assert found is not None
        assert (found.rank, found.cause) == (1, BOOM)
        with pytest.raises(ClusterError, match="boom"):
            cluster.gather("next", b"")


def test_an_abort_tells_the_launcher_of_each_rank_once(joined: Joined) -> None:
    watch = RankWatch()
    ranks = joined(2, launcher=watch.address)
    watch.start()
    ranks.clusters[1].abort(FailureKind.RAISED, BOOM)
    for cluster in ranks.clusters:
        assert cluster.failed.wait(LIMIT)
    found = watch.close().failures
    assert [(one.rank, one.cause) for one in found] == [(1, BOOM)] * 2, "each rank tells its launcher what it knows"


def test_an_abort_of_a_rank_that_has_left_or_never_came_waits_for_nobody(
    joined: Joined, ranks: Ranks, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "NEWS", 2 * LIMIT)
    left = joined(2)
    assert left.each(lambda cluster: cluster.goodbye()) == [None, None]
    left.clusters[0].abort(FailureKind.RAISED, BOOM)
    ranks.make(settings(1, 2)).abort(FailureKind.JOIN, "nobody was there")
    assert ranks.exits[1] == []


def test_an_abort_before_the_thread_of_the_links_runs_ends_the_rank_as_soon_as_it_does(
    ranks: Ranks, settings: Callable[..., Settings]
) -> None:
    cluster = ranks.make(settings(0, 2))
    cluster.abort(FailureKind.RAISED, BOOM)
    (error,) = ranks.each(lambda cluster: cluster.join())
    assert isinstance(error, ClusterError)
    assert BOOM in str(error)
    assert cluster.failed.is_set()


def test_a_process_that_awaits_its_end_goes_no_further_before_it(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "CALLBACK_SECONDS", LIMIT)  # which a busy machine takes to let the other rank end
    ranks = joined(2)
    one, two = ranks.clusters
    written: list[str] = []
    may = threading.Event()

    def last() -> None:
        may.wait(LIMIT)
        written.append("trace")

    one.at_failure(last)
    came: dict[int, list[object]] = {}

    def wait(cluster: Cluster) -> None:
        cluster.await_end()
        came[cluster.rank] = [*ranks.exits[cluster.rank], *written]

    waiting = threading.Thread(target=wait, args=(one,), daemon=True)
    waiting.start()  # before there is any news
    two.abort(FailureKind.RAISED, BOOM)
    wait(two)
    assert came[1][0] == 1
    assert 0 not in came
    may.set()
    waiting.join(LIMIT)
    assert came[0] == [1, "trace"], "the script went on while its process was ending"


def test_a_process_that_awaits_an_end_which_does_not_come_goes_on_after_a_while(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "NEWS", 0.1)
    (one, _) = joined(2).clusters
    one.await_end()
    assert not one.failed.is_set()
    assert one.failure is None


def test_what_releases_the_end_gives_the_status_with_which_the_process_ends(joined: Joined) -> None:
    ranks = joined(2)
    two = ranks.clusters[1]
    two.abort(FailureKind.ENDED, "was told to end (SIGTERM)")
    two.end(143)
    two.await_end()
    assert ranks.exits[1] == [143]


def test_a_process_that_has_just_heard_of_a_failure_does_not_go_before_it_has_begun_to_end(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = joined(2)
    one, two = ranks.clusters
    goes_on = threading.Event()
    begin = one._control_plane._on_failure
    monkeypatch.setattr(one._control_plane, "_on_failure", lambda failure: (goes_on.wait(LIMIT), begin(failure)))
    written = []
    one.at_failure(lambda: written.append("trace"))
    two.abort(FailureKind.ENDED, "was interrupted (Ctrl-C)")
    until(lambda: one.failure is not None)
    main = threading.Thread(target=entry._end, args=(one, 130))
    main.start()
    goes_on.set()
    main.join(LIMIT)
    assert ranks.exits[0] == [130]
    assert written == ["trace"]
