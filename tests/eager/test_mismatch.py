"""Ranks that fall out of step, end or die are found out, and the error says who did what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import actorflow as flow
import warm
from actorflow.distributed import group
from actorflow.eager import mismatch_watch
from actorflow.eager.communicator import CollectiveLabel
from actorflow.eager.group_communicator import GroupCommunicator
from actorflow.eager.layout import Layout
from actorflow.eager.mismatch import CollectiveWait, RankState, ScriptEnd, decode_state, encode_state, find_mismatch
from actorflow.eager.redistribution import redistribute
from actorflow_compiler.core.errors import CallError, ClusterError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P, Split
from cluster.runs import Run

LIMIT = 200.0  # seconds


def waiting(number: int, what: str, ranks: tuple[int, ...] = (0, 1), me: int = 0) -> RankState:
    """In a collective with all others of its ranks."""
    peers = tuple(r for r in ranks if r != me)
    return RankState(CollectiveWait(ranks, number, what, peers), {ranks: number + 1})


# ---- what is thought of states


def test_ranks_in_one_collective_are_not_blamed() -> None:
    assert find_mismatch({0: waiting(3, "mm"), 1: waiting(3, "mm", me=1)}) is None


def test_a_rank_that_computes_is_not_blamed() -> None:
    assert find_mismatch({0: waiting(3, "mm"), 1: RankState(None, {(0, 1): 3}, "train.py:7")}) is None


def test_ranks_in_different_ops_are_both_named_with_their_ops() -> None:
    why = find_mismatch({0: waiting(3, "mm"), 1: waiting(3, "add", me=1), 2: RankState(None)})
    assert why is not None
    assert why.startswith("rank 0 and rank 1 wait for each other")
    assert "rank 0 is in collective 3 of ranks [0,1]: mm" in why
    assert "rank 1 is in collective 3 of ranks [0,1]: add" in why


def test_a_rank_that_is_through_with_a_collective_is_not_waited_for() -> None:
    here = CollectiveWait((0, 1, 2), 4, "mm", (1, 2))  # rank 1 has given its part and waits for rank 0 elsewhere
    states = {
        0: RankState(here, {(0, 1, 2): 5}),
        1: RankState(CollectiveWait((0, 1), 0, "add", (0,)), {(0, 1, 2): 5, (0, 1): 1}),
        2: RankState(None, {(0, 1, 2): 4}),
    }
    assert find_mismatch(states) is None
    behind = RankState(CollectiveWait((0, 1), 0, "add", (0,)), {(0, 1, 2): 4, (0, 1): 1})  # it has not
    assert find_mismatch({**states, 1: behind}) is not None


def test_a_circle_of_three_ranks_is_found() -> None:
    states = {
        rank: RankState(CollectiveWait(group, 0, "mm", (other,)), {group: 1})
        for rank, group, other in ((0, (0, 1), 1), (1, (1, 2), 2), (2, (0, 2), 0))
    }
    assert "rank 0 and rank 1 and rank 2 wait for each other" in (find_mismatch(states) or "")


def test_a_rank_that_has_ended_is_named_unless_it_was_through() -> None:
    ended = RankState(ScriptEnd("raised ValueError: no"), {(0, 1): 3})
    assert "rank 0 waits for rank 1, which raised ValueError: no" in (
        find_mismatch({0: waiting(3, "mm"), 1: ended}) or ""
    )
    assert find_mismatch({0: waiting(2, "mm"), 1: ended}) is None


def test_states_survive_being_written_down() -> None:
    for state in (waiting(3, "mm"), RankState(ScriptEnd("has ended"), {(0, 2): 7}, "a.py:1"), RankState(None)):
        assert decode_state(encode_state(state, 5)) == (state, 5)


# ---- Gloo, two ranks as threads


@pytest.fixture
def pair() -> Iterator[Callable[..., list[Any]]]:
    """Run a function of comm on two ranks; what each has returned or raised."""
    made: list[GroupCommunicator] = []

    def both(*functions: Callable[[GroupCommunicator], Any]) -> list[Any]:
        store = dist.HashStore()
        found: list[Any] = [None, None]

        def on_rank(rank: int) -> None:
            try:
                comm = GroupCommunicator(dist.PrefixStore("test", store), rank, 2)
                made.append(comm)
                found[rank] = functions[rank % len(functions)](comm)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=on_rank, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a rank hangs"
        return found

    yield both
    closing_threads = [threading.Thread(target=w.finish) for w in made]
    for thread in closing_threads:
        thread.start()
    for thread in closing_threads:
        thread.join(LIMIT)


LINE = Placement("cpu", (0, 1), (2,))
SMALL, LARGE = 6, 40_000


def summed(comm: GroupCommunicator, why: str = "a sum", size: int = SMALL) -> Tensor:
    return redistribute(
        torch.full((size,), comm.rank + 1.0), (size,), Layout(LINE, (P,)), Layout(LINE, (B,)), comm, why
    )


def test_gloo_brings_one_element_of_several(pair: Callable[..., list[Any]]) -> None:
    def on_a_rank(comm: GroupCommunicator) -> Tensor:
        column = torch.arange(6.0).view(3, 2)[:1, comm.rank : comm.rank + 1].t()[0]  # its stride is 2
        return redistribute(column, (2,), Layout(LINE, (Split(0),)), Layout(LINE, (B,)), comm)

    for whole in pair(on_a_rank):
        assert torch.equal(whole, torch.tensor([0.0, 1.0]))


def test_a_process_that_is_forked_from_a_rank_is_none(
    pair: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_rank(comm: GroupCommunicator) -> None:
        comm._process = -1  # as in a fork: the rank is another process
        summed(comm)

    for error in pair(on_a_rank):
        assert "rank" in str(error)
        assert "which was forked from it and is no rank" in str(error)
    monkeypatch.setattr(group, "_process", -1)
    with pytest.raises(CallError, match="which was forked from this rank, process -1, and is no rank"):
        flow.comm.barrier()


def test_gloo_brings_every_part_where_it_belongs(pair: Callable[..., list[Any]]) -> None:
    def on_a_rank(comm: GroupCommunicator) -> list[Tensor]:
        rows, columns, whole = (Layout(LINE, (s,)) for s in (Split(0), Split(1), B))
        grid = torch.arange(15).view(3, 5)
        mine = redistribute(grid, (3, 5), whole, rows, comm)
        other = redistribute(mine, (3, 5), rows, columns, comm)
        far = Layout(Placement("cpu", (1,), (1,)), (B,))
        moved = redistribute(other, (3, 5), columns, far, comm)
        return [
            summed(comm), summed(comm, size=LARGE), other, redistribute(other, (3, 5), columns, whole, comm),
            redistribute(moved, (3, 5), far, whole, comm),
            redistribute(torch.tensor([True, False]), (2,), Layout(LINE, (P,)), whole, comm),
        ]  # fmt: skip

    for rank, (small, large, columns, whole, back, flags) in enumerate(pair(on_a_rank)):
        assert torch.equal(small, torch.full((SMALL,), 3.0))
        assert torch.equal(large, torch.full((LARGE,), 3.0))
        grid = torch.arange(15).view(3, 5)
        assert torch.equal(columns, grid.tensor_split([3], 1)[rank])
        assert torch.equal(whole, grid)
        assert torch.equal(back, grid)
        assert flags.tolist() == [True, False]


def test_payloads_of_any_length_are_gathered_by_gloo(pair: Callable[..., list[Any]]) -> None:
    doing = CollectiveLabel.of("payloads")
    texts = [b"", b"abc" * 100]
    assert pair(lambda w: w.gather(doing, (0, 1), texts[w.rank])) == [texts, texts]


def test_two_ranks_in_different_ops_both_raise_what_each_does(pair: Callable[..., list[Any]]) -> None:
    errors = pair(
        lambda w: [summed(w), summed(w, "aten.relu.default")], lambda w: [summed(w), summed(w, "aten.mm.default")]
    )
    assert all(isinstance(e, CallError) for e in errors), errors
    for error in errors:
        assert "rank 0 is in collective 1 of ranks [0,1]: aten.relu.default: float32[6], P on cpu:[0,1]" in str(error)
        assert "rank 1 is in collective 1 of ranks [0,1]: aten.mm.default: float32[6], P on cpu:[0,1]" in str(error)
        assert f"{__file__}:" in str(error)  # the line of the script


def test_every_op_can_be_compared_before_it_runs(pair: Callable[..., list[Any]]) -> None:
    errors = pair(lambda w: w.compare("aten.relu.default" if w.rank else "aten.mm.default"))
    assert all(isinstance(e, CallError) for e in errors)
    assert "  rank 0: aten.mm.default\n  rank 1: aten.relu.default" in str(errors[0])
    assert pair(lambda w: w.compare("aten.mm.default")) == [None, None]


def test_a_rank_that_has_raised_is_named_with_its_error(pair: Callable[..., list[Any]]) -> None:
    error, _ = pair(lambda w: summed(w), lambda w: w.finish("raised ValueError: no"))
    assert isinstance(error, CallError)
    assert "rank 0 waits for rank 1, which raised ValueError: no" in str(error)


def test_a_slow_rank_is_waited_for_and_told_of(
    pair: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mismatch_watch, "SLOW", 0.2)
    monkeypatch.setattr(mismatch_watch, "PATIENCE", 0.1)
    told = threading.Event()
    show = mismatch_watch.MismatchWatch._print_wait

    def tell(*args: Any) -> None:
        show(*args)
        told.set()

    monkeypatch.setattr(mismatch_watch.MismatchWatch, "_print_wait", tell)

    def late(comm: GroupCommunicator) -> Tensor:
        assert told.wait(LIMIT)
        return summed(comm)

    found = pair(summed, late)
    assert all(torch.equal(x, torch.full((SMALL,), 3.0)) for x in found)
    text = capfd.readouterr().err
    assert "rank 0 has waited" in text
    assert "rank 1 is in no collective" in text


# ---- a rank of its own process


DIES = """
import sys, os, signal, torch
import torch.distributed as dist
from actorflow.eager.group_communicator import GroupCommunicator
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False)
comm = GroupCommunicator(dist.PrefixStore("test", store), 1, 2)
store.wait(["met"])  # this side may be done first
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_dies_while_another_waits_for_it_is_named(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    child = subprocess.Popen(
        [warm.python(), str(_script(tmp_path, DIES)), str(store.port)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    comm = GroupCommunicator(dist.PrefixStore("test", store), 0, 2)
    store.set("met", "")
    with closing(_Finished(comm)), pytest.raises(ClusterError, match="rank 1 was lost while rank 0 waited") as error:
        summed(comm, "aten.mm.default")
    assert "aten.mm.default: float32[6]" in str(error.value)
    assert child.wait(LIMIT) == -signal.SIGKILL


class _Finished:
    def __init__(self, comm: GroupCommunicator) -> None:
        self.close = comm.finish


# ---- a whole run

APART = """
import actorflow as flow

where = {"placement": flow.placement.all("cpu")}
x = flow.ones(4, 6, sbp=flow.sbp.split(0), **where)
y = flow.ones(4, 6, sbp=flow.sbp.split(1), **where)
print("sum", float((x + y).sum()), flush=True)
if flow.env.rank() == 1:
    x @ y.t()
else:
    x + y
"""


@pytest.mark.slow
def test_a_run_whose_ranks_part_ends_with_both_ops_and_lines(tmp_path: Path) -> None:
    run = Run(tmp_path, _script(tmp_path, APART), "--log-dir", str(tmp_path / "logs"), "--devices", "2")
    assert run.wait() == 1
    assert "sum 48.0" in run.output
    assert "aten.add.Tensor: float32[4,6]" in run.output
    assert "script.py:11" in run.output
    assert "aten.mm.default: float32[4,6]" in run.output
    assert "script.py:9" in run.output
    assert run.ranks_left() == []


def _script(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(text)
    return script
