"""The folder of logs that nobody named: gone after a run that went well, there and named after one that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm

SCRIPT = """
import sys
from actorflow.control.cluster import current

if current().rank == 1:
    print("rank 1 was here")
    if sys.argv[1] == "raise":
        raise ValueError("no luck")
"""


@pytest.mark.parametrize(("how", "status"), [("pass", 0), ("raise", 1)])
def test_a_temporary_folder_of_logs_is_kept_where_the_run_failed(tmp_path: Path, how: str, status: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", str(script), "--devices", "2", "--", how],
        capture_output=True, text=True, timeout=250, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    left = list(tmp_path.glob("actorflow-logs-*"))
    if status == 0:
        assert left == []
        assert "kept where the run fails, or with --log-dir" in done.stderr
        return
    (folder,) = left
    assert (folder / "rank1.stdout.log").read_text() == "rank 1 was here\n"
    assert f"logs of this node's ranks are in {folder}" in done.stderr
