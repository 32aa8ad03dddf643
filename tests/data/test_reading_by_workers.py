"""Workers that read for several iterations at a time, and what they run before they read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import warm

SCRIPT = Path(__file__).parent.parent / "scripts" / "read_by_workers.py"


def test_workers_read_all_rows_for_whichever_iteration_wants_them() -> None:
    run = subprocess.run([warm.python(), str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    *held, said, at = run.stdout.splitlines()
    assert held == [
        "two iterations at a time",
        "batches of an epoch that has ended",
        "a loop in a loop",
        "a copy",
        "a dataset that workers have prepared",
        "workers of a loader that is gone",
        "workers that end",
    ]
    assert re.fullmatch(
        r"the loader of \S*read_by_workers.py:\d+: worker_init_fn of worker 0 raised OSError: no such archive", said
    )
    assert re.fullmatch(r"  \S*read_by_workers.py:\d+: raise OSError\(.no such archive.\)  \(in fails\)", at)
