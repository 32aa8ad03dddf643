"""Ports that cannot be listened on, and machines that cannot be reached, for real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from actorflow.doctor import ports
from actorflow.doctor.reach import reach, unreached
from cluster.networks import own_network

NOBODY = 65534


def test_a_free_port_is_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        free = s.getsockname()[1]
    assert ports.unusable("127.0.0.1", free) is None


def test_a_port_in_use_names_the_program_that_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = ports.unusable("127.0.0.1", port)
    assert found is not None
    assert found.condition == "port in use"
    assert f"Port {port} on 127.0.0.1 is in use: " in found.text
    assert f"(pid {os.getpid()}) listens there." in found.text
    assert "flow.config.ctrl_port" in found.text


@pytest.mark.skipif(ports._unprivileged() <= 81, reason="anybody may use any port on this machine")
def test_a_port_below_1024_without_rights_says_which_ports_may_be_used() -> None:
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(NOBODY)
        found = ports.unusable("127.0.0.1", 81)
    finally:
        if root:
            os.seteuid(0)
    assert found is not None
    assert found.condition == "port without rights"
    assert "Port 81 on 127.0.0.1 may not be used by this user (uid " in found.text
    assert f"Choose one from {ports._unprivileged()} to 65535" in found.text


def test_an_address_of_another_machine_shows_this_ones() -> None:
    found = ports.unusable("198.51.100.7", 29400)
    assert found is not None
    assert found.condition == "address of another machine"
    assert "198.51.100.7 is not an address of this machine, whose addresses are " in found.text


# -- reaching --------------------------------------------------------------------------------------


def test_a_port_where_somebody_listens_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        attempt = reach("localhost", s.getsockname()[1])
    assert attempt.reached
    assert unreached(attempt, "the master") is None


def test_a_closed_port_is_told_from_a_silent_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        closed = s.getsockname()[1]
    found = unreached(reach("127.0.0.1", closed), "node 1")
    assert found is not None
    assert found.condition == "port is closed"
    assert f"Node 1 (127.0.0.1) cannot be reached from {socket.gethostname()}: " in found.text
    assert f"TCP to 127.0.0.1 port {closed}: refused." in found.text
    assert "nothing listens on the port there" in found.text


def test_a_port_that_does_not_answer_names_firewalls() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as waits, socket.socket() as more:
        for s in (waits, more):  # they fill the queue of a server that accepts nobody: the next one is not answered
            s.setblocking(False)
            s.connect_ex(full.getsockname())
        attempt = reach("127.0.0.1", full.getsockname()[1], timeout=0.3)
    found = unreached(attempt, "the master")
    assert found is not None
    assert found.condition == "no answer"
    assert "no answer within 0.3 s" in found.text
    assert "firewall" in found.text


def test_an_unknown_name_is_told_from_an_unreachable_machine() -> None:
    found = unreached(reach("node0.invalid", 29400), "the master")
    assert found is not None
    assert found.condition == "unknown name"
    assert "the name node0.invalid was looked up: " in found.text
    assert "/etc/hosts" in found.text


# a network of its own whose only card is a virtual one, behind which nobody is
OWN_NETWORK = """
set -e
ip link set lo up
ip link add docker0 type bridge
ip address add 10.9.0.1/24 dev docker0
ip link set docker0 up
ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:01 dev docker0
exec "$0" -c '
from actorflow.doctor import cards
from actorflow.doctor.machine_facts import MachineFacts
from actorflow.doctor.reach import reach, unreached

print(unreached(reach("10.10.0.1", 29400, 1.0), "the master").text)
print(unreached(reach("10.9.0.2", 29400, 0.3), "the master").text)
print(cards.through_virtual(MachineFacts(("10.9.0.2", "10.9.0.1"), 1)).text)
'
"""


def test_in_a_network_of_its_own_each_way_of_not_arriving_has_its_message() -> None:
    command = own_network()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [*command, "sh", "-c", OWN_NETWORK, sys.executable], capture_output=True, text=True, env=environ, timeout=250
    )
    assert ran.returncode == 0, ran.stderr
    no_route, silent, virtual = ran.stdout.splitlines()
    assert "TCP to 10.10.0.1 port 29400: no route." in no_route
    assert "ip route" in no_route
    assert "TCP to 10.9.0.2 port 29400: no answer within 0.3 s." in silent
    assert "Packets to node 0 (10.9.0.2) leave by docker0 (10.9.0.1), which is Docker's bridge." in virtual
