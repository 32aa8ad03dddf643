"""A host is lost: the run goes on without it from its last checkpoint, and takes it in again when it is back."""

from __future__ import annotations

import re

import pytest

from hosts.clusters import Cluster
from hosts.machines import Running

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]

STEPS = 24


def losses(run: Running) -> dict[int, list[tuple[int, float]]]:
    """Step → (ranks, loss) of each attempt that did it."""
    found: dict[int, list[tuple[int, float]]] = {}
    for step, ranks, loss in re.findall(r"step (\d+), (\d+) ranks, loss (\S+)", run.output):
        found.setdefault(int(step), []).append((int(ranks), float(loss)))
    return found


def test_a_run_goes_on_without_a_host_and_takes_it_in_again(cluster: Cluster) -> None:
    count = len(cluster.hosts)
    last = cluster.hosts[-1]
    cluster.harmed(last)
    folder, arguments = cluster.shared_here / "kept", (f"{cluster.shared}/kept", str(STEPS), "8", "14")
    folder.mkdir()
    folder.chmod(0o777)
    options = ("--join-timeout", "15")
    nodes = f"{count - 1}:{count}"
    runs = [cluster.node(n, "kept.py", *arguments, nodes=nodes, options=options) for n in range(count)]
    runs[0].until(f"step 7, {count} ranks")
    last.kill()
    (folder / "8").touch()
    runs[0].until(f"step 13, {count - 1} ranks")
    last.renew()
    again = cluster.node(count - 1, "kept.py", *arguments, nodes=nodes, options=options)
    again.until("taken in at its Keeper's next checkpoint")
    (folder / "14").touch()
    Cluster.ended([*runs[:-1], again], 0)
    found = losses(runs[0])
    assert sorted(found) == list(range(STEPS)), runs[0].output
    assert found[STEPS - 1][-1][0] == count, runs[0].output
    for step, values in found.items():  # those that were done twice, with another number of ranks
        assert max(v for _, v in values) - min(v for _, v in values) < 1e-6, step
    assert [command for host in cluster.hosts for command in host.left()] == []
