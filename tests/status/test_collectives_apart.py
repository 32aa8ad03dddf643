"""Ranks in collectives that do not meet are shown by the status, and end with an error that names them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import warm
from actorflow.status.graph import standing_circle, verdict
from actorflow.status.rank_status import QueueWait, RankStatus, own_status
from actorflow.support.collective_waits import MadeCalls, checksum, in_collective
from second.launching import command, run

APART = """
import actorflow as flow
from actorflow.launch import wait_watch

wait_watch.TICK = wait_watch.PATIENCE = 0.2  # seconds
x = flow.ones(3)
if flow.env.get_rank() < 2:
    flow.comm.all_reduce(x)
flow.comm.broadcast(x, 0)
"""
LATE = """
import os, sys, time
import actorflow as flow
from actorflow.launch import wait_watch

wait_watch.TICK = wait_watch.PATIENCE = 0.05  # seconds
judge = wait_watch.standing_circle

def judged(*standings):
    circle = judge(*standings)
    open(sys.argv[1], "w").close()
    return circle

x = flow.ones(3)
flow.comm.barrier()
if flow.env.get_rank() == 0:
    wait_watch.standing_circle = judged
while flow.env.get_rank() == 1 and not os.path.exists(sys.argv[1]):  # until rank 0 has asked what it waits for
    time.sleep(0.01)
flow.comm.all_reduce(x)
print(x.tolist())
"""


def test_ranks_in_different_collectives_end_with_an_error_that_shows_them(tmp_path: Path) -> None:
    script = tmp_path / "apart.py"
    script.write_text(APART)
    done = run(command("run", str(script), processes=4, python=warm.python()), tmp_path)
    assert done.returncode != 0
    assert "wait for each other in different collectives, for ever" in done.stderr
    assert f"the script is in all_reduce of ranks [0, 1, 2, 3] ({script}:8)" in done.stderr
    assert f"the script is in broadcast of ranks [0, 1, 2, 3] ({script}:9)" in done.stderr


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    asked = tmp_path / "asked"
    done = run(command("run", str(script), "--", str(asked), python=warm.python()), tmp_path)
    assert asked.exists()
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0, 2.0]\n"), done.stderr


def test_the_status_of_a_process_has_the_collective_that_it_is_in() -> None:
    before = own_status(0)
    with in_collective("all_reduce of ranks [0, 1]", (1,), "here"):
        inside = own_status(0)
    after = own_status(0)
    (wait,) = inside.waits
    assert wait == QueueWait("the script", "is in all_reduce of ranks [0, 1]", (1,), "here", "here", wait.number)
    assert (before.has_made(wait), inside.has_made(wait), after.has_made(wait)) == (False, False, True)
    assert RankStatus.from_json(json.loads(json.dumps(after.to_json()))) == after
    assert before.waits == after.waits == ()
    assert before.moved < inside.moved < after.moved


def in_one(rank: int, *peers: int, meets: str, moved: int = 1) -> RankStatus:
    waits = (QueueWait("the script", f"is in {meets}", peers, meets),)
    return RankStatus(rank, "here", rank, f"t.py:{rank}", moved=moved, waits=waits)


def test_only_ranks_that_stand_in_collectives_apart_make_a_circle() -> None:
    def apart(moved: int = 1) -> dict[int, RankStatus]:
        return {
            0: in_one(0, 1, 2, meets="sum"),
            1: in_one(1, 0, 2, meets="sum"),
            2: in_one(2, 0, 1, meets="copy", moved=moved),
        }

    assert sorted(standing_circle(apart(), apart())) in ([0, 2], [1, 2])
    assert standing_circle(apart(), apart(moved=2)) == []  # something has happened on rank 2
    together = {rank: in_one(rank, 1 - rank, meets="sum") for rank in range(2)}
    assert standing_circle(together, together) == []
    sent = {0: in_one(0, 1, meets="barrier"), 1: in_one(1, 0, meets="0>1")}
    sent[0] = replace(sent[0], made={"0>1, tag 0": MadeCalls(1, (checksum("0>1"),))})
    sent[1] = replace(sent[1], waits=(replace(sent[1].waits[0], channel="0>1, tag 0"),))
    assert standing_circle(sent, sent) == []  # what rank 0 has sent may take its time
    computes = {0: in_one(0, 1, meets="sum"), 1: RankStatus(1, "here", 1, "t.py:9")}
    assert standing_circle(computes, computes) == []
    assert verdict(2, computes) == "rank 0 waits for rank 1, which waits for no other rank: it is at t.py:9"
