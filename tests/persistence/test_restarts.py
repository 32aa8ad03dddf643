"""A run whose ranks fail is started again, and goes on from its last checkpoint bit for bit (``--max-restarts``)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import warm

SCRIPT = Path(__file__).parent.parent / "scripts" / "restarted.py"
Losses = dict[int, set[str]]  # step → the losses that attempts have found, as hexadecimal text


def run(
    folder: Path,
    *arguments: object,
    devices: int = 2,
    restarts: int = 0,
    script: Path = SCRIPT,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "actorflow", "run", str(script), "--devices", str(devices)]
    command += ["--max-restarts", str(restarts), *options, "--", str(folder / "checkpoints"), str(folder / "losses")]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def losses(folder: Path) -> tuple[Losses, list[int]]:
    """The losses of each step, and the attempt that has finished last for each."""
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    found: Losses = {}
    for number, loss, *_ in lines:
        found.setdefault(int(number), set()).add(loss)
    return found, [int(attempt) for _, _, attempt, _ in lines]


def undisturbed(folder: Path, *arguments: object, devices: int = 2) -> Losses:
    folder.mkdir()
    done = run(folder, *arguments, devices=devices)
    assert done.returncode == 0, done.stderr
    found, _ = losses(folder)
    assert all(len(values) == 1 for values in found.values())
    return found


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_that_are_killed_start_again_and_end_bit_for_bit_as_if_nothing_had_been(
    devices: int, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "whole", 24, 3, devices=devices)
    last = devices - 1
    done = run(tmp_path, 24, 3, f"0:{last}:save", "1:0:13", f"2:{last}:20", devices=devices, restarts=3)
    assert done.returncode == 0, done.stderr
    found, attempts = losses(tmp_path)
    assert found == expected
    assert sorted({*attempts}) == [0, 1, 2, 3]
    assert "all ranks start again: restart 3 of 3" in done.stderr


def test_a_run_ends_when_no_restart_is_left_with_the_status_and_the_logs_of_each_attempt(tmp_path: Path) -> None:
    script = tmp_path / "always.py"
    script.write_text(
        "import os, sys\n"
        "from actorflow.control.cluster import current\n"
        "run = current()\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], 'of', os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        "sys.stdout.flush()\n"
        "run.scatter('all have said so', None if run.rank else [b'', b''])\n"
        "if run.rank == 1:\n"
        "    sys.exit(7)\n"
        "run.gather('never', b'')\n"
    )
    done = run(tmp_path, restarts=2, script=script, options=["--log-dir", str(tmp_path / "logs")])
    assert done.returncode == 7
    assert [line for line in done.stdout.splitlines() if line.startswith("attempt")] == [
        "attempt 0 of 2",
        "attempt 1 of 2",
        "attempt 2 of 2",
    ]
    assert done.stderr.count("ended with exit status 7") >= 3
    assert "no restart is left (--max-restarts 2)" in done.stderr
    for folder, number in (("logs", 0), ("logs/attempt-1", 1), ("logs/attempt-2", 2)):
        assert f"attempt {number}" in (tmp_path / folder / "rank1.stdout.log").read_text()


def test_a_signal_to_the_launcher_ends_a_run_with_restarts_for_good(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import sys, threading\n"
        "from actorflow.control.cluster import current\n"
        "run = current()\n"
        "if run.rank == 0:\n"
        "    print('up', flush=True)\n"
        "threading.Event().wait()\n"
    )
    command = [warm.python(), "-m", "actorflow", "run", str(script), "--devices", "2", "--max-restarts", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=250)
    assert process.returncode == 128 + signal.SIGTERM
    assert "start again" not in errors


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_restarts_at_random_moments_change_nothing(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "whole", 500, 10)
    draw = random.Random(0)
    kills = []
    for attempt in range(50):  # in a step; every other time sooner, if it so happens: in imports, a compilation, a save
        kills.append(f"{attempt}:{draw.randrange(2)}:+{draw.randrange(1, 20)}")
        if attempt % 2:
            kills.append(f"{attempt}:{draw.randrange(2)}:~{draw.uniform(0, 4):.2f}")
    done = run(tmp_path, 500, 10, *kills, restarts=50)
    assert done.returncode == 0, done.stderr[-5000:]
    found, attempts = losses(tmp_path)
    assert found == expected
    assert done.stderr.count("was killed by SIGKILL") >= 45
    assert len({*attempts}) > 20  # those that have come to the end of a step
