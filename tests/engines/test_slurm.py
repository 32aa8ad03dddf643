"""`srun actorflow run` on a real Slurm: every process finds its place, node 0, a port and a secret by itself."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorflow.rendezvous.engines import hosts_of
from engines.slurm_cluster import Slurm, slurm
from engines.started import ACTORFLOW, ENV, LIMIT, SCRIPT, expected, losses, places, processes_left, written

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=3) as made:
        yield made


def srun(cluster: Slurm, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    own = {name: ENV[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    return cluster.run("srun", *arguments, env={**own, "HOME": str(home)}, limit=LIMIT)


def run(folder: Path) -> tuple[str, ...]:
    return (*ACTORFLOW, "run", str(SCRIPT), "--log-dir", str(folder / "logs"))


def test_one_task_for_each_node_starts_the_nodes_devices(cluster: Slurm, tmp_path: Path) -> None:
    done = srun(cluster, "--nodes=2", "--ntasks-per-node=1", *run(tmp_path), "--devices", "2", home=tmp_path)
    assert done.returncode == 0, done.stdout
    assert losses(done.stdout) == pytest.approx(expected(), abs=2e-6)
    assert places(done.stdout) == [(0, 4, 0, 2)]
    others = written(tmp_path / "logs", 4)
    assert [places(others[rank]) for rank in (1, 2, 3)] == [[(1, 4, 0, 2)], [(2, 4, 1, 2)], [(3, 4, 1, 2)]]
    assert all(losses(text) == losses(done.stdout) for text in others.values())


def test_one_task_for_each_device_is_one_rank_wherever_slurm_puts_it(cluster: Slurm, tmp_path: Path) -> None:
    tasks = ("--nodes=2", "--ntasks-per-node=2", "--distribution=cyclic")
    done = srun(cluster, *tasks, *run(tmp_path), home=tmp_path)
    assert done.returncode == 0, done.stdout
    assert losses(done.stdout) == pytest.approx(expected(), abs=2e-6)
    others = written(tmp_path / "logs", 4)
    assert [places(others[rank]) for rank in (1, 2, 3)] == [[(1, 4, 0, 2)], [(2, 4, 1, 2)], [(3, 4, 1, 2)]]


def test_a_rank_that_fails_ends_the_step_with_its_cause_and_leaves_no_process(cluster: Slurm, tmp_path: Path) -> None:
    done = srun(cluster, "--nodes=2", "--ntasks-per-node=1", *run(tmp_path), "--", "die", "1", home=tmp_path)
    assert done.returncode != 0
    assert re.search(r"rank 1 \(.*\) raised RuntimeError: this rank was told to die \(train.py:\d+", done.stdout)
    assert processes_left() == []


def test_a_step_that_is_cancelled_leaves_no_process(cluster: Slurm, tmp_path: Path) -> None:
    command = ("srun", "--nodes=2", "--job-name=waits", *run(tmp_path), "--", "wait", str(tmp_path))
    env = {**cluster.env, "HOME": str(tmp_path), "PYTHONPATH": ENV["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    step = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        _until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)))
        cluster.run("scancel", "--name=waits", f"--signal={signal.SIGTERM.name}")
        step.communicate(timeout=60)
    finally:
        step.kill()
        step.wait()
    assert step.returncode != 0
    _until(lambda: not processes_left())


def test_bad_input_is_told_at_once(cluster: Slurm, tmp_path: Path) -> None:
    uneven = srun(cluster, "--nodes=2", "--ntasks=3", *run(tmp_path), home=tmp_path)
    assert uneven.returncode == 2
    assert "different numbers of processes on the nodes (SLURM_STEP_TASKS_PER_NODE=2,1)" in uneven.stdout
    half = srun(cluster, "--nodes=2", "env", "--unset=SLURM_NODEID", *run(tmp_path), home=tmp_path)
    assert half.returncode == 2
    assert "missing: SLURM_NODEID" in half.stdout
    flag = srun(cluster, "--nodes=2", *run(tmp_path), "--nnodes", "3", home=tmp_path)
    assert flag.returncode == 2
    assert "--nnodes 3 contradicts Slurm, which has started this process (SLURM_STEP_NUM_NODES=2)" in flag.stdout


def test_nodes_whose_homes_are_not_shared_turn_each_other_away(cluster: Slurm, tmp_path: Path) -> None:
    homes = 'export HOME=$1/$SLURM_NODEID; mkdir -p "$HOME"; shift; exec "$@"'
    apart = ("sh", "-c", homes, "sh", str(tmp_path))
    done = srun(cluster, "--nodes=2", *apart, *run(tmp_path), "--join-timeout", "12", home=tmp_path)
    assert done.returncode != 0
    assert "tokens differ. Give every node the same token (ACTORFLOW_TOKEN or --token-file)" in done.stdout


def test_our_reading_of_a_list_of_nodes_is_slurms_own(cluster: Slurm) -> None:
    for text in ("n[1-3]", "gpu[08-10,12],login", "r[1-2]n[01-02],x", "a[099-101],b7"):
        assert list(hosts_of(text)) == cluster.run("scontrol", "show", "hostnames", text).stdout.split()


def _until(there: object) -> None:
    assert callable(there)
    deadline = time.monotonic() + 90
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.1)  # files and processes of others tell nobody
