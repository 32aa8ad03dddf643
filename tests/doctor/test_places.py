"""A machine finds its place in a list of nodes, or is told why not."""

from __future__ import annotations

import pytest

from actorflow.rendezvous import node_list
from actorflow.rendezvous.addresses import Interface, interfaces, is_own, resolve
from actorflow.rendezvous.node_list import own_node
from actorflow_compiler.core.errors import ClusterError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two cards and a name."""
    names = {"node1": ("10.0.0.2",), "unknown": ()}
    monkeypatch.setattr(node_list, "resolve", lambda host: names.get(host, (host,)))
    monkeypatch.setattr(node_list, "is_own", lambda address: address in ("10.0.0.2", "10.1.0.2"))
    monkeypatch.setattr(
        node_list, "interfaces", lambda: (Interface("eth0", ("10.0.0.2",)), Interface("eth1", ("10.1.0.2",)))
    )


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "nodes", [["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "node1"], ["10.0.0.1", "10.1.0.2", "10.0.0.9"]]
)
def test_a_machine_is_the_node_whose_address_or_name_is_its_own(nodes: list[str]) -> None:
    assert own_node(nodes, None) == 1


@pytest.mark.usefixtures("machine")
def test_a_list_without_this_machine_shows_its_addresses() -> None:
    with pytest.raises(ClusterError) as e:
        own_node(["10.0.0.7", "10.0.0.8", "unknown"], None)
    text = str(e.value)
    assert "not in the list of nodes 10.0.0.7, 10.0.0.8, unknown." in text
    assert "Its addresses are 10.0.0.2 (eth0), 10.1.0.2 (eth1)." in text
    assert "The name unknown could not be resolved." in text
    assert "ACTORFLOW_NODE" in text


@pytest.mark.usefixtures("machine")
def test_two_addresses_of_one_machine_ask_which_it_is() -> None:
    with pytest.raises(ClusterError, match=r"node 0 \(10.0.0.2\), node 2 \(10.1.0.2\).*ACTORFLOW_NODE=0"):
        own_node(["10.0.0.2", "10.0.0.9", "10.1.0.2"], None)
    assert own_node(["10.0.0.2", "10.0.0.9", "10.1.0.2"], "2") == 2


@pytest.mark.parametrize("said", ["2", "-1", "one"])
def test_a_place_that_is_not_in_the_list_is_an_error(said: str) -> None:
    with pytest.raises(ClusterError, match=f"ACTORFLOW_NODE={said} was found; a number from 0 to 1"):
        own_node(["10.0.0.1", "10.0.0.2"], said)


def test_a_node_that_is_listed_twice_is_named() -> None:
    with pytest.raises(ClusterError, match=r"has 10.0.0.1 twice, as node 0 and node 2"):
        own_node(["10.0.0.1", "10.0.0.2", "10.0.0.1"], None)


def test_this_machines_own_addresses_are_found() -> None:
    (lo,) = [card for card in interfaces() if card.name == "lo"]
    assert "127.0.0.1" in lo.addresses
    assert lo.up
    assert is_own("127.0.0.1")
    assert is_own("127.0.0.2")  # all of 127.0.0.0/8 is
    assert not is_own("198.51.100.7")
    assert resolve("127.0.0.1") == ("127.0.0.1",)
    assert resolve("node0.invalid") == ()
