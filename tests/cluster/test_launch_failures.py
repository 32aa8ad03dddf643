"""Whole runs through the real launcher in which something goes wrong: they end soon, say why, and leave nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import warm
from actorflow.rendezvous.settings import Settings
from cluster.ranks import LIMIT, SOON, Ranks, free_port
from cluster.runs import Run

Start = Callable[..., Run]

# every rank says that it is up and waits: rank 0 for all others, the others for ever
WAIT = """
import os, pathlib, sys, threading
from actorflow.control.cluster import current

cluster = current()
pathlib.Path(sys.argv[1], f"up{cluster.rank}.part").write_text(str(os.getpid()))
os.rename(f"{sys.argv[1]}/up{cluster.rank}.part", f"{sys.argv[1]}/up{cluster.rank}")
cluster.goodbye() if cluster.rank == 0 else threading.Event().wait()
"""

# the signal comes to rank 1 alone, as it comes to one rank sooner than to another
HEARS = """
import os, signal
from actorflow.control.cluster import current

cluster = current()
if cluster.rank == 1:
    os.kill(os.getpid(), signal.SIGINT)
cluster.gather("all", b"")
"""

RAISE = """
from actorflow.control.cluster import current

def train(rank):
    if rank == 1:
        raise ValueError("no such file")  # here

train(current().rank)
current().gather("losses", b"")
"""


# rank 0 does not notice the end of a peer, as none does that has not joined yet
DEAF = """
import os
from actorflow.control.cluster import current

async def deaf(peer):
    pass

cluster = current()
if cluster.rank == 0:
    cluster._control_plane._lost = deaf
cluster.gather("all", b"")
cluster.scatter("all", [b"", b""] if cluster.rank == 0 else None)
if cluster.rank == 1:
    os._exit(7)
cluster.gather("never", b"")
"""


def pids_of_ranks(run: Run, folder: Path, count: int) -> list[int]:
    """Wait until all ranks are up."""
    return [int(pid) for pid in run.wait_for([folder / f"up{rank}" for rank in range(count)])]


def ends_within(run: Run, seconds: float) -> int:
    """The exit status; fails where the run takes longer, or leaves a process."""
    start = time.monotonic()
    status = run.wait()
    assert time.monotonic() - start < seconds, run.output
    assert run.ranks_left() == []
    return status


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])  # test_launch_local.py kills it
@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        # which a test of pauses does while ranks train
        pytest.param(signal.SIGSTOP, "stopped answering", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_run_soon(
    start: Start, tmp_path: Path, number: signal.Signals, cause: str, rank: int
) -> None:
    run = start(WAIT, "--devices", "2", "--lost-after", "6", "--", str(tmp_path))
    pids = pids_of_ranks(run, tmp_path, 2)
    os.kill(pids[rank], number)
    assert ends_within(run, SOON if number == signal.SIGKILL else SOON + 6) == 1
    assert re.search(
        rf"actorflow: rank {rank} \(\S+, pid {pids[rank]}\) {cause}; noticed by rank {1 - rank}", run.output
    )
    assert str(tmp_path / "logs0") in run.output
    if rank == 1:
        assert "ClusterError: the run ended because rank 1" in run.output  # at the line where rank 0 waited


def test_a_script_that_raises_on_one_rank_shows_its_line(start: Start, tmp_path: Path) -> None:
    run = start(RAISE, "--devices", "2", python=warm.python())
    assert ends_within(run, LIMIT) == 1
    assert "raised ValueError: no such file (script.py:8: train(current().rank))" not in run.output
    assert re.search(
        r"rank 1 \(\S+, pid \d+\) raised ValueError: no such file \(script.py:6: raise ValueError", run.output
    )
    traceback = (tmp_path / "logs0/rank1.stderr.log").read_text()
    assert traceback.startswith("Traceback (most recent call last):\n  File")
    assert "runpy" not in traceback
    assert "no such file" in (tmp_path / "logs0/rank1.error.json").read_text()


def test_ranks_that_are_told_to_end_hear_from_the_launcher_why_where_nobody_else_tells_them(
    start: Start,
) -> None:
    run = start(DEAF, "--devices", "2", python=warm.python())
    assert ends_within(run, LIMIT) == 1
    said = r"actorflow: rank 1 \(\S+, pid \d+\) ended with exit status 7; noticed by its launcher"
    assert re.search(said, run.output)
    assert "ClusterError: the run ended because rank 1" in run.output
    assert "SIGTERM" not in run.output


@pytest.mark.slow
def test_a_killed_launcher_takes_its_ranks_along(start: Start, tmp_path: Path) -> None:
    run = start(WAIT, "--devices", "2", "--", str(tmp_path))
    pids_of_ranks(run, tmp_path, 2)
    run.process.kill()
    run.wait()
    deadline = time.monotonic() + SOON
    while run.ranks_left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert run.ranks_left() == []


def test_ctrl_c_ends_the_run_quietly(start: Start, tmp_path: Path) -> None:
    run = start(WAIT, "--devices", "2", "--", str(tmp_path), python=warm.python())
    pids_of_ranks(run, tmp_path, 2)
    run.process.send_signal(signal.SIGINT)
    assert ends_within(run, SOON) == 130
    assert "Traceback" not in run.output


def test_a_rank_that_hears_of_ctrl_c_before_it_is_interrupted_itself_ends_as_quietly(start: Start) -> None:
    run = start(HEARS, "--devices", "2", python=warm.python())
    assert ends_within(run, LIMIT) == 130
    assert "was interrupted (Ctrl-C)" in run.output
    assert "Traceback" not in run.output
    assert "ClusterError" not in run.output


def test_different_arguments_on_two_nodes_are_shown_on_both(start: Start) -> None:
    node = ("--insecure", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    options = [("--node-rank", str(n), "--", "--lr", f"0.{n}") for n in (0, 1)]
    runs = [start("pass", *node, *of, python=warm.python()) for of in options]
    assert [run.wait() for run in runs] == [1, 1]
    assert runs[0].ranks_left() == []  # of both: it is one script
    for run in runs:
        assert re.search(
            r"arguments of the script:\n +rank 0 \(node 0, .*\): --lr 0.0\n +rank 1 .*: --lr 0.1", run.output
        )


def test_a_missing_node_is_named_after_the_join_timeout(start: Start) -> None:
    node = ("--insecure", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    # one device: a second one of this node would have to join within that time
    run = start("pass", *node, "--devices", "1", "--join-timeout", "2", python=warm.python())
    assert ends_within(run, LIMIT) == 1
    assert "rank 1 (node 1) did not join within 2 s" in run.output


def test_a_wrong_token_is_told_on_the_node_that_has_it(start: Start, ranks: Ranks) -> None:
    port = free_port()
    master = ranks.make(
        Settings(world=2, nnodes=2, master_port=port, token="secret", join_timeout=LIMIT, script=__file__)
    )
    master.begin()
    node = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
    run = start("pass", *node, env={"ACTORFLOW_TOKEN": "guess"}, python=warm.python())
    assert ends_within(run, LIMIT) == 1
    assert "turned rank 1 away: their tokens differ" in run.output
    assert master.failure is None


def test_a_port_in_use_is_named_with_its_option(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = start("pass", "--devices", "2", "--ctrl-port", str(port), python=warm.python())
        assert ends_within(run, LIMIT) == 1
    assert f"Port {port} on 127.0.0.1 is in use: " in run.output
    assert f"(pid {os.getpid()}) listens there" in run.output
    assert "--ctrl-port" in run.output
