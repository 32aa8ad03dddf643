"""Ranks that begin calls without waiting for each other: what they compute is that of their script, or the run ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actorflow.runtime.call import Call
from actorflow.runtime.call_stamps import CallStamps
from actorflow.runtime.worker import Worker
from actorflow.testing.local_cluster import MemoryTransport
from actorflow.transport.memory import Switchboard
from actorflow.transport.messages import Stamp
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import OfInput, OfVariable, Plan
from fewer import fewer
from runtime.programs import ADD, V0, V1, Program, body, on, spec, step

SOON = 60.0  # seconds in which anything must happen
WORLD = 3
SUB = body(2, step("aten.sub.Tensor", V0, V1, outs=[2]), outputs=[2])


# -- stamps by themselves --------------------------------------------------------------------------


def test_a_stamp_that_comes_before_the_call_is_compared_when_the_call_is_made() -> None:
    stamps = CallStamps()
    stamps.made(Stamp(0, 5))
    stamps.arrived(1, Stamp(1, 6))
    stamps.arrived(2, Stamp(1, 7))
    assert not stamps.have([1], 1)
    stamps.made(Stamp(1, 6))
    assert stamps.have([1], 1)
    assert stamps.differing == {2: 1}
    assert not stamps.have([2], 1)


def test_what_waits_goes_on_when_the_last_rank_that_it_needs_has_made_the_call() -> None:
    stamps, done = CallStamps(), []
    stamps.made(Stamp(3, 5))
    stamps.when([1, 2], 3, lambda: done.append("both"))
    stamps.when([2], 3, lambda: done.append("one"))
    stamps.arrived(2, Stamp(3, 5))
    assert done == ["one"]
    assert stamps.missing() == {1: 3}
    stamps.arrived(1, Stamp(3, 5))
    assert done == ["one", "both"]
    assert stamps.missing() == {}


def test_a_rank_that_has_differed_once_is_never_taken_to_do_the_same_again() -> None:
    stamps = CallStamps()
    for call in range(2):
        stamps.made(Stamp(call, 5))
    stamps.arrived(1, Stamp(0, 4))
    stamps.arrived(1, Stamp(1, 5))
    assert not stamps.have([1], 0)
    assert stamps.differing == {1: 0}


def test_a_stamp_of_a_call_that_all_are_known_to_have_made_is_one_of_them() -> None:
    stamps = CallStamps()
    for call in range(4):
        stamps.made(Stamp(call, call))
    stamps.agreed(2)
    stamps.arrived(1, Stamp(1, 1))  # it is slow
    assert stamps.have([1], 1)
    stamps.arrived(1, Stamp(3, 9))
    assert stamps.differing == {1: 3}


# -- workers ---------------------------------------------------------------------------------------


def summing() -> Plan:
    """Every rank brings x + w to a sum, which is added to its w and is its result."""
    p = Program(name="sum")
    group = p.collective("all_reduce", range(WORLD))
    for rank in range(WORLD):
        (x,) = p.actor(f"x{rank}", OfInput("x"), out=[spec(1)], kind="source", queue="source", rank=rank)
        (mine,) = p.actor(f"F{rank}", x, OfVariable("w"), body=ADD, out=[spec(1)], rank=rank)
        (total,) = p.actor(f"C{rank}", mine, out=[spec(1)], kind="boxing", queue="comm", rank=rank, comm=group)
        p.actor(f"U{rank}", OfVariable("w"), total, body=ADD, into=[OfVariable("w")], rank=rank)
        p.result(total, on(rank), (B,), (1,), rank=rank)
    return p.plan()


def passing() -> Plan:
    """Rank 0 sends x - w to rank 1, whose w becomes that."""
    p = Program(name="pass", world=WORLD)
    (x,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source")
    (made,) = p.actor("F", x, OfVariable("w"), body=SUB, out=[spec(1)])
    (came,) = p.send(made, to=1, plane="inline")
    (next_w,) = p.actor("U", OfVariable("w"), came, body=SUB, out=[spec(1)], into=[], rank=1)
    p.actor("W", next_w, into=[OfVariable("w")], rank=1)
    p.result(next_w, on(1), (B,), (1,), rank=1)
    return p.plan()


def alone() -> Plan:
    """Rank 2 adds x to its w."""
    p = Program(name="alone")
    (x,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source", rank=2)
    (total,) = p.actor("F", x, OfVariable("w"), body=ADD, out=[spec(1)], rank=2)
    p.actor("W", total, into=[OfVariable("w")], rank=2)
    p.result(total, on(2), (B,), (1,), rank=2)
    return p.plan()


PLANS = (summing(), passing(), alone())
Made = tuple[int, int]  # a call: number of the plan, and x
Script = tuple[Made, ...]


def expected(script: Script, rank: int) -> list[float | None]:
    """What each call of a script gives a rank, if all ranks run that script."""
    w, found = [0.0] * WORLD, []
    for plan, x in script:
        given: list[float | None] = [None] * WORLD
        if plan == 0:
            total = sum(x + one for one in w)
            w = [one + total for one in w]
            given = [total] * WORLD
        elif plan == 1:
            w[1] -= x - w[0]
            given[1] = w[1]
        else:
            w[2] += x
            given[2] = w[2]
        found.append(given[rank])
    return found


class Announcements:
    """What ranks announce, compared late: as the master does, which is no part of a call."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # call → history
        self.differ = False

    def add(self, call: int, history: int) -> None:
        if self._first.setdefault(call, history) != history:
            self.differ = True


class Ranks:
    """Workers of three ranks with the plans installed."""

    def __init__(self) -> None:
        board = Switchboard()
        self.workers: list[Worker] = []
        for rank in range(WORLD):
            planes = {"memory": board.plane(rank)}
            self.workers.append(Worker(rank, MemoryTransport(rank, self.workers), planes, library={}))
        for worker in self.workers:
            for number, plan in enumerate(PLANS):
                worker.install(number, plan.for_rank(worker.rank), {"w": torch.zeros(1)})
        self.calls: list[list[Call]] = [[] for _ in range(WORLD)]

    def call(self, rank: int, script: Script, number: int) -> int:
        """Make a call of a script on a rank; returns the history that it shows."""
        plan, x = script[number]
        history = digest(script[: number + 1])
        stamp = Stamp(number, history)
        self.calls[rank].append(self.workers[rank].issue(plan, {"x": torch.tensor([float(x)])}, stamp=stamp, free=True))
        return history

    def given(self, rank: int, number: int) -> float | None:
        """What a call has given a rank so far."""
        found = [one for one in self.calls[rank][number].results if one is not None]
        assert len(found) <= 1
        return found[0].item() if found else None

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def pause(worker: Worker) -> None:
    """Wait until a worker has dealt with all that has come to it."""
    seen = threading.Event()
    worker._compute._inbox.put(seen.set)
    assert seen.wait(SOON)


def digest(script: Script) -> int:
    return int.from_bytes(blake2b(repr(script).encode(), digest_size=7).digest(), "little")


def test_a_rank_joins_a_collective_only_when_all_have_made_the_call(ranks: Ranks) -> None:
    script: Script = ((0, 1), (0, 2))
    ranks.call(0, script, 0)
    ranks.call(1, script, 0)
    end = threading.Event()
    ranks.workers[2].on_failure(lambda _: end.set())
    assert ranks.workers[0].missing_calls.keys() <= {1, 2}
    assert ranks.given(0, 0) is None
    ranks.call(2, script, 0)
    for rank in range(WORLD):
        ranks.calls[rank][0].wait(SOON)
        assert ranks.given(rank, 0) == 3.0
    assert not end.is_set()


def test_a_call_of_others_does_not_wait_for_a_rank_without_a_part_in_it(ranks: Ranks) -> None:
    script: Script = ((0, 1), *((1, n) for n in range(40)))
    ranks.call(2, script, 0)  # and then it stands still
    for number in range(len(script)):
        for rank in range(2):
            ranks.call(rank, script, number)
    ranks.calls[1][-1].wait(SOON)
    assert ranks.given(1, 40) == expected(script, 1)[-1]
    for number in range(1, len(script)):
        ranks.call(2, script, number)
    ranks.workers[2].wait_all(SOON)


def test_a_call_that_begins_only_when_others_have_made_it_names_those_that_have_not(ranks: Ranks) -> None:
    for worker in ranks.workers[:2]:
        worker._jobs[0].stamps_first = (2,)  # as for plans with calls of NCCL
    script: Script = ((0, 1), (0, 2))
    for number in range(2):
        for rank in range(2):
            ranks.call(rank, script, number)
    pause(ranks.workers[0])
    assert not ranks.calls[0][0].begun
    assert ranks.workers[0].missing_calls == {2: 0}
    assert "call 0 waits for rank 2 to make it" in ranks.workers[0].explain()
    for number in range(2):
        ranks.call(2, script, number)
    for worker in ranks.workers:
        worker.wait_all(SOON)
    assert ranks.workers[0].missing_calls == {}


def test_nothing_is_computed_with_what_a_rank_sends_that_has_made_another_call(ranks: Ranks) -> None:
    ranks.call(1, ((1, 6),), 0)
    pause(ranks.workers[1])  # it has begun
    ranks.call(0, ((1, 5),), 0)  # the same plan with another argument
    ranks.workers[0].wait_all(SOON)
    with pytest.raises(TimeoutError):
        ranks.calls[1][0].wait(0.05)
    assert "rank 0 has made another call 0" in ranks.workers[1].explain()
    assert ranks.given(1, 0) is None
    assert float(ranks.workers[1].variables["w"]) == 0


def test_a_call_does_not_begin_where_another_rank_has_shown_a_different_one(ranks: Ranks) -> None:
    ranks.workers[2].deliver(0, Stamp(0, 1))
    ranks.call(2, ((2, 5),), 0)
    pause(ranks.workers[2])
    assert ranks.given(2, 0) is None
    assert float(ranks.workers[2].variables["w"]) == 0


@st.composite
def scripts(draw: Callable[..., object]) -> tuple[Script, ...]:
    """A script for each rank: the same, or with a branch at which some rank does something else."""
    calls = st.tuples(st.sampled_from([0, 0, 1, 1, 2]), st.integers(0, 3))
    common = tuple(draw(st.lists(calls, max_size=10)))  # type: ignore[call-overload]
    found = []
    for _ in range(WORLD):
        script = list(common)
        if draw(st.integers(0, 4)) == 0:
            at = draw(st.integers(0, len(script)))
            kind = draw(st.sampled_from(["more", "less", "other", "end"]))
            if kind == "more":
                script.insert(at, draw(calls))  # type: ignore[arg-type, call-overload]
            elif kind == "less":
                del script[at : at + 1]  # type: ignore[operator]
            elif kind == "other":
                script[at : at + 1] = [draw(calls)]  # type: ignore[operator, list-item]
            else:
                del script[at:]  # type: ignore[misc]
        found.append(tuple(script))
    return tuple(found)


@given(scripts())
@settings(max_examples=fewer(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_ranks_branch_on_a_result_is_that_of_the_ranks_script_or_the_run_ends(scripts: list[Script]) -> None:
    ranks, announced, over = Ranks(), Announcements(), threading.Event()
    try:
        values = [expected(script, rank) for rank, script in enumerate(scripts)]

        def run(rank: int) -> None:
            script = scripts[rank]
            try:
                for number in range(len(script)):
                    announced.add(number, digest(script[: number + 1]))
                    ranks.call(rank, script, number)
                    if number % 3 == 2:
                        ranks.calls[rank][number].wait(SOON)
                announced.add(len(script), -1)
                ranks.workers[rank].wait_all(SOON)
            except CallError:
                assert over.is_set()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + SOON
        while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
            for thread in threads:  # ranks that differ go as far as they can, which takes them no longer
                thread.join(SOON if len(set(scripts)) == 1 else 0.05)
            if announced.differ:
                over.set()
                for worker in ranks.workers:
                    worker.fail(CallError("a call differs between ranks"))
        assert not any(thread.is_alive() for thread in threads)
        assert announced.differ == (len(set(scripts)) > 1)
        for rank in range(WORLD):
            for number in range(len(ranks.calls[rank])):
                given_here = ranks.given(rank, number)
                assert given_here in (None, values[rank][number])
                if not announced.differ:
                    assert given_here == values[rank][number]
    finally:
        ranks.close()
