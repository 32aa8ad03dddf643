"""Hosts with nearly no /dev/shm, as containers have it: a run does without, and what does not says so."""

from __future__ import annotations

import pytest

from hosts.clusters import Cluster

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]


def test_ranks_of_one_host_share_more_memory_than_its_dev_shm_has(cluster: Cluster) -> None:
    host = cluster.hosts[0]
    kept = cluster.on(host, "python", "-c", "import os; s = os.statvfs('/dev/shm'); print(s.f_frsize * s.f_blocks)")
    path = f"{cluster.scripts}/shared.py"
    program = cluster.on(host, "actorflow", "run", path, "--devices", "2", "--log-dir", "logs")
    Cluster.ended([kept, program], 0)
    limit, _, used = int(kept.output), *program.output.split()[-2:]
    assert 0 < limit < int(used)


@pytest.mark.slow
def test_a_loader_that_finds_no_room_in_dev_shm_is_told_how_to_get_more(cluster: Cluster) -> None:
    host = cluster.hosts[0]
    path = f"{cluster.scripts}/loader.py"
    program = cluster.on(host, "actorflow", "run", path, "--devices", "1", "--log-dir", "logs")
    assert program.wait() == 1
    for part in ("/dev/shm, through which loader workers and NCCL pass tensors, holds 0.1 MB here", "--shm-size",
                 "--ipc=host"):  # fmt: skip
        assert part in program.output, program.output
