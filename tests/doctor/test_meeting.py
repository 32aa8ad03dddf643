"""Nodes that run the doctor at the same time learn who reaches whom, and what differs."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import CliRunner

from actorflow.cli import main
from actorflow.doctor.machine_facts import MachineFacts
from actorflow.doctor.meeting import Meeting, NodePeer, differences, outcome
from actorflow.doctor.reach import reach
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.ticket import own_ticket
from cluster.networks import two_machines
from cluster.ranks import LIMIT, free_port

NODES = ("127.0.0.1", "127.0.0.2")


def ticket(node: int, nodes: int = 2) -> Ticket:
    return own_ticket(Settings(rank=node, node=node, world=nodes, nnodes=nodes, script=__file__))


def meet(
    nodes: tuple[str, ...], present: tuple[int, ...], timeout: float
) -> tuple[list[dict[int, NodePeer]], list[MachineFacts]]:
    port = free_port()
    heres = [MachineFacts(nodes, node, port) for node in present]

    async def all_of_them() -> list[dict[int, NodePeer]]:
        return await asyncio.gather(*[Meeting(here, ticket(here.node or 0, len(nodes))).run(timeout) for here in heres])

    return asyncio.run(all_of_them()), heres


def test_nodes_that_are_all_there_reach_each_other_both_ways() -> None:
    met, heres = meet((*NODES, "127.0.0.3"), (0, 1, 2), LIMIT)
    for peers, here in zip(met, heres, strict=True):
        assert set(peers) == {0, 1, 2} - {here.node}
        for peer in peers.values():
            assert outcome(peer, here, LIMIT) == []
            assert peer.ticket is not None
            assert differences(ticket(here.node or 0, 3), peer.ticket) is None


class Brief(Meeting):
    """A meeting whose time is over when something is known of each peer, however long a busy machine takes for it."""

    def __init__(self, here: MachineFacts, known: Callable[[NodePeer], bool]) -> None:
        super().__init__(here, ticket(here.node or 0))
        self._known = known

    async def _all_complete(self) -> None:
        while not all(map(self._known, self.peers.values())):
            await asyncio.sleep(0.01)
        raise TimeoutError


def test_a_node_that_is_away_is_named_with_what_was_tried() -> None:
    here = MachineFacts(NODES, 0, free_port())
    peers = asyncio.run(Brief(here, lambda peer: peer.attempt is not None).run(LIMIT))
    closed, absent = outcome(peers[1], here, 0.5)
    assert closed.condition == "port is closed"
    assert f"Node 1 (127.0.0.2) cannot be reached from {socket.gethostname()}: TCP to 127.0.0.2 port" in closed.text
    assert "Node 1 (127.0.0.2) has not reached this node within 0.5 s." in absent.text
    assert f"--master-port {here.port} there at the same time" in absent.text


def test_another_program_on_the_port_is_told_from_the_doctor() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.2", port)) as s, s:
        here = MachineFacts(NODES, 0, port)
        peer = NodePeer(1, "127.0.0.2")

        async def against_a_stranger() -> None:
            async def stranger(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 400 Bad Request\n")
                writer.close()

            server = await asyncio.start_server(stranger, sock=s)
            nonlocal peer
            peer = (await Brief(here, lambda peer: not peer.answered).run(LIMIT))[1]
            server.close()

        asyncio.run(against_a_stranger())
    assert not peer.answered
    assert outcome(peer, here, 1.0)[0].condition == "another program answers"


def test_a_meeting_ends_in_time_though_a_node_is_away() -> None:
    ((peers,), _) = meet(NODES, (0,), 0.1)
    assert not peers[1].complete


def test_what_strangers_send_does_no_harm() -> None:
    async def with_strangers() -> dict[int, NodePeer]:
        port = free_port()
        heres = [MachineFacts(NODES, node, port) for node in (0, 1)]
        first = asyncio.ensure_future(Meeting(heres[0], ticket(0)).run(LIMIT, listening.set))
        await listening.wait()
        for line in (b"\xff\n", b"[]\n", b'{"node": 7}\n', b'{"node": [1]}\n', b"x" * (1 << 17) + b"\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(line)
            writer.close()
        await Meeting(heres[1], ticket(1)).run(LIMIT)
        return await first

    listening = asyncio.Event()
    peers = asyncio.run(with_strangers())
    assert peers[1].complete


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": "0.0.9"}, "version of actorflow"),
        ({"python": "3.12.1"}, "version of Python"),
        ({"torch": "1.0.0"}, "version of torch"),
        ({"digest": "0" * 64}, "script"),
        ({"libraries": "NCCL 2.19.3 of torch 2.11.0+cu121"}, "communication library"),
    ],
)
def test_what_differs_between_nodes_shows_both_values(changes: dict[str, str], told: str) -> None:
    own, other = ticket(0), replace(ticket(1), **changes)
    found = differences(own, other)
    assert found is not None
    assert found.certain
    assert f"ranks do not agree on the {told}:" in found.text
    (name, value), *_ = changes.items()
    assert value[:12] in found.text
    assert str(getattr(own, name))[:12] in found.text


def test_a_firewall_that_lets_one_port_through_is_seen() -> None:
    here = MachineFacts(NODES, 0, 29400)
    closed = reach("127.0.0.2", free_port())
    assert not closed.reached
    reached = replace(closed, outcome="reached")
    found = outcome(NodePeer(1, "127.0.0.2", reached, True, ticket(1), closed, True, False), here, 9.0)
    assert [f.condition for f in found] == ["other ports are closed", "other ports are closed here"]
    assert "Open all ports between the nodes" in found[0].text


# -- the command -----------------------------------------------------------------------------------


def test_the_doctor_finds_nothing_wrong_with_two_machines_that_reach_each_other() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "actorflow", "doctor", __file__, "--nodes", "10.9.0.1,10.9.0.2"]
    command += ["--master-port", "29400", "--timeout", str(LIMIT)]
    with two_machines() as machines:
        runs = [
            subprocess.Popen([*within, *command], stdout=subprocess.PIPE, text=True, env=environ) for within in machines
        ]
        for node, run in enumerate(runs):
            output, _ = run.communicate(timeout=LIMIT)
            assert run.returncode == 0, output
            assert re.search(
                rf"node {1 - node} \(10.9.0.{2 - node}\), both ways +ok +connected in [\d.]+ ms by eth0", output
            )
            assert f"node {1 - node} (10.9.0.{2 - node}): versions" in output


def test_the_doctor_ends_with_status_1_where_a_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["doctor", "--master-port", str(port)])
    assert result.exit_code == 1
    assert f"port in use: Port {port} on 127.0.0.1 is in use: " in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nodes", "127.0.0.1,127.0.0.2"], "several nodes need --master-port"),
        (["--nodes", "127.0.0.1,127.0.0.2", "--master-port", "29400"], "Say which one this process is"),
        (["--nodes", "198.51.100.7,198.51.100.8", "--master-port", "29400"], "Its addresses are "),
        (["--nodes", "a,b,a", "--master-port", "29400"], "has a twice"),
    ],
)
def test_a_wrong_list_of_nodes_is_refused(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code != 0
    assert told in " ".join(result.output.split())
