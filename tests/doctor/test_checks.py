"""Each condition that one machine can show is provoked; what is said of it is checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actorflow.doctor import cards, checks, node_addresses, proxies, shm
from actorflow.doctor.machine_facts import MachineFacts, container
from actorflow.rendezvous.addresses import Interface

ETH0 = Interface("eth0", ("10.0.0.1",))
DOCKER0 = Interface("docker0", ("172.17.0.1",))
NAMES = {"a": ("10.0.0.1",), "b": ("10.0.0.2",), "localhost": ("127.0.0.1",), "bad": ("127.0.1.1",), "gone": ()}

HERE = MachineFacts(
    nodes=("10.0.0.1", "10.0.0.2"),
    node=0,
    environ={},
    interfaces=(Interface("lo", ("127.0.0.1",)), ETH0),
    container="",
    shm=8 << 30,
    resolve=lambda host: NAMES.get(host, (host,)),
    is_own=lambda address: address in ("127.0.0.1", "10.0.0.1"),
)


@pytest.fixture(autouse=True)
def _way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "route_to", lambda host: "172.17.0.1" if host.startswith("172.17.") else "10.0.0.1")


def test_on_a_machine_without_any_condition_nothing_is_found() -> None:
    assert [check(HERE) for _, check in checks.CHECKS] == [None] * len(checks.CHECKS)


# -- containers ------------------------------------------------------------------------------------


def test_a_container_whose_address_is_its_hosts_is_told_to_use_the_hosts_network() -> None:
    found = node_addresses.unpublished(replace(HERE, container="/.dockerenv", nodes=("192.168.7.7", "10.0.0.2")))
    assert found is not None
    assert found.certain
    for part in ("/.dockerenv", "10.0.0.1 (eth0)", "node 0 of the run is 192.168.7.7", "docker run --net=host"):
        assert part in found.text


@pytest.mark.parametrize(
    "here",
    [
        replace(HERE, container="/.dockerenv"),  # it has the host's network
        replace(HERE, nodes=("192.168.7.7",)),  # no container
        replace(HERE, container="/.dockerenv", nodes=("192.168.7.7",), node=None),  # its own address is not known
    ],
)
def test_a_container_with_the_hosts_network_is_fine(here: MachineFacts) -> None:
    assert node_addresses.unpublished(here) is None


def test_containers_are_known_by_their_marks(tmp_path: Path) -> None:
    assert container(str(tmp_path)) == ""
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/cgroup").write_text("0::/init.scope\n")
    assert container(str(tmp_path)) == ""
    (tmp_path / "proc/1/cgroup").write_text("12:cpu:/kubepods/burstable/pod1\n")
    assert container(str(tmp_path)) == "control group 'kubepods' in /proc/1/cgroup"
    (tmp_path / ".dockerenv").touch()
    assert container(str(tmp_path)) == "/.dockerenv"


# -- proxies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "grpc_proxy", "ALL_PROXY"])
def test_a_proxy_variable_is_named_without_its_password(name: str) -> None:
    found = proxies.proxied(replace(HERE, environ={name: "http://me:hunter2@proxy:3128", "no_proxy": "10.0.0.1"}))
    assert found is not None
    assert not found.certain  # the run does not use it
    assert f"{name}=http://…@proxy:3128 is set, and no_proxy does not name 10.0.0.2." in found.text
    assert "export no_proxy=10.0.0.2" in found.text
    assert "hunter2" not in found.text


@pytest.mark.parametrize("rule", ["*", "10.0.0.0/8", "10.0.0.1,10.0.0.2", "other, 10.0.0.1 ,10.0.0.2"])
def test_nodes_that_no_proxy_names_go_direct(rule: str) -> None:
    assert proxies.proxied(replace(HERE, environ={"http_proxy": "http://proxy", "NO_PROXY": rule})) is None


def test_no_proxy_names_a_whole_domain_by_its_end() -> None:
    here = replace(HERE, nodes=("n0.site.org", "n1.other.org"), environ={"http_proxy": "p", "no_proxy": ".site.org"})
    found = proxies.proxied(here)
    assert found is not None
    assert "does not name n1.other.org." in found.text


def test_a_run_of_the_loopback_needs_no_exception_for_a_proxy() -> None:
    assert proxies.proxied(replace(HERE, nodes=("127.0.0.1",), environ={"http_proxy": "http://proxy"})) is None


def test_a_library_that_redirects_connections_is_named() -> None:
    found = proxies.preloaded(replace(HERE, environ={"LD_PRELOAD": "/usr/lib/libproxychains4.so"}))
    assert found is not None
    assert "LD_PRELOAD=/usr/lib/libproxychains4.so" in found.text


# -- the master's address --------------------------------------------------------------------------


def test_a_loopback_master_among_other_machines_is_an_error_on_each() -> None:
    for node in (0, 1):
        found = node_addresses.master_is_loopback(replace(HERE, nodes=("127.0.0.1", "10.0.0.2"), node=node))
        assert found is not None
        assert "The master's address 127.0.0.1 is a loopback address." in found.text
        assert "IP address that every node can reach" in found.text


def test_a_masters_name_that_means_the_loopback_elsewhere_points_to_the_hosts_file() -> None:
    found = node_addresses.master_is_loopback(replace(HERE, nodes=("bad",), node=None))
    assert found is not None
    assert "bad, which resolves to 127.0.1.1 here," in found.text
    assert "/etc/hosts" in found.text


@pytest.mark.parametrize(
    ("nodes", "node"),
    [(("127.0.0.1", "127.0.0.2"), 1), (("127.0.0.1",), None), (("localhost",), 0), (("a", "b"), 1), (("gone",), 1)],
)
def test_a_run_of_one_machine_may_use_the_loopback(nodes: tuple[str, ...], node: int | None) -> None:
    assert node_addresses.master_is_loopback(replace(HERE, nodes=nodes, node=node)) is None


# -- cards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("docker0", "Docker"), ("br-0a1b2c3d4e5f", "Docker"), ("veth12ab", "cable"), ("virbr0", "libvirt"),
        ("cni0", "containers"), ("flannel.1", "containers"), ("tun0", "tunnel"), ("wg0", "tunnel"), ("dummy0", "no"),
    ],
)  # fmt: skip
def test_virtual_cards_are_known_by_name(name: str, kind: str) -> None:
    assert kind in cards.virtual(name)


@pytest.mark.parametrize("name", ["lo", "eth0", "enp3s0", "eno1np0", "ib0", "bond0", "wlan0", "ens5"])
def test_real_cards_are_not_taken_for_virtual(name: str) -> None:
    assert cards.virtual(name) == ""


def test_a_way_through_a_virtual_card_names_it_and_the_real_ones() -> None:
    here = replace(HERE, nodes=("172.17.0.2", "10.0.0.1"), node=1, interfaces=(*HERE.interfaces, DOCKER0))
    found = cards.through_virtual(here)
    assert found is not None
    assert "node 0 (172.17.0.2) leave by docker0 (172.17.0.1), which is Docker's bridge" in found.text
    assert "this one has eth0 (10.0.0.1)" in found.text


@pytest.mark.parametrize("variable", cards.LIBRARIES)
def test_a_card_that_does_not_exist_is_an_error_that_lists_those_that_do(variable: str) -> None:
    found = cards.misnamed(replace(HERE, environ={variable: "ib0"}))
    assert found is not None
    assert found.certain
    assert f"{variable}=ib0 names no network interface" in found.text
    assert "It has lo (127.0.0.1), eth0 (10.0.0.1)." in found.text


@pytest.mark.parametrize(
    ("variable", "value", "selected"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True), ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", True), ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False), ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True), ("NCCL_SOCKET_IFNAME", "^eth", False),
    ],
)  # fmt: skip
def test_variables_select_cards_as_their_libraries_do(variable: str, value: str, selected: bool) -> None:
    here = replace(HERE, environ={variable: value}, interfaces=(ETH0,))
    assert (cards.misnamed(here) is None) == selected


def test_a_library_that_was_told_another_card_than_the_way_is_a_doubt() -> None:
    here = replace(HERE, environ={"NCCL_SOCKET_IFNAME": "docker0"}, interfaces=(*HERE.interfaces, DOCKER0))
    found = cards.ambiguous(here)
    assert found is not None
    assert not found.certain
    assert "NCCL_SOCKET_IFNAME=docker0, but packets to the other nodes leave by eth0 (10.0.0.1)." in found.text


def test_virtual_cards_beside_real_ones_say_how_to_choose() -> None:
    found = cards.ambiguous(replace(HERE, interfaces=(*HERE.interfaces, DOCKER0)))
    assert found is not None
    assert not found.certain
    assert "docker0 (172.17.0.1), Docker's bridge" in found.text
    assert "export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0" in found.text


# -- all of them -----------------------------------------------------------------------------------


def test_a_join_that_fails_names_the_certain_conditions_first() -> None:
    environ = {"http_proxy": "http://proxy", "GLOO_SOCKET_IFNAME": "ib0"}
    found = checks.findings(replace(HERE, environ=environ))
    assert [finding.condition for finding in found] == ["no such card", "proxy variable"]
    text = checks.why_alone(replace(HERE, environ=environ))
    assert text.index("GLOO_SOCKET_IFNAME=ib0") < text.index("http_proxy=")


def test_a_second_node_0_learns_that_the_masters_address_is_another_machines() -> None:
    found = node_addresses.not_the_master(replace(HERE, nodes=("b", "10.0.0.1")))
    assert found is not None
    assert not found.certain  # behind a translation of addresses it may be right
    assert "The master's address b is none of this machine's, which has 10.0.0.1 (eth0)." in found.text
    assert "--node-rank 0 on one node alone" in found.text


@pytest.mark.parametrize(
    "here",
    [
        HERE,
        replace(HERE, nodes=("b",), node=1),
        replace(HERE, nodes=("gone",)),
        replace(HERE, nodes=("b",), container="x"),
    ],
)
def test_a_node_0_with_the_masters_address_and_any_other_node_are_fine(here: MachineFacts) -> None:
    assert node_addresses.not_the_master(here) is None


# -- shared memory ---------------------------------------------------------------------------------


def test_a_container_with_dockers_default_of_shared_memory_is_told_who_needs_more() -> None:
    found = shm.small(replace(HERE, container="/.dockerenv", shm=64 << 20))
    assert found is not None
    assert not found.certain  # the run itself does without
    for part in ("/dev/shm of this container (/.dockerenv) holds 67.1 MB", "NCCL", "--shm-size", "--ipc=host"):
        assert part in found.text
    assert shm.small(replace(HERE, container="/.dockerenv", shm=8 << 30)) is None
    assert shm.small(replace(HERE, shm=64 << 20)) is None
    assert shm.small(replace(HERE, container="/.dockerenv", shm=None)) is None


@pytest.mark.parametrize(
    "error",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of",
        "unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)",
        "NCCL error: Error while creating shared memory segment /dev/shm/nccl-2FJx",
    ],
)
def test_an_error_that_a_small_dev_shm_may_be_behind_gets_a_hint(error: str) -> None:
    assert "holds 0.1 MB here. Start the container with --shm-size" in shm.advice(error, 65536)
    assert shm.advice(error, 8 << 30) == ""  # there is enough


def test_other_errors_get_no_hint() -> None:
    assert shm.advice("shapes do not fit", 65536) == ""
