"""Under torch's launchers, ranks in collectives that do not meet end with a line that names them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import actorflow as flow
import warm
from actorflow.distributed import collectives, group, point_to_point, standing_waits
from actorflow.distributed.standing_waits import StandingWait, standing_circle
from actorflow.support.collective_waits import (
    CollectiveInProgress,
    MadeCalls,
    calls_made,
    checksum,
    in_collective,
    in_progress,
)
from actorflow_compiler.core.errors import CallError, ClusterError
from second.launching import command, run

ALL = "ranks [0, 1]"


def wait(rank: int, meets: str, *before: str, beat: int = 1, moved: int = 1) -> StandingWait:
    """One of two ranks is in a collective of both, after others."""
    made = {ALL: MadeCalls(len(before), tuple(map(checksum, before)))}
    return StandingWait(meets, (1 - rank,), meets, ALL, len(before), made, moved, f"t.py:{rank}", beat)


def circle(*waits: StandingWait) -> list[int]:
    before = dict(enumerate(waits))
    return standing_circle(before, {rank: replace(one, beat=2) for rank, one in before.items()})


def test_ranks_in_different_collectives_stand_in_a_circle() -> None:
    assert circle(wait(0, "sum"), wait(1, "copy")) == [0, 1]
    assert circle(wait(0, "sum"), wait(1, "sum")) == []
    assert circle(wait(0, "sum", "sum"), wait(1, "sum")) == []  # rank 1 comes to the next one, too


def test_a_rank_that_has_done_its_share_is_not_waited_for() -> None:
    assert circle(wait(0, "gather"), wait(1, "sum", "gather")) == []  # what it has sent may take its time
    assert circle(wait(0, "sum"), wait(1, "sum", "gather")) == [0, 1]  # its first call was another one


def test_a_circle_is_one_only_if_all_have_stood_in_it_at_one_moment() -> None:
    before = {0: wait(0, "sum"), 1: wait(1, "copy")}
    assert standing_circle(before, {0: wait(0, "sum", beat=2), 1: before[1]}) == []  # rank 1 has not spoken since
    assert standing_circle(before, {0: wait(0, "sum", beat=2), 1: wait(1, "copy", beat=2, moved=3)}) == []
    assert standing_circle({}, before) == []


def test_both_ranks_of_a_circle_find_it_in_their_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, found, closed = dist.HashStore(), ["", ""], threading.Event()

    def own() -> CollectiveInProgress:
        return stand[int(threading.current_thread().name)]

    stand = [CollectiveInProgress(what, (1 - rank,), what, ALL, 0) for rank, what in enumerate(("sum", "copy"))]
    monkeypatch.setattr(standing_waits, "in_progress", own)
    monkeypatch.setattr(standing_waits, "calls_made", dict)
    monkeypatch.setattr(standing_waits, "collectives_entered", lambda: 1)
    monkeypatch.setattr(standing_waits, "TICK", 0.01)
    monkeypatch.setattr(standing_waits, "PATIENCE", 0.0)

    def look(rank: int) -> None:
        while circle := standing_waits._circle_around(store, rank, closed):  # the first to find it speaks on
            found[rank] = circle
            if all(found):
                closed.set()

    threads = [threading.Thread(target=look, args=(rank,), name=str(rank), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    assert closed.wait(60)
    assert found[0].startswith("rank 0 and rank 1 wait for each other in different collectives, for ever")
    assert "rank 1 waits for rank 0: the script is in copy" in found[0]


def test_calls_of_a_channel_are_counted_where_they_have_been_made() -> None:
    def calls() -> MadeCalls | None:
        return calls_made().get("a channel")

    with in_collective("sum of all", (1,), "sum", "a channel"):
        assert in_progress() is not None
        assert calls() is None
    with pytest.raises(ValueError, match="no"), in_collective("sum of all", (1,), "sum", "a channel"):
        raise ValueError("no")
    with in_collective("copy of all", (1,), "copy", "a channel"):
        now = in_progress()
        assert now is not None
        assert now.number == 1
    made = calls()
    assert made is not None
    assert [made.differs(number, "sum") for number in range(3)] == [False, True, None]


def test_what_is_sent_and_received_meanwhile_counts_as_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def isend(tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> None:
        assert in_progress() is not None

    def batch_isend_irecv(p2p_op_list: list[Any]) -> None:
        pass

    monkeypatch.setattr(collectives, "default_group", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 6])
    monkeypatch.setattr(dist, "get_global_rank", lambda _, number: [4, 6][number])
    send, together = map(collectives._with_default_group, (isend, batch_isend_irecv))
    send(torch.ones(1), 6)
    send(torch.ones(1), group_dst=1)
    ops = (SimpleNamespace(op=op, peer=6, group=None, tag=7) for op in (dist.isend, dist.irecv))
    together(list(ops))
    counts = {channel: made.count for channel, made in calls_made().items() if "tag" in channel}
    assert counts == {"4>6, tag 0": 2, "4>6, tag 7": 1, "6>4, tag 7": 1}
    sent = StandingWait("barrier", (6,), "barrier", "ranks [4, 6]", 0, calls_made(), 1, "t.py:2", 1)
    receives = StandingWait("recv", (4,), "4>6", "4>6, tag 0", 1, {}, 1, "t.py:3", 1)
    assert not receives.waits_for(sent)  # which may take its time on its way


def test_a_rank_that_is_none_of_the_group_is_refused_before_torch_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> None:
        pytest.fail("torch was called")

    def broadcast(tensor: Tensor, src: Any = None, group: Any = None) -> None:
        pytest.fail("torch was called")

    def batch_isend_irecv(p2p_op_list: list[Any]) -> None:
        pytest.fail("torch was called")

    monkeypatch.setattr(collectives, "default_group", lambda: None)
    monkeypatch.setattr(point_to_point, "default_group", lambda: None)
    monkeypatch.setattr(collectives, "get_rank", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 6])
    sends, broadcasts, together = map(collectives._with_default_group, (send, broadcast, batch_isend_irecv))
    x = torch.ones(1)
    one = SimpleNamespace(op=dist.isend, peer=9, group=None, tag=0)
    for name, call in {
        "send with dst=5": lambda: sends(x, 5),
        "send with dst=-1": lambda: sends(x, -1),
        "send with dst='6'": lambda: sends(x, "6"),
        "send with group_dst=2": lambda: sends(x, group_dst=2),
        "broadcast with src=0": lambda: broadcasts(x, src=0),
        "isend with dst=9": lambda: together([one]),
        "send with dst=9": lambda: flow.comm.send(x, 9),
    }.items():
        with pytest.raises(CallError, match=rf"rank 4 called {name}; one of the ranks \[(4, 6|0, 1)\] was expected"):
            call()


def test_a_rank_that_waits_for_others_to_meet_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(place: object) -> None:
        told.append(in_progress())
        raise ClusterError("nobody")

    told: list[CollectiveInProgress | None] = []
    monkeypatch.setattr(group, "_make", meet)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ClusterError):
        group.default_group()
    assert [one.what for one in told if one] == ["the first collective, for which all ranks meet"]


SCRIPTS = {
    "comm": "x = flow.ones(3)\nif rank == 0:\n    flow.comm.all_reduce(x)\nflow.comm.broadcast(x, 0)\n",
    "mixed": (
        "if rank == 0:\n    flow.comm.barrier()\n"
        "else:\n    flow.ones(4, placement=flow.env.all_device_placement('cpu'), sbp=flow.sbp.split(0)).numpy()\n"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "launch", "run"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_of_ranks_that_do_not_meet_ends(name: str, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "apart.py"
    script.write_text(f"import actorflow as flow\nrank = flow.env.get_rank()\n{SCRIPTS[name]}")
    done = run(command(launcher, str(script), python=warm.python()), tmp_path)
    assert done.returncode != 0
    assert "rank 0 and rank 1 wait for each other in different collectives, for ever" in done.stdout + done.stderr
