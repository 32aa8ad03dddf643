"""What is said where the disk with the ranks' logs has no room left."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm
from actorflow.launch import log_disk
from actorflow.launch.log_disk import full_disk
from cluster.runs import Run

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder with a disk of its own, of 64 KiB."""
    folder = tmp_path / "logs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_only_an_error_of_a_full_disk_of_logs_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_disk, "is_full", lambda folder: folder == "/logs")
    wrapped = RuntimeError("no")
    wrapped.__cause__ = FULL
    for error in (FULL, wrapped):
        assert full_disk(error, 3, "/logs").startswith("the disk with the logs of rank 3 is full (/logs): make room")
    assert full_disk(FULL, 3, "/other") == ""  # the script's own file
    assert full_disk(FULL, 0, "/logs") == ""  # which prints to the terminal
    assert full_disk(OSError(errno.ENOENT, "no"), 3, "/logs") == ""
    assert full_disk(RuntimeError("no"), 3, "/logs") == ""


def test_a_rank_whose_logs_have_no_room_is_named_and_what_to_do(start: Callable[..., Run], small: Path) -> None:
    script = "import actorflow as flow\nflow.env.get_rank()\nfor i in range(200):\n    print('x' * 2000, flush=True)\n"
    run = start(script, "--devices", "2", "--log-dir", str(small), python=warm.python())
    assert run.wait() == 1
    assert f"the disk with the logs of rank 1 is full ({small}): make room there" in run.output
    assert "script.py:4: print('x' * 2000, flush=True)" in run.output
    assert f"actorflow: the disk of {small} is full: what ranks print there is lost" in run.output


def test_a_run_that_goes_well_tells_that_logs_are_lost(start: Callable[..., Run], small: Path) -> None:
    script = "import logging\nfor i in range(200):\n    logging.warning('x' * 2000)\n"
    run = start(script, "--devices", "2", "--log-dir", str(small), python=warm.python())
    assert run.wait() == 0
    assert f"actorflow: the disk of {small} is full: what ranks print there is lost" in run.output
