"""docker/compose.yml as it is: containers find their places by themselves, are healthy, and train."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hosts.containers import COMPOSE, NAME, SCRIPTS, up
from hosts.machines import run

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
LIMIT = 250.0  # seconds
STEPS = "800"  # they, and the start of the ranks, take longer than the five seconds between looks at their health


def _state(name: str) -> dict[str, object]:
    return dict(json.loads(run("docker", "inspect", "--format", "{{json .State}}", name)))


def test_a_cluster_of_containers_finds_itself_is_healthy_and_trains(on_docker: bool) -> None:
    if not on_docker:
        pytest.skip("there is no engine: hosts are network namespaces")
    count = int(os.environ.get("ACTORFLOW_NODES", "4"))
    scripts = str(Path(__file__).parent / "scripts")
    settings = {"SCRIPTS": scripts, "SCRIPT": f"{SCRIPTS}/steps.py", "ARGUMENTS": STEPS}
    with up(f"{NAME}-whole", count, COMPOSE, **settings) as names:
        assert len(names) == count
        healthy: set[str] = set()
        deadline = time.monotonic() + LIMIT
        while any(_state(name)["Running"] for name in names):
            healthy |= {name for name in names if _state(name)["Health"]["Status"] == "healthy"}  # type: ignore[index]
            assert time.monotonic() < deadline, "\n".join(run("docker", "logs", name) for name in names)
            time.sleep(0.2)
        printed = [run("sh", "-c", f"docker logs {name} 2>&1") for name in names]
        assert [_state(name)["ExitCode"] for name in names] == [0] * count, "\n".join(printed)
        masters = [text for text in printed if f"step {STEPS}, loss" in text]
        assert len(masters) == 1, printed
        for n in range(count):  # each has found another place
            assert sum(f"node {n} of {count}, rank {n};" in text for text in printed) == 1, printed
        assert healthy == set(names)
