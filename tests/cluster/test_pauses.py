"""Whole runs in which a rank is stopped for a while, or for too long, or keeps Python's lock."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import warm
from cluster.ranks import LIMIT, SOON, free_port
from cluster.runs import Run

Start = Callable[..., Run]

# rank 0 waits after half of the steps until the test lets it go on: until then the others wait for it, or it for them
TRAIN = """
import os, pathlib, sys, time
import torch
import torch.nn.functional as F
import actorflow as flow

folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = flow.env.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
if how == "pipeline":
    flow.place(model, {"[01]": flow.placement("cpu", [0]), "2": flow.placement("cpu", [1])})

@flow.global_function(type="train")
def train_step(x):
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

losses = []
for step in range(120):
    losses.append(float(train_step(torch.randn(12, 8))))
    if not (folder / "goes").exists():
        time.sleep(0.02)
    if step == 3:
        (folder / f"up{rank}.part").write_text(str(os.getpid()))
        os.rename(folder / f"up{rank}.part", folder / f"up{rank}")
    while step == 100 and rank == 0 and not (folder / "goes").exists():
        time.sleep(0.05)
print("losses", [loss.hex() for loss in losses])
"""

# rank 1 keeps the lock, as an extension in C may, for longer than a rank may be silent
KEEPS = """
import ctypes
from actorflow.control.cluster import current

cluster = current()
if cluster.rank == 1:
    ctypes.PyDLL(None).sleep(14)
found = cluster.gather("done", str(cluster.rank).encode())
print("gathered", found)
"""


def losses(run: Run) -> str:
    found = re.search(r"losses \[.*\]", run.output)
    assert found is not None, run.output
    return found[0]


def until(run: Run, text: str) -> None:
    """Wait until the terminal shows a text."""
    deadline = time.monotonic() + LIMIT
    while text not in run.output:
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline, run.output
        time.sleep(0.05)


def pids(run: Run, folder: Path, count: int = 2) -> list[int]:
    """The processes of the ranks, once all have made some steps."""
    return [int(pid) for pid in run.wait_for([folder / f"up{rank}" for rank in range(count)])]


def begin(start: Start, folder: Path, how: str, *options: str, python: str = sys.executable) -> Run:
    folder.mkdir()
    return start(TRAIN, "--devices", "2", *options, "--", str(folder), how, python=python)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("how", ["data", "pipeline"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_for_a_while_is_named_and_the_run_goes_on_with_the_same_losses(
    start: Start, tmp_path: Path, how: str, rank: int
) -> None:
    steady = begin(start, tmp_path / "steady", how, python=warm.python())
    (tmp_path / "steady/goes").touch()
    assert steady.wait() == 0
    run = begin(start, tmp_path / "paused", how, python=warm.python())
    pid = pids(run, tmp_path / "paused")[rank]
    os.kill(pid, signal.SIGSTOP)
    until(run, "has not answered")
    os.kill(pid, signal.SIGCONT)
    until(run, f"rank {rank} answers again after ")
    (tmp_path / "paused/goes").touch()
    assert run.wait() == 0
    assert losses(run) == losses(steady)
    (named,) = re.findall(r"actorflow: (.* has not answered .*)", run.output)
    assert re.match(rf"rank {rank} \(\S+, pid {pid}\) has not answered for \d+ s; ", named)
    assert named.endswith("the run goes on when it does, and it is lost after 15 s (--lost-after)")
    if rank == 1:
        call = r"rank 0 made call \d+: train_step\(x: float32\[12,8\]\), which it has not"
        wait = r"rank 0 waits for it: (\w.*@0\S* \w.*|call \d+, which it has not made)"  # in an actor, or for its stamp
        assert re.search(rf"; ({call}|({call}; )?{wait}); the run goes on", named)
    assert len(re.findall("answers again", run.output)) == 1
    assert "answers again" not in steady.output
    assert run.ranks_left() == []


@pytest.mark.slow
def test_a_rank_that_stays_stopped_is_lost_after_the_limit(start: Start, tmp_path: Path) -> None:
    run = begin(start, tmp_path / "own", "data", "--lost-after", "6")
    pid = pids(run, tmp_path / "own")[1]
    begun = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    assert run.wait() == 1
    took = time.monotonic() - begun
    assert 5.0 < took < 6.0 + SOON, run.output  # a tick may have been counted before
    assert re.search(rf"pid {pid}\) has not answered for \d+ s; ", run.output)  # 5, or more on a busy machine
    assert re.search(rf"actorflow: rank 1 \(\S+, pid {pid}\) stopped answering; noticed by rank 0", run.output)
    assert run.ranks_left() == []


@pytest.mark.slow
def test_a_run_that_is_stopped_as_a_whole_for_longer_than_the_limit_goes_on(start: Start, tmp_path: Path) -> None:
    run = begin(start, tmp_path / "own", "data", "--lost-after", "6")
    ranks = pids(run, tmp_path / "own")
    everybody = [run.process.pid, *ranks]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(9)  # the failure itself: that somebody closes a laptop, or suspends its machines
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "own/goes").touch()
    assert run.wait() == 0, run.output
    losses(run)


@pytest.mark.slow
def test_a_node_that_was_stopped_while_the_others_gave_it_up_ends_with_their_cause(
    start: Start, tmp_path: Path
) -> None:
    node = ("--insecure", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    runs = [
        start(TRAIN, *node, "--node-rank", str(n), "--lost-after", "6", "--", str(tmp_path), "pipeline") for n in (0, 1)
    ]
    pid = pids(runs[0], tmp_path)[1]
    stopped = [runs[1].process.pid, pid]
    for one in stopped:
        os.kill(one, signal.SIGSTOP)
    assert runs[0].wait() == 1
    for one in reversed(stopped):
        os.kill(one, signal.SIGCONT)
    assert runs[1].wait() == 1
    said = "stopped answering; noticed by rank 0"
    assert re.search(rf"actorflow: rank 1 \(\S+, pid {pid}\) {said}", runs[0].output), runs[0].output
    own = rf"was stopped for \d+ s, and the run ended meanwhile|{said}"  # what came last from rank 0 may be lost
    assert re.search(rf"actorflow: rank 1 \(\S+, pid {pid}\) ({own})", runs[1].output), runs[1].output
    assert runs[0].ranks_left() == []


@pytest.mark.slow  # ranks in one process do so in test_silent_ranks.py
def test_a_rank_that_keeps_pythons_lock_for_longer_than_the_limit_is_waited_for(start: Start) -> None:
    run = start(KEEPS, "--devices", "2", "--lost-after", "6", python=warm.python())
    assert run.wait() == 0, run.output
    assert "gathered [b'0', b'1']" in run.output
    assert re.search(r"actorflow: rank 1 \(\S+, pid \d+\) has not answered for \d+ s; rank 0 is at gather", run.output)
    assert "but its process lives: some code in it, such as an extension in C, keeps Python's lock" in run.output


@pytest.mark.slow
def test_a_script_on_one_device_may_be_stopped_for_as_long_as_one_likes(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    run = start(TRAIN, "--devices", "1", "--lost-after", "5.5", "--", str(folder), "data")
    (pid,) = pids(run, folder, 1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(11)  # the failure itself, longer than a rank with peers may be stopped
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    os.kill(pid, signal.SIGCONT)
    (folder / "goes").touch()
    assert run.wait() == 0
    losses(run)
