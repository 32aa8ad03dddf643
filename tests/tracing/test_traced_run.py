"""A run of two processes that is traced: its files, on one clock, and what ``actorflow trace`` makes of them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

import warm
from actorflow.cli import main
from actorflow.tracing import folder
from actorflow.tracing.folder import TraceData
from actorflow.tracing.measurement import measure
from tracing.chrome_format import faults

STEPS = 5
SCRIPT = f"""
import torch
import torch.nn.functional as F
import actorflow as flow

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flow.place(model, {{"0": flow.placement("cpu", [0]), "1": flow.placement("cpu", [1])}})

@flow.global_function(micro_batches=2)
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for _ in flow.progress(range({STEPS})):
    loss = step(torch.randn(8, 16), torch.zeros(8, dtype=torch.int64))
print(float(loss))
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run whose ranks behave as if they were on two machines, and what its terminal showed."""
    place = tmp_path_factory.mktemp("run")
    script, out = place / "train.py", place / "traced"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", script, "--devices", "2", "--no-local", "--live", "--trace", out],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    return out, done.stderr


def read(path: Path) -> TraceData:
    return folder.read(str(path))


def test_the_files_of_a_traced_run(traced: tuple[Path, str]) -> None:
    names = {path.name for path in traced[0].iterdir()}
    assert names >= {"rank0.txt", "rank1.txt", "rank0.json", "rank1.json", "trace.json", "plan0.pb"}
    for rank in range(2):
        own = json.loads((traced[0] / f"rank{rank}.json").read_bytes())["traceEvents"]
        assert {e["pid"] for e in own} == {rank}


def test_all_ranks_are_in_one_trace_that_is_of_the_chrome_format(traced: tuple[Path, str]) -> None:
    assert list(faults(json.loads((traced[0] / "trace.json").read_bytes()))) == []
    found = read(traced[0])
    plan = found.ran[0].plan
    shown = Counter((e["pid"], e["args"]["actor"], e["args"]["firing"]) for e in found.events if e["ph"] == "X")
    assert shown == Counter((a.rank, a.id, n) for a in plan.actors for n in range(STEPS * a.rate))


def test_ranks_of_different_machines_are_on_one_clock_to_within_their_doubt(traced: tuple[Path, str]) -> None:
    found = read(traced[0])
    doubt = {r.rank: r.doubt for r in found.ranks}
    assert doubt[0] == 0
    assert 0 < doubt[1] < 1e9  # it asked, and got answers
    kept = measure(found, found.ran[0])
    for register in kept.plan.registers:
        producer = kept.plan.actor(register.producer)
        if producer.rank != kept.plan.home(register):
            for token, at in enumerate(kept.arrivals[register.id]):  # no token is there before its send began
                sent = kept.starts[producer.id][(token + 1) * register.fill - 1]
                assert at >= sent - 2 * doubt[1]


def test_the_command_says_what_the_run_waited_for_and_writes_a_page(traced: tuple[Path, str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["trace", str(traced[0]), "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert f"{STEPS} steps recorded" in done.output
    assert " measured, " in done.output
    assert " forecast on " in done.output
    assert "  waited    " in done.output
    assert "clocks    of different machines agree to" in done.output
    assert "costs that were forecast worst" in done.output
    assert "What the run waited for" in page.read_text()


def test_a_page_that_a_full_disk_has_no_room_for_leaves_the_one_that_was_there(
    traced: tuple[Path, str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("the old page")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        done = CliRunner().invoke(main, ["trace", str(traced[0]), "--out", str(page)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 1
    assert "page.html' cannot be written: File too large; make room there" in done.output
    assert page.read_text() == "the old page"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "page.pdf"], "'page.pdf' does not end in .html"),
        (["--plan", "7"], "7 is none of the plans [0]"),
        (["--out", "/proc/page.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said(traced: tuple[Path, str], arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["trace", str(traced[0]), *arguments])
    assert done.exit_code != 0
    assert said in done.output


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    (tmp_path / "file").touch()
    for option in ("--trace", "--log-dir"):
        done = CliRunner().invoke(main, ["run", str(script), option, str(tmp_path / "file" / "folder")])
        assert done.exit_code == 2
        assert "nothing can be written to the folder" in done.output
        assert "started" not in done.output


def test_the_terminal_gets_plain_lines_with_the_loss(traced: tuple[Path, str]) -> None:
    lines = [line for line in traced[1].splitlines() if line.startswith("actorflow: step ")]
    assert lines
    assert f"step {STEPS} of {STEPS}, " in lines[-1]
    assert "samples/s, loss " in lines[-1]
