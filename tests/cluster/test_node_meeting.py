"""Launchers of several nodes meet before each attempt: a run goes on with fewer nodes, and takes them in again."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import warm
from actorflow.cli import main
from actorflow.launch.node_assembly import NodeAssembly
from actorflow.launch.node_meeting import HostedMeeting, RemoteMeeting
from actorflow.rendezvous.roster import Ticket
from actorflow_compiler.core.errors import ClusterError
from cluster.ranks import LIMIT, free_port
from cluster.restarted_runs import SCRIPT, launched, losses
from cluster.runs import Run

OWN = Ticket(0, 0, 2, 1, "a", 1, "", "1.0", "3.11", "2.13", "train.py", "d1", (), lost_after=30.0)


class Hosted:
    """A meeting for up to two nodes on a free port, and what it says."""

    def __init__(self, least: int = 1) -> None:
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.port = free_port()
        self.meeting = HostedMeeting(
            OWN, NodeAssembly(OWN, least, 2, LIMIT, 1), ("127.0.0.1", self.port), "secret", lambda: 4242,
            self.waiting.put, self.lost.put, self.said.put,
        )  # fmt: skip

    def guest(self, token: str = "secret", **ticket: str) -> RemoteMeeting:
        own = replace(OWN, host="b", pid=2, **ticket)  # type: ignore[arg-type]
        return RemoteMeeting(own, None, f"127.0.0.1:{self.port}", token, LIMIT)


@contextmanager
def meeting(least: int = 1) -> Iterator[Hosted]:
    hosted = Hosted(least)
    try:
        yield hosted
    finally:
        hosted.meeting.leave(0, "")


def test_all_hear_their_numbers_and_the_port_and_of_the_end() -> None:
    with meeting() as here:
        there = here.guest()
        here.meeting.ready(False, 0, None)
        there.ready(False, 0, None)
        for one, node in ((here.meeting, 0), (there, 1)):
            attempt = one.next().attempt
            assert (attempt.number, attempt.node, attempt.nnodes, attempt.port) == (0, node, 2, 4242)
        here.meeting.leave(3, "because")
        over = there.next().over
        assert (over.status, over.text) == (3, "because")
        there.leave(0, "")


def test_a_launcher_with_another_token_is_turned_away_and_one_with_another_script_refused() -> None:
    with meeting() as here:
        here.meeting.ready(False, 0, None)
        stranger = here.guest(token="guess")
        stranger.ready(False, 0, None)
        with pytest.raises(ClusterError, match="turned this one away: their tokens differ"):
            stranger.next()
        other = here.guest(digest="d2")
        other.ready(False, 0, None)
        assert "the nodes do not agree on the script" in other.next().refused
        there = here.guest()
        there.ready(False, 0, None)
        assert here.meeting.next().attempt.nnodes == 2  # they harmed nobody


def test_a_launcher_that_is_gone_is_noticed_by_its_stream() -> None:
    with meeting() as here:
        there = here.guest()
        here.meeting.ready(False, 0, None)
        there.ready(False, 0, None)
        assert here.meeting.next().attempt.nnodes == 2
        later = here.guest()
        later.ready(False, 0, None)
        assert "takes the place of a node that is lost" in later.next().note
        there.leave(1, "")
        assert here.lost.get() == "node 1 (b) has lost its launcher"
        here.meeting.ready(True, 1, 1)
        assert later.next().attempt.node == 1
        later.leave(0, "")


def test_a_launcher_whose_ranks_came_to_their_end_is_not_waited_for() -> None:
    with meeting(least=2) as here:
        there = here.guest()
        here.meeting.ready(False, 0, None)
        there.ready(False, 0, None)
        assert here.meeting.next().attempt.nnodes == 2
        there.leave(0, "")
        here.meeting.ready(True, 1, 0)
        assert "node 1 (b) had come to the end of the script" in here.meeting.next().over.text
        assert here.lost.empty()


def test_a_port_that_is_taken_is_named() -> None:
    text = "is in use.*The launchers of all nodes meet there.*with --master-port"
    with meeting() as here, pytest.raises(ClusterError, match=f"Port {here.port} .*{text}"):
        HostedMeeting(
            OWN, NodeAssembly(OWN, 1, 2, 1.0, 0), ("127.0.0.1", here.port), "", lambda: 1, lambda _: None,
            lambda _: None, lambda _: None,
        )  # fmt: skip


def is_listening(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def test_ranks_of_two_nodes_start_again_together_bit_for_bit(tmp_path: Path) -> None:
    port, script = free_port(), ("12", "3", "0:1:5", "1:0:8")
    options = ("--max-restarts", "2")
    runs = [launched(tmp_path, port, *options, "--node-rank", n, script=script, nodes="2") for n in ("1", "0")]
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.output for run in runs)
    assert all(len(found) == 1 for found in losses(tmp_path).values())
    assert sorted(losses(tmp_path)) == list(range(12))


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_nodes_and_takes_one_in_again_at_a_checkpoint(tmp_path: Path) -> None:
    port, script = free_port(), ("30", "3", "0:hold:8", "1:hold:14")
    options = ("--join-timeout", "10")
    first = launched(tmp_path, port, *options, script=script, nodes="1:2")
    first.until(lambda: is_listening(port))
    second = launched(tmp_path, port, *options, script=script, nodes="1:2")
    first.until(lambda: 7 in losses(tmp_path))
    second.kill()
    first.until(lambda: 13 in losses(tmp_path))
    third = launched(tmp_path, port, *options, script=script, nodes="1:2")
    third.until(lambda: "taken in at its Keeper's next checkpoint" in third.output)
    (tmp_path / "checkpoints.14").touch()
    assert [first.wait(), third.wait()] == [0, 0], first.output + third.output
    found = losses(tmp_path)
    assert sorted(found) == list(range(30))
    worlds = [max(world for _, world in found[step]) for step in (7, 10, 13, 29)]
    assert worlds == [2, 1, 1, 2]
    assert "nodes have come: the run starts again with them behind step 14" in first.output
    for values in found.values():
        numbers = [float.fromhex(loss) for loss, _ in values]
        assert max(numbers) - min(numbers) < 1e-5 * max(numbers)


LATE = """
import atexit, os, sys
if os.environ["RANK"] == "0":
    atexit.register(lambda: os.read(os.open(sys.argv[1], os.O_RDONLY), 1) and os._exit(3))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_rank_that_fails_when_another_node_has_ended_is_not_followed_by_a_wait_for_that(
    nodes: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    gate, port = tmp_path / "gate", free_port()
    os.mkfifo(gate)
    place = ["--nodes", nodes, "--devices", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    more = ("--max-restarts", "1", "--join-timeout", str(2 * LIMIT), "--", str(gate))
    env = {"ACTORFLOW_TOKEN": "secret"}
    first, second = (start(LATE, *place, "--node-rank", n, *more, env=env, python=warm.python()) for n in ("0", "1"))
    assert second.wait() == 0, second.output
    for attempt in range(1 if nodes == "2" else 3):  # that a node has left does not count as a failure
        if attempt:
            first.until(lambda attempt=attempt: f"start again, on 1 node (attempt {attempt})" in first.output)
        gate.write_text(".")  # once the rank has come to its end
    assert first.wait() == 1, first.output
    assert "ended with exit status 3" in first.output
    if nodes == "2":
        assert re.search(r"no restart: node 1 \(.*\) had come to the end of the script, and left the run", first.output)


@pytest.mark.parametrize("text", ["0", "4:2", "2:", ":4", "two", "-1", "2:4:8", "2.0"])
def test_a_wrong_number_of_nodes_is_shown_with_what_was_expected(text: str) -> None:
    done = CliRunner().invoke(main, ["run", str(SCRIPT), "--nodes", text])
    assert done.exit_code == 2
    assert f"{text!r} was found; a number from 1 on, or MIN:MAX such as 2:4, was expected" in flat(done.output)


def test_nodes_that_come_and_go_need_what_several_nodes_need() -> None:
    for options, text in (
        ([], "4 nodes need --master-addr"),
        (["--master-addr", "127.0.0.1", "--master-port", "4242"], "several nodes need a shared secret"),
        (["--node-rank", "4"], "--node-rank 4 is not below --nnodes 4"),
        (["--on", "ray"], "--max-restarts and --nnodes MIN:MAX are not there with --on ray"),
        (["--ctrl-port", "4242", "--master-port", "4242"], "--ctrl-port 4242 is --master-port as well"),
        (["--max-restarts", "-1"], "-1 is not in the range"),
    ):
        done = CliRunner().invoke(main, ["run", str(SCRIPT), "--nodes", "2:4", *options], env={"ACTORFLOW_TOKEN": ""})
        assert done.exit_code == 2
        assert text in flat(done.output)


def flat(text: str) -> str:
    """A message of the command line, without its frame and its line breaks."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_to_node_0_while_it_waits_ends_all_launchers_with_its_status(
    number: signal.Signals, tmp_path: Path
) -> None:
    port, options = free_port(), ("--max-restarts", "1")
    first = launched(tmp_path, port, *options, "--node-rank", "0", script=("1", "1"), nodes="3")
    first.until(lambda: is_listening(port))
    second = launched(tmp_path, port, *options, "--node-rank", "1", script=("1", "1"), nodes="3")
    second.until(lambda: "meeting the other nodes" in second.output)
    first.until(lambda: "2 of 3 nodes are ready" in first.output)
    first.process.send_signal(number)
    assert [first.wait(), second.wait()] == [128 + number] * 2, first.output + second.output
    assert f"ended by {number.name}" in first.output
    assert f"node 0's launcher was ended by {number.name}" in second.output


def test_a_port_of_another_program_is_named_where_the_launcher_would_have_been_node_0s(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = launched(tmp_path, port, "--join-timeout", "1", script=("1", "1"), nodes="1:2")
        assert run.wait() == 1
    assert f"the launcher that has the port {port} of this machine is taken for node 0's" in run.output
    assert re.search(rf"no launcher of node 0 answered at .*Port {port} on .* is in use", run.output), run.output


def test_a_signal_to_another_launcher_ends_a_run_that_needs_all_nodes(tmp_path: Path) -> None:
    port, options = free_port(), ("--max-restarts", "1")
    script = ("9", "3", "0:hold:4")
    runs = [launched(tmp_path, port, *options, "--node-rank", n, script=script, nodes="2") for n in ("0", "1")]
    runs[0].until(lambda: 3 in losses(tmp_path))
    runs[1].process.send_signal(signal.SIGTERM)
    assert [run.wait() for run in runs] == [1, 128 + signal.SIGTERM], runs[0].output
    assert re.search(r"the launcher of another node \(.*\) was ended by SIGTERM", runs[0].output), runs[0].output
