"""Traced runs that fail or are interrupted: what was recorded up to then is there, and says that it was cut short."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import warm
from actorflow.cli import main
from actorflow.rendezvous import failure
from actorflow.rendezvous.failure import FailureCallbacks
from actorflow.tracing import folder
from actorflow.tracing.chrome import events
from actorflow.tracing.folder import RankInfo, RankTrace
from actorflow.tracing.partial_trace import merge_rank_traces, trace_note
from tracing.traced import recorded

STEPS = 4
SCRIPT = f"""
import os, sys, time
import torch
import torch.nn.functional as F
import actorflow as flow
from actorflow.rendezvous import failure

failure.CALLBACK_SECONDS = 100.0  # a busy machine takes more than usual to write a trace
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function(type="train")
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for _ in range({STEPS}):
    loss = float(step(torch.randn(8, 16), torch.zeros(8, dtype=torch.int64)))
model[0].weight.detach()  # a loss is there before the optimizer is done, and this is not
open(sys.argv[2] + str(flow.env.get_rank()), "w").close()
if sys.argv[1] == "raise" and flow.env.get_rank() == 1:
    while not os.path.exists(sys.argv[2] + "0"):
        time.sleep(0.01)
    raise ValueError("no luck")
if sys.argv[1] == "wait":
    while True:
        float(step(torch.randn(8, 16), torch.zeros(8, dtype=torch.int64)))
step(torch.randn(8, 16), torch.zeros(8, dtype=torch.int64))
"""

LAUNCHER = """
from actorflow.cli import main
from actorflow.launch import attempt, watch

attempt.SHUTDOWN = watch.GRACE = 100.0  # seconds, in which a rank of a busy machine writes its trace
main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    path.with_name("launcher.py").write_text(LAUNCHER)
    return path


def run(script: Path, *arguments: str) -> subprocess.Popen[str]:
    launcher = str(script.with_name("launcher.py"))
    command = [warm.python(), launcher, "run", str(script), "--device-type", "cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        command, text=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def steps_of(out: Path, rank: int) -> int:
    """How many steps a rank's own file has, each with all of its firings."""
    found = json.loads(folder.rank_file(str(out), rank).read_bytes())["traceEvents"]
    return len([e for e in found if e["ph"] == "X" and e["cat"] == "optimizer"])


def test_a_run_in_which_a_rank_raises_leaves_the_trace_of_all_ranks(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "traced"
    done = run(script, "--devices", "2", "--trace", str(out), "--", "raise", str(tmp_path / "up"))
    _, shown = done.communicate(timeout=250)
    assert done.returncode == 1
    assert re.search(r"raised ValueError: no luck \(train\.py:\d+: raise ValueError", shown)
    assert f"actorflow: the trace up to then is in {out}; look at it with: actorflow trace {out}" in shown
    assert [steps_of(out, rank) for rank in range(2)] == [STEPS, STEPS]
    trace_note = CliRunner().invoke(main, ["trace", str(out), "--text"])
    assert trace_note.exit_code == 0, trace_note.output
    assert f"{STEPS} steps recorded" in trace_note.output
    assert "cut short rank 1 (" in trace_note.output
    assert "raised ValueError: no luck" in trace_note.output
    assert folder.read(str(out)).cut.startswith("rank 1 (")  # in trace.json, which is made of the ranks' files


@pytest.mark.parametrize("devices", [1, 2])
def test_an_interrupted_run_leaves_its_trace(script: Path, tmp_path: Path, devices: int) -> None:
    out, mark = tmp_path / "traced", tmp_path / "up"
    done = run(script, "--devices", str(devices), "--trace", str(out), "--", "wait", str(mark))
    for path in (Path(f"{mark}{rank}") for rank in range(devices)):
        while not path.exists():
            assert done.poll() is None
            time.sleep(0.02)
    done.send_signal(signal.SIGINT)
    _, shown = done.communicate(timeout=250)
    assert done.returncode == 130
    assert "Traceback" not in shown
    assert f"the trace up to then is in {out};" in shown, shown  # of all ranks
    assert all(steps_of(out, rank) >= STEPS for rank in range(devices))
    merge_rank_traces(str(out))
    assert "interrupted (Ctrl-C)" in folder.read(str(out)).cut


@pytest.fixture
def cut(tmp_path: Path) -> str:
    """A folder in which rank 1 left nothing."""
    plan, parts = recorded()
    here = str(tmp_path)
    folder.write_plan(here, 0, plan)
    info = RankInfo(0, "here", 1, 0)
    folder.write_rank(here, RankTrace(info, "train.py", "0.1", "rank 1 was killed by SIGKILL", events(parts[0])))
    return here


def test_a_rank_that_left_nothing_is_named(cut: str) -> None:
    said = trace_note(cut, range(2))
    assert said.startswith(f"the trace up to then is in {cut}, without rank 1, of which nothing is there; look at it")
    done = CliRunner().invoke(main, ["trace", cut])
    assert done.exit_code == 1
    assert "rank 1 left no recording, and the run was cut short: rank 1 was killed by SIGKILL" in done.output
    assert "trace.json has what there is" in done.output
    found = folder.read(cut)
    assert found.lost == [1]
    assert len([e for e in found.events if e["ph"] == "X" and e["args"]["firing"] == 0]) > 0


def test_a_file_that_was_broken_off_is_none(cut: str) -> None:
    path = folder.rank_file(cut, 0)
    path.write_bytes(path.read_bytes()[:-20])
    merge_rank_traces(cut)
    assert not Path(cut, folder.MERGED).exists()
    assert folder.read_ranks(cut) == []


def test_what_another_run_left_is_not_taken_for_this_ones(cut: str) -> None:
    for name in ("notes.txt", folder.MERGED, "trace.html"):
        Path(cut, name).touch()
    folder.clear(cut)
    assert [path.name for path in Path(cut).iterdir()] == ["notes.txt"]
    assert trace_note(cut, range(2)) == ""


def test_a_run_that_went_well_is_not_made_anew(cut: str) -> None:
    folder.write_rank(cut, RankTrace(RankInfo(0, "here", 1, 0), "train.py", "0.1", "", []))
    merge_rank_traces(cut)
    assert not Path(cut, folder.MERGED).exists()


def test_what_is_done_last_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "CALLBACK_SECONDS", 0.1)
    last, hold, written = FailureCallbacks(), threading.Event(), threading.Event()
    last.add(written.set)
    last.add(hold.wait)
    start = time.monotonic()
    last.start().wait()  # would not return, if it waited for all
    assert time.monotonic() - start >= 0.1
    assert written.wait(250)
    hold.set()
