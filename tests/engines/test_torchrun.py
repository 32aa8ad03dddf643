"""`actorflow run` as torchrun's program: each of its processes starts one rank, and they find each other."""

from __future__ import annotations

from pathlib import Path

import pytest

import warm
from cluster.ranks import free_port
from engines.started import SCRIPT, expected, losses, places, processes_left, run, written

pytestmark = pytest.mark.timeout(400)
TORCHRUN = ("-m", "torch.distributed.run")


def test_each_of_torchruns_processes_is_a_rank_and_no_flag_says_which(tmp_path: Path) -> None:
    torchrun = [warm.python(), *TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "actorflow"]
    done = run([*torchrun, "run", str(SCRIPT), "--log-dir", str(tmp_path)])
    assert done.returncode == 0, done.stdout
    assert losses(done.stdout) == pytest.approx(expected(), abs=2e-6)
    assert places(done.stdout) == [(0, 2, 0, 1)]
    assert places(written(tmp_path, 2)[1]) == [(1, 2, 0, 1)]


@pytest.mark.slow
def test_a_rank_that_fails_ends_torchruns_run_with_its_cause(tmp_path: Path) -> None:
    torchrun = [warm.python(), *TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "actorflow"]
    done = run([*torchrun, "run", str(SCRIPT), "--log-dir", str(tmp_path), "--", "die", "1"])
    assert done.returncode != 0
    assert "rank 1" in done.stdout
    assert "raised RuntimeError: this rank was told to die (train.py:" in done.stdout
    assert processes_left() == []


@pytest.mark.slow
def test_a_node_whose_only_process_torchrun_has_started_starts_its_devices(tmp_path: Path) -> None:
    # nodes meet as on several hosts
    torchrun = [warm.python(), *TORCHRUN, "--standalone", "--nproc-per-node", "1", "-m", "actorflow"]
    done = run([*torchrun, "run", str(SCRIPT), "--devices", "2", "--log-dir", str(tmp_path)])
    assert done.returncode == 0, done.stdout
    assert losses(done.stdout) == pytest.approx(expected(), abs=2e-6)
    assert places(written(tmp_path, 2)[1]) == [(1, 2, 0, 1)]
