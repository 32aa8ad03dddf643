"""Random scripts, which change what a step can reach in random ways, do as jobs what they do in plain PyTorch.

They run in a process of their own: what they change of torch and of Python is nobody else's.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "random_scripts.py"
FEW, MANY, AT_ONCE = 20, 1000, 25
FINE = {"same", "refused", "refused as documented", "skipped"}


def check(seeds: range) -> None:
    """All of them are as eagerly or refused with their line; of those that are not, say what they are."""
    command = [sys.executable, str(SCRIPT), str(seeds.start), "--until", str(seeds.stop)]
    env = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    counts = ast.literal_eval(ran.stdout.splitlines()[-1])
    assert counts.keys() <= FINE, f"run one alone: python {SCRIPT} SEED (--shrink leaves parts out)\n{ran.stdout}"
    assert counts.get("same", 0) > len(seeds) // 3, ran.stdout


@pytest.mark.parametrize("first", range(0, FEW, 10))
def test_random_scripts_do_as_jobs_what_they_do_eagerly(first: int) -> None:
    check(range(first, first + 10))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
def test_many_random_scripts_do_as_jobs_what_they_do_eagerly(first: int) -> None:
    check(range(first, first + AT_ONCE))
