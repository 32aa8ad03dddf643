"""Hosts that fail while a run is under way: it ends everywhere, soon, with the cause; or goes on where it can."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from hosts.clusters import Cluster
from hosts.machines import Host, Running

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

LIMIT = 7.0  # seconds of silence after which a host is lost
SOON = LIMIT + 30.0  # seconds in which a run ends on all hosts that can see it; on an idle machine half of it

FAILURES: dict[str, tuple[Callable[[Host], None], Callable[[Host], None], str]] = {
    "killed": (lambda host: host.kill(), lambda host: None, "was killed or crashed|cannot be reached any more"),
    "paused": (lambda host: host.pause(), lambda host: host.resume(), "stopped answering"),
    "cut off": (lambda host: host.cut(), lambda host: host.heal(), "cannot be reached any more"),
}


def _under_way(cluster: Cluster, *arguments: str, limit: float = LIMIT) -> list[Running]:
    """A run on all hosts that has done some steps."""
    options = ("--lost-after", str(limit))
    runs = cluster.start("steps.py", *(arguments or ("1000000",)), options=options)
    runs[0].until("step 3, loss")
    return runs


def _ended(runs: list[Running], least: float) -> None:
    start = time.monotonic()
    Cluster.ended(runs, 1)
    assert least < time.monotonic() - start < SOON, "\n".join(one.output for one in runs)


@pytest.mark.parametrize("what", FAILURES)
def test_a_host_that_is_lost_ends_the_run_on_all_others(what: str, cluster: Cluster) -> None:
    lose, find, kind = FAILURES[what]
    *others, lost = cluster.hosts
    cluster.harmed(lost)
    *runs, last = _under_way(cluster)
    lose(lost)
    _ended(runs, 0.0 if what == "killed" else LIMIT - 1.0)  # a tick may have been counted before
    number = len(others)
    for one in runs:
        found = re.search(rf"actorflow: rank {number} \({lost.hostname}, pid \d+\) ({kind})", one.output)
        assert found is not None, one.output
    assert [command for host in others for command in host.left()] == []
    find(lost)
    assert last.wait() != 0  # what was lost has ended as well, when it could
    if what != "killed":
        assert "actorflow: rank " in last.output  # who it says it has lost
        assert lost.left() == []
        assert "step 4, loss" in cluster.run("steps.py", "4")  # what has come back serves the next run


@pytest.mark.parametrize("what", ["paused", "cut off"])
def test_a_host_that_comes_back_before_the_limit_is_named_and_the_run_goes_on(what: str, cluster: Cluster) -> None:
    lose, find, _ = FAILURES[what]
    lost = cluster.hosts[-1]
    cluster.harmed(lost)
    runs = _under_way(cluster, "600", limit=60.0)
    lose(lost)
    number = len(cluster.hosts) - 1
    runs[0].until(f"rank {number} ({lost.hostname}, pid ")
    find(lost)
    runs[0].until(f"rank {number} answers again after ")
    Cluster.ended(runs, 0)
    assert "step 600, loss" in runs[0].output
    assert runs[0].output.count("has not answered for ") == 1
    assert all("has not answered" not in one.output for one in runs[1:-1])


@pytest.mark.slow
def test_a_network_that_breaks_for_a_moment_ends_nothing(cluster: Cluster) -> None:
    lost = cluster.hosts[-1]
    cluster.harmed(lost)
    runs = _under_way(cluster, "600")
    lost.cut()
    time.sleep(0.7)  # the failure itself: nothing tells how long a cable is out
    lost.heal()
    assert all(one.process.poll() is None for one in runs)
    Cluster.ended(runs, 0)
    assert "step 600, loss" in runs[0].output


def test_what_all_ranks_printed_is_on_the_master_also_when_one_has_failed(cluster: Cluster) -> None:
    failing = len(cluster.hosts) - 1
    runs = cluster.start("steps.py", "1000000", str(failing))
    Cluster.ended(runs, 1)
    master, last = cluster.hosts[0], cluster.hosts[-1]
    for rank in range(1, len(cluster.hosts)):
        assert f"rank {rank} prints this to its output" in master.read(f"logs/rank{rank}.stdout.log")
        assert f"rank {rank} prints this to its errors" in master.read(f"logs/rank{rank}.stderr.log")
    errors = master.read(f"logs/rank{failing}.stderr.log")
    assert "ValueError: this rank has had enough" in errors
    assert errors == last.read(f"logs/rank{failing}.stderr.log")
    for one in (runs[0], runs[-1]):
        assert re.search(rf"rank {failing} \({last.hostname}, pid \d+\) raised ValueError: this rank", one.output)
    assert "the last lines of logs/rank" in runs[0].output
    assert "logs of all ranks are in logs" in runs[0].output
