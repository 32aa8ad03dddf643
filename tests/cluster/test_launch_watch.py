"""The launcher's watch over processes that stand for ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from actorflow.launch import watch as watching
from actorflow.launch.watch import RankWatch
from actorflow.rendezvous.failure import LAUNCHER, Failure
from actorflow.rendezvous.reports import RankFinished, RankStarted, report_to_launcher
from cluster.ranks import LIMIT

Spawn = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankWatch]:
    monkeypatch.setattr(watching, "GRACE", 0.2)
    monkeypatch.setattr(watching, "STOPPED", 0.2)
    monkeypatch.setattr(watching, "TICK", 0.05)
    made = RankWatch()
    made.start()
    yield made
    if made._thread.is_alive():
        made.close()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(["sleep", str(2 * LIMIT)], start_new_session=True))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()


def test_ranks_that_finish_are_left_alone(watch: RankWatch, spawn: Spawn) -> None:
    ranks = [spawn(), spawn()]
    for rank, process in enumerate(ranks):
        report_to_launcher(watch.address, RankStarted(rank, process.pid))
        report_to_launcher(watch.address, RankFinished(rank))
    ranks[0].terminate()
    ranks[0].wait()
    time.sleep(0.4)  # longer than the grace
    assert ranks[1].poll() is None
    found = watch.close()
    assert (found.deaths, found.failures, found.killed) == ([], [], set())
    assert found.started == {0: ranks[0].pid, 1: ranks[1].pid}


def test_a_rank_that_dies_unasked_ends_the_others_after_a_grace(watch: RankWatch, spawn: Spawn) -> None:
    ranks = [spawn(), spawn()]
    for rank, process in enumerate(ranks):
        report_to_launcher(watch.address, RankStarted(rank, process.pid))
    ranks[1].kill()
    assert ranks[0].wait(LIMIT) == -signal.SIGKILL
    found = watch.close()
    assert found.deaths == [(1, ranks[1].pid)]
    assert found.killed == {0}


def test_a_stopped_rank_is_lost_even_where_no_peer_is_left_to_notice(watch: RankWatch, spawn: Spawn) -> None:
    process = spawn()
    report_to_launcher(watch.address, RankStarted(5, process.pid))
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(LIMIT) == -signal.SIGKILL
    found = watch.close()
    (failure,) = found.failures
    assert (failure.rank, failure.kind, failure.noticed_by) == (5, "stopped", LAUNCHER)
    assert failure.text.endswith("stopped answering; noticed by its launcher")


def test_a_rank_that_its_peers_got_no_answer_from_is_killed_at_once(watch: RankWatch, spawn: Spawn) -> None:
    process = spawn()
    report_to_launcher(watch.address, RankStarted(1, process.pid))
    told = Failure(1, "here", process.pid, "stopped", "stopped answering", noticed_by=0)
    report_to_launcher(watch.address, told)
    assert process.wait(LIMIT) == -signal.SIGKILL
    found = watch.close()
    assert found.failures == [told]
    assert found.deaths == []


def test_a_launcher_that_is_gone_does_not_disturb_its_ranks(tmp_path: os.PathLike[str]) -> None:
    report_to_launcher(f"{tmp_path}/nobody", RankFinished(0))
    report_to_launcher("", RankFinished(0))
