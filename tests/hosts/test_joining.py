"""Hosts come together, or learn why not: late ones, strangers, other versions, counts that do not fit, wrong names."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping

import pytest

from hosts.clusters import PORT, Cluster
from hosts.containers import Container
from hosts.machines import Running

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

OLD = "actorflow-0.0.7.dist-info"  # what an installation of that version has


def test_a_late_node_is_awaited_by_name_and_nothing_is_published(cluster: Cluster) -> None:
    *early, late = range(len(cluster.hosts))
    runs = [cluster.node(n, "steps.py", "20") for n in early]
    runs[0].until(f"waiting for rank {late} (node {late}) to join")
    listening = ["ss", "-Htln", "sport", "=", f":{PORT}"]
    assert subprocess.run([*cluster.hosts[0].network(), *listening], capture_output=True, text=True).stdout
    assert subprocess.run(listening, capture_output=True, text=True).stdout == ""
    for host in cluster.hosts:
        if isinstance(host, Container):
            assert host.published() == {}
    runs.append(cluster.node(late, "steps.py", "20"))
    Cluster.ended(runs, 0)
    assert "step 20, loss" in runs[0].output


def test_a_node_with_a_wrong_token_is_turned_away_and_both_sides_say_so(cluster: Cluster) -> None:
    master = cluster.node(0, "steps.py", "1", nodes=2, options=("--join-timeout", "12"))
    stranger = cluster.node(1, "steps.py", "1", nodes=2, ACTORFLOW_TOKEN="guess")
    Cluster.ended([stranger, master], 1)
    assert "their tokens differ" in stranger.output
    told = f"Callers from {cluster.hosts[1].address} were turned away, for lack of this run's token"
    assert told in master.output, master.output


def _older(cluster: Cluster) -> dict[str, str]:
    """The variables of a node whose actorflow says that it is of another version."""
    host = cluster.hosts[1]
    host.write(f"old/{OLD}/METADATA", "Metadata-Version: 2.1\nName: actorflow\nVersion: 0.0.7\n")
    return {"PYTHONPATH": ":".join(filter(None, (f"{host.folder}/old", cluster.env.get("PYTHONPATH"))))}


# what differs → how the second node is started, and what both are told
WRONG: Mapping[str, tuple[Callable[[Cluster], Running], tuple[str, ...]]] = {
    "version": (
        lambda c: c.node(1, "steps.py", "1", nodes=2, **_older(c)),
        ("do not agree on the version of actorflow", "0.0.7", "same version"),
    ),
    "devices": (
        lambda c: c.node(1, "steps.py", "1", nodes=2, devices=2),
        ("do not agree on the number of devices of a node", "same --devices"),
    ),
    "nodes": (
        lambda c: c.node(1, "steps.py", "1", nodes=3),
        ("do not agree on the number of nodes", "same --nnodes"),
    ),
    "arguments": (
        lambda c: c.node(1, "steps.py", "2", nodes=2),
        ("do not agree on the arguments of the script", "same arguments"),
    ),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what == "version" else pytest.mark.slow) for what in WRONG]
)
def test_a_node_that_is_started_otherwise_ends_the_run_on_both_sides_with_both_values(
    what: str, cluster: Cluster
) -> None:
    start, told = WRONG[what]
    runs = [cluster.node(0, "steps.py", "1", nodes=2), start(cluster)]
    Cluster.ended(runs, 1)
    for one in runs:
        for part in (*told, cluster.hosts[0].hostname, cluster.hosts[1].hostname):
            assert part in one.output, one.output


@pytest.mark.slow
def test_two_nodes_with_one_rank_are_both_named(cluster: Cluster) -> None:
    nodes = len(cluster.hosts) + 1  # one that never comes, so that the run waits
    first, second = cluster.hosts[1], cluster.hosts[-1]
    runs = [cluster.node(0, "steps.py", "1", nodes=nodes)]
    runs += [cluster.node(1, "steps.py", "1", nodes=nodes, host=host) for host in (first, second)]
    Cluster.ended(runs, 1)
    for one in runs:
        for part in ("two processes say that they are rank 1", "own --node-rank", first.hostname):
            assert part in one.output, one.output
        assert second.hostname in one.output


@pytest.mark.slow
def test_a_second_node_0_is_told_that_the_masters_address_is_another_ones(cluster: Cluster) -> None:
    twin = cluster.node(0, "steps.py", "1", host=cluster.hosts[1])
    twin.until("to join: 5 s of 300 s")
    master, own = cluster.hosts[0].address, cluster.hosts[1].address
    twin.holds(lambda: twin.output.endswith("\n"), "the end of the line")
    for part in (master, f"{own} (eth0)", "--node-rank"):
        assert part in twin.output, twin.output


def test_a_master_whose_name_is_a_loopback_on_the_other_hosts_is_explained_there(cluster: Cluster) -> None:
    cluster.harmed(*cluster.hosts[:2])  # their names
    cluster.hosts[0].alias("master", cluster.hosts[0].address)
    cluster.hosts[1].alias("master", "127.0.1.1")
    quick = ("--join-timeout", "10")
    runs = [cluster.node(n, "steps.py", "1", master="master", nodes=2, options=quick) for n in range(2)]
    Cluster.ended(runs, 1)
    for part in ("master, which resolves to 127.0.1.1 here, is a loopback address", "/etc/hosts", "an IP address"):
        assert part in runs[1].output, runs[1].output
    assert "did not join within 10 s" in runs[0].output
