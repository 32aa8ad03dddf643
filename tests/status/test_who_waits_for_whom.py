"""From what ranks say of themselves it is found whom they all wait for; a run is asked through its sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import warm
from actorflow.cli import main
from actorflow.status import rank_status, sockets
from actorflow.status.graph import edges, verdict
from actorflow.status.rank_status import QueueWait, RankStatus, own_status, own_wait
from actorflow.status.sockets import RunInfo, RunStatus, announce_run, answer_requests, ask_ranks, find_runs, on_signal
from actorflow.status.text import to_text
from actorflow.testing.local_cluster import LocalCluster
from cluster.ranks import LIMIT
from cluster.runs import Run
from runtime.coming_rows import LOADER, ComingRows, fed

STUCK = """
import sys, time
import torch
import torch.nn.functional as F
import actorflow as flow

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function
def step(x):
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

float(step(torch.ones(4, 8)))
print("one step", flush=True)
if flow.env.get_rank() == 1:
    time.sleep(1000)  # here it stands
float(step(torch.ones(4, 8)))
"""


def standing(rank: int, *ranks: int, meets: str = "", **more: object) -> RankStatus:
    waits = (QueueWait(f"F{rank}@{rank}", "waits for register 3 (empty)", ranks, meets),) if ranks else ()
    return RankStatus(rank, "here", 100 + rank, f"train.py:{rank}", waits=waits, **more)  # type: ignore[arg-type]


def of(*standings: RankStatus) -> dict[int, RankStatus]:
    return {s.rank: s for s in standings}


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        (of(standing(0), standing(1)), "no rank waits for another one"),
        (
            of(standing(0, 1), standing(1)),
            "rank 0 waits for rank 1, which waits for no other rank: it is at train.py:1",
        ),
        (
            of(standing(0, 1), standing(1, 2), standing(2, doing="fires F2@2, firing 7")),
            "ranks 0-1 wait for rank 2, which waits for no other rank: it fires F2@2, firing 7",
        ),
        (
            of(standing(0, 1), standing(1, rows="rows 32-63 of epoch 0 of the loader of t.py:3", busy=True)),
            "rank 0 waits for rank 1, which waits for rows 32-63 of epoch 0 of the loader of t.py:3",
        ),
        (of(standing(0, 1), standing(1, 2)), "ranks 0-1 wait for rank 2, which does not answer"),
        (
            of(standing(0, 2), standing(1, 3), standing(2), standing(3)),
            "rank 0 waits for rank 2, which waits for no other rank: it is at train.py:2; "
            "rank 1 waits for rank 3, which waits for no other rank: it is at train.py:3",
        ),
        (
            of(standing(0, 1), standing(1, 2), standing(2, 3), standing(3, 1)),
            "rank 1 waits for rank 2, which waits for rank 3, which waits for rank 1: that may pass, ask again",
        ),
        (
            of(standing(0, 1, 2, meets="7"), standing(1, 0, 2, meets="7"), standing(2)),
            "ranks 0-1 wait for rank 2, which waits for no other rank: it is at train.py:2",
        ),
        (
            of(standing(0, early=True, calls=5), standing(1, early=True, calls=5), standing(2, calls=4)),
            "ranks 0-1 wait for rank 2, which waits for no other rank: it is at train.py:2",
        ),
        ({}, "no rank answers"),
    ],
)
def test_the_rank_that_all_wait_for_is_named(standings: dict[int, RankStatus], expected: str) -> None:
    assert verdict(4, standings) == expected


CIRCLE = (standing(0, 1, moved=7), standing(1, 2, moved=8), standing(2, 1, moved=9))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (CIRCLE, CIRCLE, "rank 1 waits for rank 2, which waits for rank 1: they wait in a circle"),
        (
            CIRCLE,
            (*CIRCLE[:2], standing(2, 1, moved=10)),
            "ranks 0-1 wait for rank 2, which goes on: it is at train.py:2",
        ),
        (
            CIRCLE,
            (*CIRCLE[:2], standing(2, 1, moved=9, busy=True, doing="fires F2")),
            "ranks 0-1 wait for rank 2, which goes on: it fires F2",
        ),
        (CIRCLE[:2], CIRCLE, "ranks 0-1 wait for rank 2, which goes on: it is at train.py:2"),
        (CIRCLE, [standing(rank, *at, moved=11) for rank, at in ((0, (1,)), (1, (2,)), (2, (1,)))],
         "no rank waits for another one for long"),
    ],
)  # fmt: skip
def test_a_circle_is_told_of_ranks_that_stood_still_between_two_rounds_and_of_no_others(
    before: tuple[RankStatus, ...], now: tuple[RankStatus, ...], expected: str
) -> None:
    assert verdict(3, of(*now), of(*before)) == expected


def test_members_of_a_collective_that_are_all_there_wait_for_nobody() -> None:
    assert edges(of(standing(0, 1, meets="7"), standing(1, 0, meets="7"))) == {0: {}, 1: {}}


def test_what_a_rank_says_travels_as_json() -> None:
    said = standing(3, 1, 2, meets="7", calls=4, early=True, doing="fires F3", text="all\nof it")
    assert RankStatus.from_json(json.loads(json.dumps(said.to_json()))) == said


def test_a_rank_whose_source_waits_for_rows_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(fed()) as cluster:
        (worker,) = cluster.workers
        session = SimpleNamespace(worker=worker, calls=1, reads=None)
        monkeypatch.setattr(rank_status, "_observed", lambda: session)
        assert own_status(0).rows == ""
        coming = ComingRows(32)
        call = worker.issue(0, coming.argument())
        assert coming.asked.wait(LIMIT)
        found = own_status(0)
        assert found.rows == f"rows 32-33 of epoch 0 of {LOADER}"
        assert found.busy
        run = RunInfo(os.getpid(), "train.py", (), 1, (0,), time.time(), "logs")
        assert f"), waits for {found.rows}" in to_text(run, RunStatus({0: found}, {}))
        assert f"x waits for {found.rows}" in found.text
        coming.given.set_result(torch.zeros(2, 1))
        call.wait(LIMIT)
        assert own_status(0).rows == ""
        session.reads = ComingRows(8)  # the script reads itself
        assert own_status(0).rows == f"rows 8-9 of epoch 0 of {LOADER}"


def test_a_rank_says_in_short_which_call_it_waits_for_another_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(missing_calls={1: 3}, standing=lambda: (None, True, ""))
    monkeypatch.setattr(rank_status, "_observed", lambda: SimpleNamespace(worker=worker))
    assert own_wait(2, 1) == "call 3, which it has not made"
    assert own_wait(2, 0) == "its word that all ranks have made the next call"
    assert own_wait(2, 3) == ""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a launcher that is this process, where runs are looked for."""
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(sockets, "PATIENCE", LIMIT)  # a busy machine may take its time
    monkeypatch.setattr(sockets, "ELSEWHERE", LIMIT)
    folder = tmp_path / "actorflow-x"
    folder.mkdir()
    return str(folder / "launcher")


def about(*ranks: int, world: int = 2, pid: int | None = None) -> RunInfo:
    return RunInfo(pid or os.getpid(), "train.py", ("--lr", "1"), world, ranks, time.time(), "logs")


def test_a_rank_answers_for_itself_and_fetches_what_ranks_of_other_machines_say(launcher: str) -> None:
    run = about(0, world=3)
    announce_run(launcher, run)

    def pull(rank: int) -> bytes:
        if rank == 2:
            raise OSError("lost")
        return json.dumps(standing(rank, 2).to_json()).encode()

    answer_requests(launcher, 0, 3, pull)
    assert find_runs() == [(launcher, run)]
    found = ask_ranks(launcher, run)
    assert sorted(found.standings) == [0, 1]
    assert found.standings[0].pid == os.getpid()
    text = to_text(run, found)
    assert "train.py --lr 1, 3 ranks" in text
    assert "rank 2 is on another machine and does not answer" in text
    assert "rank 1 waits for rank 2, which does not answer" in text


def test_a_rank_that_could_not_answer_once_answers_the_next_time(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is asked in the middle of an import."""

    def early(rank: int) -> RankStatus:
        raise AttributeError("partially initialized module")

    run = about(0, world=1)
    announce_run(launcher, run)
    with monkeypatch.context() as first:
        first.setattr(rank_status, "own_status", early)
        answer_requests(launcher, 0, 1, lambda rank: b"")
        assert ask_ranks(launcher, run).silent[0].startswith("gave no answer (process")
    assert 0 in ask_ranks(launcher, run).standings


def test_a_rank_that_does_not_answer_is_told_from_one_that_is_not_there(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PATIENCE", 0.3)
    deaf = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deaf.bind(str(Path(launcher).with_name("rank1")))
    deaf.listen()
    gone = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    gone.bind(str(Path(launcher).with_name("rank2")))
    gone.close()
    found = ask_ranks(launcher, about(0, 1, 2, world=3))
    assert found.silent == {
        0: "has not started",
        1: f"does not answer (process {os.getpid()} is in code that keeps the GIL)",
        2: "has ended",
    }
    deaf.close()


def test_runs_whose_launchers_are_gone_are_not_listed(launcher: str) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    announce_run(launcher, about(0, pid=process.pid))
    assert [run.pid for _, run in find_runs()] == [process.pid]
    process.kill()
    process.wait()
    assert find_runs() == []
    path = Path(launcher).with_name("run.json")
    path.write_text(path.read_text().replace(f'"pid": {process.pid}', f'"pid": {os.getpid()}'))
    assert find_runs() == []  # the number is another process's now
    done = CliRunner().invoke(main, ["status"])
    assert done.exit_code == 1
    assert "no run of this machine and user was found" in done.output


def test_an_unknown_launcher_is_answered_with_those_that_there_are(launcher: str) -> None:
    announce_run(launcher, about(0))
    done = CliRunner().invoke(main, ["status", "1"])
    assert done.exit_code == 1
    assert f"1 is no launcher of a run of this machine and user; there are: {os.getpid()}" in done.output


def test_the_signal_calls_back_and_leaves_other_handlers_alone() -> None:
    heard: list[str] = []
    with on_signal(lambda: heard.append("told")):
        os.kill(os.getpid(), signal.SIGUSR1)
        end = time.monotonic() + LIMIT
        while not heard and time.monotonic() < end:
            time.sleep(0.01)
    assert heard == ["told"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with on_signal(lambda: heard.append("told")):
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_stuck_run_tells_whom_it_waits_for_to_the_command_and_to_the_signal(start: Callable[..., Run]) -> None:
    run = start(STUCK, "--devices", "2", python=warm.python())
    wait_for(run, lambda: "one step" in run.output)
    launcher = announced(run)[1].pid
    stands = STUCK.splitlines().index("    time.sleep(1000)  # here it stands") + 1
    sentence = f"rank 0 waits for rank 1, which waits for no other rank: it is at {run.script}:{stands}"

    def told() -> str:
        return command("status", str(launcher))

    wait_for(run, lambda: sentence in told())
    text = told()
    assert f"run {launcher}: {run.script}, 2 ranks" in text
    assert "waits for rank 1: call 1, which it has not made" in text
    assert "call 1 waits for rank 1 to make it" in text
    run.process.send_signal(signal.SIGUSR1)
    wait_for(run, lambda: sentence in run.output)
    pid = re.search(r"rank 1 \(.*, pid (\d+)\)", text)
    assert pid is not None
    os.kill(int(pid[1]), signal.SIGUSR1)
    log = run.script.parent / "logs0" / "rank1.stderr.log"
    wait_for(run, lambda: log.exists() and "actorflow: rank 1: 0 unfinished calls" in log.read_text())
    assert run.process.poll() is None


FED = """
import os
import torch
import torch.nn.functional as F
import actorflow as flow

class Held:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 21:
            open(os.environ["PIPE"]).close()  # a pipe: until somebody opens its other end
        return torch.full((8,), float(index))

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@flow.global_function
def step(x):
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for x in flow.data.loader(Held(), batch_size=8, workers=1):
    loss = step(x)
print("done", float(loss), flush=True)
"""


@pytest.mark.slow
def test_a_run_whose_data_do_not_come_says_which_rank_waits_for_which_rows(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    run = start(FED, "--devices", "2", env={"PIPE": str(pipe)})
    made = 1 + next(n for n, line in enumerate(FED.splitlines()) if "flow.data.loader" in line)
    rows = f"rows 20-23 of epoch 0 of the loader of {run.script}:{made}"  # the second half of the last batch
    said = [""]

    def told() -> str:
        said[0] = command("status", str(run.process.pid))
        return said[0]

    wait_for(run, lambda: f"rank 0 waits for rank 1, which waits for {rows}" in told())
    assert re.search(rf"rank 1 \(.*\), waits for {re.escape(rows)}", said[0])
    with pipe.open("w"):
        assert run.process.wait(LIMIT) == 0
    assert "done" in run.output


PIPELINE = """
import os, time
import torch
from torch import nn
import torch.nn.functional as F
import actorflow as flow

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
flow.place(model, stages=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

@flow.global_function(micro_batches=4)
def step(x):
    loss = F.mse_loss(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

x = torch.ones(64, 64)
float(step(x))
print("one step", flush=True)
while True:
    step(x)
"""


@pytest.mark.slow
def test_a_pipeline_that_trains_is_never_said_to_wait_in_a_circle(start: Callable[..., Run]) -> None:
    run = start(PIPELINE, "--devices", "2", python=warm.python())
    wait_for(run, lambda: "one step" in run.output)
    launcher, about = announced(run)
    rounds = 0
    while rounds < 5:  # of those in which a single round would have told of one
        found = ask_ranks(launcher, about)
        assert "circle" not in to_text(about, found).partition("\n\n")[0]
        rounds += found.before is not None


def announced(run: Run) -> tuple[str, RunInfo]:
    """The socket of a run's launcher, and what it says of itself."""
    return next((launcher, about) for launcher, about in find_runs() if about.script == str(run.script))


def command(*arguments: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return done.stdout + done.stderr


def wait_for(run: Run, there: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not there():
        assert time.monotonic() < end, run.output
        assert run.process.poll() is None, run.output
        time.sleep(0.1)
