"""Whole runs whose ranks share a machine: with Unix sockets and shared memory, and without, and when one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm
from cluster.ranks import SOON
from cluster.runs import Run

Start = Callable[..., Run]

# two stages; what they send for a micro-batch is above what fits in a message, and below
PIPELINE = """
import json, os, pathlib, sys, torch
import actorflow as flow
from actorflow.control import cluster
from actorflow.session import process

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 4))
flow.place(model, {"0|1": flow.placement("cpu", [0]), "2": flow.placement("cpu", [1])})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

@flow.global_function(type="train", micro_batches=4)
def step(x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

losses = []
while len(losses) != steps:
    losses.append(step(torch.randn(128, 8), torch.randn(128, 4)).item())
    if len(losses) == 2:
        worker, run = process.current().worker, cluster.current()
        planes = {a.comm.plane for job in worker._jobs.values() for a in job.plan.actors if a.comm is not None}
        said = {"pid": os.getpid(), "planes": sorted(planes), "near": sorted(run.local_peers),
                "socket": run._control_plane.own.socket}
        (folder / f"up{run.rank}.part").write_text(json.dumps(said))
        os.rename(folder / f"up{run.rank}.part", folder / f"up{run.rank}")
print("losses", json.dumps(losses))
"""


PLACED = next(line for line in PIPELINE.splitlines(keepends=True) if line.startswith("flow.place("))
DATA = PIPELINE.replace(PLACED, "")  # data parallel, in collectives


def said(run: Run, folder: Path) -> list[Any]:
    return [json.loads(text) for text in run.wait_for([folder / f"up{rank}" for rank in range(2)])]


@pytest.mark.parametrize(
    ("script", "network"),
    [(PIPELINE, ["gloo", "inline"]), pytest.param(DATA, ["gloo"], marks=pytest.mark.slow)],
    ids=["in stages", "in collectives"],
)
def test_a_run_trains_the_same_over_unix_sockets_and_over_the_network(
    script: str, network: list[str], start: Start, tmp_path: Path
) -> None:
    losses = []
    for option, planes in (("--local", ["shared"]), ("--no-local", network)):
        run = start(script, "--devices", "2", option, "--", str(tmp_path), "6", python=warm.python())
        assert run.wait() == 0, run.output
        losses.append([line for line in run.output.splitlines() if line.startswith("losses")])
        near = [[1], [0]] if option == "--local" else [[], []]
        assert [(rank["planes"], rank["near"]) for rank in said(run, tmp_path)] == [(planes, n) for n in near]
        for rank in range(2):
            (tmp_path / f"up{rank}").unlink()
    assert losses[0] == losses[1]
    assert len(json.loads(losses[0][0].removeprefix("losses "))) == 6


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("script", [PIPELINE, DATA], ids=["stages", "collectives"])
def test_a_killed_rank_ends_the_run_and_leaves_nothing_behind(script: str, start: Start, tmp_path: Path) -> None:
    temporary, before = tmp_path / "tmp", set(os.listdir("/dev/shm"))
    temporary.mkdir()
    where = {"TMPDIR": str(temporary)}
    run = start(script, "--devices", "2", "--", str(tmp_path), "-1", env=where, python=warm.python())
    ranks = said(run, tmp_path)
    assert [r["planes"] for r in ranks] == [["shared"], ["shared"]]
    start_of_end = time.monotonic()
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    assert run.wait() == 1
    assert time.monotonic() - start_of_end < SOON, run.output
    assert re.search(rf"actorflow: rank 1 \(\S+, pid {ranks[1]['pid']}\) was killed by SIGKILL", run.output)
    assert run.ranks_left() == []
    sockets = Path("/proc/net/unix").read_text()
    assert all(r["socket"] and r["socket"] not in sockets for r in ranks)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "actorflow" in name]
    assert not [p for p in temporary.rglob("*") if "actorflow" in p.name and not p.is_dir()]
