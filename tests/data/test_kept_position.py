"""A run that ends abruptly goes on with the batch that would have come, on other ranks and other workers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import warm
from scripts.kept_position import STEPS

SCRIPT = Path(__file__).parent.parent / "scripts" / "kept_position.py"
Steps = dict[int, tuple[float, int]]  # step → loss, position


def run(folder: Path, devices: int, last: int, workers: int, kind: str, status: int = 0) -> Steps:
    command = [warm.python(), "-m", "actorflow", "run", str(SCRIPT), "--devices", str(devices), "--"]
    done = subprocess.run(
        [*command, str(folder), str(last), str(workers), kind],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode != 0) == (status != 0), done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {int(number): (float(loss), int(position)) for number, loss, position in lines}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("own", marks=pytest.mark.slow), "existing"])
def test_the_position_is_kept(kind: str, tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "whole", 1, -1, 1, kind)
    begun = run(tmp_path / "kept", 2, 12, 0, kind, status=3)
    rest = run(tmp_path / "kept", 3, -1, 2, kind)
    assert list(begun) == [*range(13)]
    first = next(iter(rest))
    assert 0 < first <= 13
    assert list(rest) == [*range(first, STEPS)]
    for found in (begun, rest):
        for number, (loss, position) in found.items():
            expected, at = undisturbed[number]
            assert abs(loss - expected) <= 1e-9, (number, loss, expected)
            assert position == at
