"""Hosts of a cluster: containers (ACTORFLOW_HOSTS=docker) or, without an engine, network namespaces of this machine.

ACTORFLOW_NODES says how many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hosts.clusters import Cluster
from hosts.containers import SCRIPTS as MOUNTED
from hosts.containers import SHARED, containers
from hosts.machines import Host
from hosts.namespaces import namespaces

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def on_docker() -> bool:
    """Whether hosts are containers."""
    kind = os.environ.get("ACTORFLOW_HOSTS", "namespaces")
    assert kind in ("docker", "namespaces"), kind
    return kind == "docker"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts see and can write to."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o777)  # the user of containers is another one
    return folder


@pytest.fixture(scope="session")
def machines(on_docker: bool, shared: Path) -> Iterator[Sequence[Host]]:
    """The hosts, which all tests share."""
    count = int(os.environ.get("ACTORFLOW_NODES", "4"))
    assert count in (2, 4), "ACTORFLOW_NODES is 2 or 4"
    with containers(count, shared) if on_docker else namespaces(count) as made:
        yield made


@pytest.fixture(scope="session")
def whole(machines: Sequence[Host], on_docker: bool, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """All hosts as one cluster."""
    outputs = tmp_path_factory.mktemp("outputs")
    if on_docker:
        return Cluster(machines, MOUNTED, (shared, SHARED), outputs, {"PYTHONPATH": "/opt/examples"})
    cache = {"ACTORFLOW_CACHE": str(outputs / "cache")}
    return Cluster(machines, str(HERE / "scripts"), (shared, str(shared)), outputs, cache)


@pytest.fixture
def cluster(whole: Cluster) -> Iterator[Cluster]:
    """The cluster, with nothing running on it before and after."""
    yield whole
    whole.close()
