"""Parts of large results, and word of the handles on them that are gone."""

from __future__ import annotations

import gc
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import actorflow as flow
from actorflow.control.alone import Alone
from actorflow.runtime.results import ResultDropped, Results
from actorflow.session.session import Session
from actorflow.support import background
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.support.requests import Request
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.plan.plan import Result
from cluster.ranks import LIMIT

SPLIT = Result(0, (4,), "float32", placement("cpu", [0, 1]), (Split(0),))


def ended(results: Results) -> None:
    """Close the results, and wait for the thread that tells of handles."""
    # those of other tests, and of sessions of this process, may still be there
    (thread,) = [one for one, stop in background._working.copy().items() if stop == results.close]
    results.close()
    thread.join(LIMIT)
    assert not thread.is_alive()


class Peers:
    """Rank 0 of two; what it tells the other arrives there unless that one refuses."""

    rank, world = 0, 2

    def __init__(self) -> None:
        self.heard: SimpleQueue[Request] = SimpleQueue()
        self.refuses: list[BaseException] = []

    def pull(self, rank: int, request: Request) -> bytes:
        assert rank == 1
        if self.refuses:
            raise self.refuses.pop()
        self.heard.put(request)
        return b""


class Call:
    """One that is done."""

    done, lost = True, None

    def result(self, index: int) -> torch.Tensor:
        return torch.zeros(2)


@pytest.fixture
def results() -> Any:
    made = Results(Peers(), SimpleNamespace(where=torch.device("cpu")))  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.mark.parametrize("error", [ClusterError("rank 1 broke off"), AttributeError("results")])
def test_a_handle_of_which_an_owner_cannot_be_told_does_not_keep_it_from_hearing_of_the_next(
    results: Results, error: BaseException
) -> None:
    peers: Any = results._peers
    peers.refuses.append(error)
    for number in range(3):
        results.handles(number, Call(), [SPLIT])  # type: ignore[arg-type]
    assert [peers.heard.get(timeout=LIMIT) for _ in range(2)] == [ResultDropped(0, 1, 0), ResultDropped(0, 2, 0)]
    for number in range(3):
        results.forget(number, 0, 1)  # the other rank's handles
    ended(results)
    assert not results._kept
    assert not results._dropped


def test_a_handle_that_goes_at_any_moment_starts_no_thread(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are started under locks of Python's, within which a collector may let go of a handle."""
    (handle,) = results.handles(0, Call(), [SPLIT])  # type: ignore[arg-type]
    started: list[object] = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    del handle
    gc.collect()
    assert results._peers.heard.get(timeout=LIMIT) == ResultDropped(0, 0, 0)  # type: ignore[attr-defined]
    assert not started


def test_results_that_every_rank_has_whole_need_nobody_to_be_told(results: Results) -> None:
    before = set(threading.enumerate())
    results._peers.world = 1  # type: ignore[attr-defined]
    results.handles(0, Call(), [Result(0, (4,), "float32", placement("cpu", [0]), (Split(0),))])  # type: ignore[arg-type]
    assert before >= set(threading.enumerate())
    assert not results._kept


def test_the_thread_that_tells_of_handles_ends_with_the_session(results: Results) -> None:
    results.handles(0, Call(), [SPLIT])  # type: ignore[arg-type]
    ended(results)


@pytest.mark.parametrize(("number", "index"), [(0, 1), (1, 0), (-1, 0)])
def test_what_this_rank_has_no_part_of_is_neither_given_nor_dropped(results: Results, number: int, index: int) -> None:
    handles = results.handles(0, Call(), [SPLIT])  # type: ignore[arg-type]
    with pytest.raises(MessageRefused, match=f"a pull of result {index} of call {number}, of which this rank has"):
        results.serve(number, index)
    with pytest.raises(MessageRefused, match=f"the end of result {index} of call {number}, of which this rank has no"):
        results.forget(number, index, 1)
    assert not results._dropped
    del handles


def test_a_rank_that_tells_twice_of_the_end_of_its_handle_does_not_free_what_others_read(results: Results) -> None:
    handles = results.handles(0, Call(), [SPLIT])  # type: ignore[arg-type]
    results.forget(0, 0, 1)
    with pytest.raises(MessageRefused, match="which it has told before") as refused:
        results.forget(0, 0, 1)
    assert (refused.value.reason, refused.value.sender) == (RefusalReason.SEQUENCE, 1)
    assert (0, 0) in results._kept
    del handles
    gc.collect()
    ended(results)
    assert not results._kept
    with pytest.raises(MessageRefused, match="of which this rank has no part"):
        results.forget(0, 0, 1)


def test_a_handle_that_another_rank_drops_before_this_one_has_made_the_call_is_counted_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = Alone()
    session = Session(alone)
    made: list[tuple[int, int, int]] = []
    monkeypatch.setattr(Results, "forget", lambda self, *told: made.append(told))
    served = alone._requests.asked(ResultDropped(7, 0, 0).text(), 7)
    there = served.there()
    assert there is not None
    assert not there.done()
    model = torch.nn.Linear(2, 2)
    job = flow.global_function(lambda x: model(x).sum(), type="predict")
    session.call(job, (torch.ones(2, 2),), {})
    there.result(LIMIT)
    assert list(served.answer()) == []
    assert made == [(0, 0, 7)]
    session.finish()
