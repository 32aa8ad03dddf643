"""The launcher's watch over processes that stand for ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from actorflow.launch import standstill
from actorflow.launch import watch as watching
from actorflow.launch.attempt import _first_failure
from actorflow.launch.rank_processes import RankProcess
from actorflow.launch.watch import RankWatch, WatchFindings
from actorflow.rendezvous.failure import LAUNCHER, LOST, Failure, FailureKind
from actorflow.rendezvous.reports import RankFinished, RankSilence, RankStarted, report_to_launcher
from cluster.ranks import LIMIT, until

Spawn = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankWatch]:
    monkeypatch.setattr(watching, "GRACE", 0.2)
    monkeypatch.setattr(watching, "LATER", 0.1)
    monkeypatch.setattr(watching, "TICK", 0.05)
    made = RankWatch(limit=0.2)
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


def as_rank(process: subprocess.Popen[bytes]) -> RankProcess:
    """As the launcher has it."""
    return RankProcess(process.pid, process.poll)


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


@pytest.mark.parametrize("how", ["stopped", "waits for what does not come"])
def test_a_rank_that_stands_before_it_says_that_it_has_started_is_lost(
    how: str, watch: RankWatch, spawn: Spawn
) -> None:
    process = spawn()
    watch.expect({3: as_rank(process)})
    if how == "stopped":
        os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(LIMIT) == -signal.SIGKILL
    (failure,) = watch.close().failures
    assert (failure.rank, failure.pid, failure.kind) == (3, process.pid, "stopped")
    assert failure.text.endswith("stopped answering before it had begun; noticed by its launcher")


def test_a_rank_that_runs_or_has_said_that_it_has_started_may_take_its_time(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is turned on here, since a busy machine gives a core to each process when it can."""
    now = [100.0]
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = RankWatch(limit=1.0)
    busy = subprocess.Popen([sys.executable, "-IS", "-c", "while True: pass"], start_new_session=True)
    begun, stub, other, stands = (spawn() for _ in range(4))  # rank 2, whose process is the other, has a stub
    try:
        report_to_launcher(watch.address, RankStarted(1, begun.pid))
        watch._read_reports()
        watch.expect({0: as_rank(busy), 1: as_rank(begun), 2: as_rank(stub), 3: as_rank(stands)})
        for look in range(20):  # half a second each, for more than limit and ``LATER``
            watch._take_expected()
            if look == 2:
                report_to_launcher(watch.address, RankStarted(2, other.pid))
                watch._read_reports()
            watch._check_stopped()
            now[0] += watching.TICK
            switches = standstill._switches(busy.pid)
            until(lambda switches=switches: standstill._switches(busy.pid) != switches)
        assert [(failure.rank, failure.kind) for failure in watch.findings.failures] == [(3, "stopped")]
        assert stands.wait(LIMIT) == -signal.SIGKILL
        assert [one.poll() for one in (busy, begun, stub, other)] == [None] * 4
    finally:
        busy.kill()
        busy.wait()
        watch.start()
        watch.close()


def test_a_rank_that_ends_before_it_says_that_it_has_started_is_known_by_its_process(
    watch: RankWatch, spawn: Spawn
) -> None:
    ranks = [spawn(), spawn()]
    watch.expect({rank: as_rank(process) for rank, process in enumerate(ranks)})
    ranks[1].kill()
    assert ranks[0].wait(LIMIT) == -signal.SIGKILL
    assert (1, ranks[1].pid) in watch.close().deaths


def test_a_rank_that_says_itself_that_it_was_stopped_may_end_by_itself(
    watch: RankWatch, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "GRACE", LIMIT)
    process = spawn()
    report_to_launcher(watch.address, RankStarted(1, process.pid))
    told = Failure(1, "here", process.pid, "stopped", "was stopped for 9 s, and the run ended meanwhile", noticed_by=1)
    report_to_launcher(watch.address, told)
    while not watch.findings.failures:
        time.sleep(0.02)
    found = watch.close()
    assert (found.failures, found.killed) == ([told], set())


def test_a_rank_that_is_stopped_for_a_while_or_has_no_peers_is_left_alone(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "LATER", 0.0)
    monkeypatch.setattr(watching, "TICK", 0.05)
    for limit in (LIMIT, None):
        made = RankWatch(limit=limit)
        made.start()
        process = spawn()
        report_to_launcher(made.address, RankStarted(0, process.pid))
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.4)  # eight looks at it
        assert process.poll() is None
        assert made.close().failures == []


def test_what_several_ranks_say_of_a_silent_one_is_printed_once(
    watch: RankWatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = [("silent, says 1", False), ("silent, says 2", False), ("answers 1", True), ("answers 2", True)]
    for text, over in (*said, ("silent anew", False)):
        report_to_launcher(watch.address, RankSilence(0, text, over))
    report_to_launcher(watch.address, RankSilence(3, "answers, though nobody said that it did not", True))
    watch.close()
    assert capfd.readouterr().err.splitlines() == [
        "actorflow: silent, says 1",
        "actorflow: answers 1",
        "actorflow: silent anew",
    ]


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


LOST_RANK = Failure(1, "here", 7, FailureKind.KILLED, LOST[FailureKind.KILLED], 0)


@pytest.mark.parametrize(
    ("codes", "statuses", "cause"),
    [
        ({1: -signal.SIGKILL}, {0: -signal.SIGTERM, 1: -signal.SIGKILL}, "was killed by SIGKILL"),
        # the rank that has noticed it had ended before the launcher could have the status
        ({0: 1}, {0: 1, 1: -signal.SIGKILL}, "was killed by SIGKILL"),
        ({0: 1}, {0: 1, 1: -signal.SIGTERM}, LOST_RANK.cause),  # it was told to end
        ({0: 1}, {0: 1, 1: 0}, LOST_RANK.cause),
    ],
)
def test_of_a_rank_that_peers_have_lost_the_launcher_tells_how_it_ended(
    codes: dict[int, int], statuses: dict[int, int], cause: str
) -> None:
    found = _first_failure(WatchFindings([LOST_RANK], [(1, 7)]), codes, statuses)
    assert (found.rank, found.cause) == (1, cause)
