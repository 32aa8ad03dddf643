"""What a rank knows of the calls of all ranks, and what threads that serve other ranks wait for."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from actorflow.control.cluster import Alone
from actorflow.control.drops import NO_DROPS, DropSet, drop_set
from actorflow.rendezvous.failure import Failure, FailureKind
from actorflow.session.call_barrier import CallBarrier
from actorflow_compiler.core.errors import CallError

SOON = 60.0  # seconds


def barrier(calls: int, alone: Alone | None = None) -> CallBarrier:
    made = CallBarrier(alone or Alone())
    for number in range(calls):
        made.announce(number, 100 + number)
    return made


def test_what_was_dropped_with_a_new_plan_is_not_dropped_again_by_an_agreement_that_comes_late() -> None:
    found = barrier(6)
    found.agreed(2, drop_set([1], ["a"]))
    found.forget(drop_set([1, 2], ["a", "b"]))  # with call 5, the last one
    found.agreed(4, drop_set([2, 3], ["b", "c"]))
    assert found.drops_by(5) == drop_set([3], ["c"])
    found.announce(6, 7)
    found.agreed(6, drop_set([], ["b"]))  # another variable of that name
    assert found.drops_by(7) == drop_set([], ["b"])
    assert found.drops_by(7) == NO_DROPS


def test_who_waits_for_what_all_have_dropped_goes_on_when_all_have_made_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, waits = Alone(), threading.Event()
    monkeypatch.setattr(alone.failed, "is_set", waits.set)  # it looks whether the run has failed, and waits
    found = barrier(1, alone)
    dropped: SimpleQueue[DropSet] = SimpleQueue()
    threading.Thread(target=lambda: dropped.put(found.drops_by(1)), daemon=True).start()
    assert waits.wait(SOON)
    found.agreed(0, drop_set([1], []))
    assert dropped.get(timeout=SOON) == drop_set([1], [])


def test_histories_are_kept_until_all_ranks_are_known_to_have_made_the_call() -> None:
    found = barrier(4)
    assert [found.history(calls) for calls in (0, 1, 4, 5)] == [-1, 100, 103, -1]
    found.agreed(2)
    assert [found.history(calls) for calls in (1, 3, 4)] == [-1, -1, 103]
    assert found.agreed_calls == 3


def test_a_rank_that_has_done_something_else_is_answered_with_the_error_that_ends_the_run() -> None:
    alone = Alone()
    found = barrier(3, alone)
    found.wait_if_other(3, 102)
    found.wait_if_other(3, -1)  # all are known to have done the same
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            found.wait_if_other(2, 102)
        except BaseException as error:
            raised.append(error)

    server = threading.Thread(target=serve)
    server.start()
    alone.failure = Failure(1, "here", 7, FailureKind.CALL, "a call differs between ranks", 0)
    alone.failed.set()
    found.notify()
    server.join(SOON)
    assert [type(error) for error in raised] == [CallError]
    with pytest.raises(CallError, match="a call differs"):
        raise raised[0]
