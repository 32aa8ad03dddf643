"""Which network card ranks use on hosts with several: the one that leads to the master, or the one that is named."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from actorflow.rendezvous import addresses, network
from actorflow.rendezvous.addresses import Interface
from actorflow.rendezvous.network import address_of, check_interface, interface_of, own_address
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError
from cluster.networks import two_machines
from engines.started import ACTORFLOW, ENV, LIMIT, SCRIPT, expected, losses

CARDS = (
    Interface("lo", ("127.0.0.1", "::1")),
    Interface("eth0", ("10.0.0.1", "fd00::1")),
    Interface("ib0", ("10.1.0.1",)),
    Interface("eth7", (), up=True),
    Interface("eth8", ("10.8.0.1",), up=False),
)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interfaces", lambda: CARDS)


@pytest.mark.usefixtures("cards")
def test_a_card_that_can_be_used_is_taken() -> None:
    check_interface("ib0", {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"})
    check_interface("ib0", {"NCCL_SOCKET_IFNAME": "^docker,lo"})
    assert address_of("eth0", "10.0.0.9") == "10.0.0.1"
    assert address_of("eth0", "fd00::9") == "fd00::1"
    assert interface_of("10.1.0.1") == "ib0"
    assert interface_of("fd00::1") == "eth0"
    assert interface_of("10.7.0.1") == ""


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("name", "text"),
    [("wlan0", "there is no such network card"), ("eth7", "it has no address"), ("eth8", "it is down")],
)
def test_a_card_that_cannot_be_used_is_answered_with_those_that_can(name: str, text: str) -> None:
    with pytest.raises(
        ClusterError, match=rf"--interface {name}: {text} on .*: lo .*, eth0 \(10.0.0.1, fd00::1\), ib0"
    ):
        check_interface(name, {})


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("said", [{"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "^ib"}])
def test_a_librarys_variable_that_names_another_card_is_an_error(said: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match=rf"--interface ib0 contradicts {re.escape('='.join(*said.items()))}"):
        check_interface("ib0", said)


@pytest.mark.usefixtures("cards")
def test_a_card_without_an_address_of_the_masters_kind_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"ib0 \(10.1.0.1\) has no IPv6 address, by which the master"):
        address_of("ib0", "fd00::9")


@pytest.mark.usefixtures("cards")
def test_other_ranks_are_reached_at_the_card_and_the_master_where_the_run_says() -> None:
    place = {"world": 4, "nnodes": 2, "devices": 2, "master_host": "10.0.0.9", "interface": "ib0"}
    assert Settings(rank=2, node=1, **place).local_host == "10.1.0.1"
    assert Settings(rank=1, local_rank=1, node=0, **place).local_host == "10.1.0.1"
    assert Settings(rank=0, **place).local_host == "10.0.0.9"


@pytest.mark.usefixtures("cards")
def test_a_node_0_whose_name_is_its_loopback_is_known_by_its_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def route(host: str) -> str:
        if host not in ways:
            raise ClusterError(f"no route to {host}")
        return ways[host]

    monkeypatch.setattr(addresses, "resolve", lambda host: {"head": ("127.0.1.1",), "good": ("10.1.0.1",)}[host])
    monkeypatch.setattr(network, "route_to", route)
    ways = {"good": "10.1.0.1", "192.0.2.1": "10.0.0.1"}
    assert own_address("good") == "10.1.0.1"
    assert own_address("head") == "10.0.0.1"
    ways = {}
    with pytest.raises(
        ClusterError, match=r"head, resolves to 127.0.1.1 .* 10.0.0.1 \(eth0\).* 10.1.0.1 \(ib0\).*--inter"
    ):
        own_address("head")
    monkeypatch.setattr(addresses, "interfaces", lambda: CARDS[:2])
    assert own_address("head") == "10.0.0.1"


# -- between two hosts with two cards each ---------------------------------------------------------


def sent(machine: list[str], card: str) -> int:
    """The bytes that have left a machine by a card."""
    file = f"/sys/class/net/{card}/statistics/tx_bytes"
    shown = subprocess.run([*machine, "cat", file], capture_output=True, text=True, check=True).stdout
    return int(shown)


@pytest.mark.hosts
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("master", "named", "card"), [("10.9.1.1", [], "eth1"), ("10.9.0.1", ["--interface", "eth1"], "eth1")]
)
def test_tensors_leave_by_the_card_that_leads_to_the_master_or_is_named(
    master: str, named: list[str], card: str, tmp_path: Path
) -> None:
    with two_machines(cables=2) as machines:
        common = [
            "--nnodes",
            "2",
            "--master-addr",
            master,
            "--master-port",
            "29400",
            "--log-dir",
            str(tmp_path),
            *named,
        ]
        nodes = [
            subprocess.Popen(
                [*machine, *ACTORFLOW, "run", str(SCRIPT), "--node-rank", str(node), *common],
                env={**ENV, "ACTORFLOW_TOKEN": "secret", "ACTORFLOW_LOCAL": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node, machine in enumerate(machines)
        ]
        try:
            said = [node.communicate(timeout=LIMIT)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
        assert [node.returncode for node in nodes] == [0, 0], said
        assert losses(said[0]) == pytest.approx(expected(), abs=2e-6)
        both = said[0] + (tmp_path / "rank1.stdout.log").read_text()
        assert both.count(f"cards {card} ={card}\n") == 2, both
        other = "eth0" if card == "eth1" else "eth1"
        moved = {name: min(sent(machine, name) for machine in machines) for name in (card, other)}
    if named:  # what ranks tell each other goes to the master's address, on the other card
        assert moved[card] > 3 * 848  # bytes: a model's gradients, three times
    else:
        assert moved[card] > 20 * moved[other]


def test_a_card_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [*ACTORFLOW, "run", str(SCRIPT), "--interface", "no-such-card"], env=ENV, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"there is no such network card on {socket.gethostname()}" in " ".join(done.stderr.split())
