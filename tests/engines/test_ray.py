"""`actorflow run --on ray` on a local cluster of several nodes: placed, streamed, and ended with its cause."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from actorflow.launch.ray_run import RayNode, RayRun, run_on_ray, shape_on_ray
from actorflow_compiler.core.errors import ClusterError
from engines.started import ACTORFLOW, ENV, LIMIT, SCRIPT, expected, losses, places, processes_left, written

ON_RAY = (*ACTORFLOW, "run", str(SCRIPT), "--on", "ray")


def on_a_cluster(test: Any) -> Any:
    return pytest.mark.hosts(pytest.mark.timeout(600)(test))


# -- the shape of a run ----------------------------------------------------------------------------

GPUS = [RayNode("a", 16, 8), RayNode("b", 16, 8), RayNode("head", 4, 0)]


@pytest.mark.parametrize(
    ("nodes", "devices", "nnodes", "gpus", "shape"),
    [
        (GPUS, None, None, True, (2, 8, True)),
        (GPUS, 4, None, True, (2, 4, True)),
        (GPUS, None, 1, True, (1, 8, True)),
        (GPUS, None, None, False, (3, 1, False)),
        (GPUS, 16, None, False, (2, 16, False)),
        ([RayNode("a", 2, 0), RayNode("driver", 0, 0)], None, None, True, (1, 1, False)),
    ],
)
def test_a_run_takes_the_nodes_that_have_its_devices(
    nodes: list[RayNode], devices: int | None, nnodes: int | None, gpus: bool, shape: tuple[int, int, bool]
) -> None:
    assert shape_on_ray(nodes, devices, nnodes, gpus) == shape


def test_unequal_numbers_of_gpus_are_shown() -> None:
    with pytest.raises(ClusterError, match=r"different numbers of GPUs \(a has 8, b has 4\).*give --devices"):
        shape_on_ray([RayNode("a", 16, 8), RayNode("b", 16, 4)], None, None, True)


@pytest.mark.parametrize(
    ("devices", "nnodes", "text"),
    [(9, None, "has 0 nodes with 9 GPUs, and 1 is needed"), (8, 3, "has 2 nodes with 8 GPUs, and 3 are needed")],
)
def test_a_cluster_that_is_too_small_is_shown(devices: int, nnodes: int | None, text: str) -> None:
    with pytest.raises(ClusterError, match=f"{text}.*a has 8, b has 8, head has 0"):
        shape_on_ray(GPUS, devices, nnodes, True)


def test_without_a_cluster_ray_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    with pytest.raises(
        ClusterError, match=r"found no Ray cluster to run on: start one \(`ray start --head`.*RAY_ADDRESS="
    ):
        run_on_ray(RayRun("train.py", (), (), None, None))


# -- on a cluster ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The variables with which a command finds a cluster of two nodes with three CPUs each."""
    utils: Any = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'actorflow[ray]'")
    node = {"num_cpus": 3, "num_gpus": 0, "object_store_memory": 100 << 20}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
            patch.setenv(name, ENV[name])  # Ray's workers take them from its daemons
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = utils.Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            made.add_node(**node)
            made.wait_for_nodes()
            yield {**ENV, "RAY_ADDRESS": str(made.address)}
        finally:
            made.shutdown()


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ON_RAY, *arguments], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=LIMIT,
    )  # fmt: skip


@on_a_cluster
def test_every_device_is_an_actor_and_rank_0_is_seen_here(cluster: dict[str, str], tmp_path: Path) -> None:
    done = run(cluster, "--devices", "2", "--log-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "4 Ray actors on 2 nodes; rank 0 is on " in done.stdout
    assert losses(done.stdout) == pytest.approx(expected(), abs=2e-6)
    assert places(done.stdout) == [(0, 4, 0, 2)]
    others = written(tmp_path, 4)
    assert [places(others[rank]) for rank in (1, 2, 3)] == [[(1, 4, 0, 2)], [(2, 4, 1, 2)], [(3, 4, 1, 2)]]
    assert processes_left() == []


@on_a_cluster
def test_a_rank_that_fails_ends_the_run_with_its_cause(cluster: dict[str, str]) -> None:
    done = run(cluster, "--devices", "1", "--", "die", "1")
    assert done.returncode == 1
    assert re.search(r"rank 1 \(.*\) raised RuntimeError: this rank was told to die \(train.py:\d+", done.stdout)
    assert processes_left() == []


@on_a_cluster
def test_an_actor_that_is_killed_ends_the_run_with_rays_reason(cluster: dict[str, str], tmp_path: Path) -> None:
    with _waiting(cluster, tmp_path) as (process, ranks):
        launcher = psutil.Process(ranks[1]).parent()
        launcher.parent().kill()  # the actor
        said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert re.search(r"the Ray actor of rank 1 on .* was lost: .*died", said), said
    assert processes_left() == []


@on_a_cluster
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_ended_from_its_terminal_leaves_no_process(
    cluster: dict[str, str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with _waiting(cluster, tmp_path) as (process, _):
        process.send_signal(number)
        said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == status, said
    assert f"ended by {number.name}" in said
    assert processes_left() == []


@on_a_cluster
def test_a_run_whose_command_is_killed_leaves_no_process(cluster: dict[str, str], tmp_path: Path) -> None:
    with _waiting(cluster, tmp_path) as (process, _):
        process.kill()
        process.wait(LIMIT)
        deadline = time.monotonic() + LIMIT
        while processes_left():  # Ray ends what its driver leaves
            assert time.monotonic() < deadline
            time.sleep(0.1)


@on_a_cluster
def test_bad_input_on_ray_is_told_at_once(cluster: dict[str, str]) -> None:
    many = run(cluster, "--devices", "4")
    assert many.returncode == 2
    assert "the Ray cluster has 0 nodes with 4 CPUs, and 1 is needed" in " ".join(many.stdout.split())


@contextmanager
def _waiting(env: dict[str, str], folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two ranks that wait for ever, and their process ids."""
    command = [*ON_RAY, "--devices", "1", "--", "wait", str(folder)]
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        files = [folder / f"rank{rank}" for rank in (0, 1)]
        deadline = time.monotonic() + LIMIT
        while not all(file.exists() for file in files):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)  # files of others tell nobody
        yield process, [int(file.read_text()) for file in files]
    finally:
        process.kill()
        process.communicate()
