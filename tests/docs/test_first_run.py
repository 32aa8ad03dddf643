"""The command for a GPU that is there for minutes writes its report as it goes, and goes on where it was stopped."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import warm

FIRST_RUN = Path(__file__).parents[2] / "benchmarks" / "gpus" / "first_run"
STOPPED = {"part": "nccl", "what": "ends well", "found": "no end after 45 s", "target": "status 0", "holds": False}
MARKS = "# Here\n<!-- results -->\n<!-- end of results -->\n"


@pytest.mark.slow
def test_a_report_is_written_part_by_part_and_gone_on_with(tmp_path: Path) -> None:
    page, kept = tmp_path / "report.md", tmp_path / "found.json"
    page.write_text(MARKS)

    def run(*parts: str) -> str:
        command = [warm.python(), str(FIRST_RUN), "--device-type", "cpu", "--output", str(page), "--kept", str(kept)]
        done = subprocess.run([*command, *parts], capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "NCCL between ranks" in run("nccl")
    assert "| nccl | all-reduce of one rank" in page.read_text()
    assert {line["part"] for line in json.loads(kept.read_text())} == {"nccl"}
    told = run("nccl", "memory")
    assert f"nccl: is in {kept}" in told
    text = page.read_text()
    assert text.startswith("# Here")
    assert "| nccl |" in text
    assert "| memory |" in text
    kept.write_text(json.dumps([*json.loads(kept.read_text()), STOPPED]))
    assert "NCCL between ranks" in run("nccl")  # it had not come to its end
    assert {line["part"] for line in json.loads(kept.read_text())} == {"nccl", "memory"}
    assert "ends well" not in kept.read_text()
    assert "no time is left; the same command goes on with it" in run("nccl", "memory", "copies", "--seconds", "0")
