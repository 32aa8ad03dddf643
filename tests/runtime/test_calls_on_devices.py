"""What a call gives whose device is behind: in time, after a failure, and when the device does not come."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from actorflow.devices import Cpu
from actorflow.runtime.call import Behind, Call
from actorflow.runtime.worker import Worker
from actorflow.transport.messages import Message
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import OfInput
from runtime.fake_device import Bench
from runtime.programs import Program, on, spec


class Switchless:
    """A transport that nothing is sent over."""

    def send(self, to: int, message: Message) -> None:
        raise AssertionError(message)


SOON = 200.0  # seconds, for what comes at once; only a hang takes as long
LATE = 0.1  # for what does not come
LOST = ClusterError("rank 1 was lost")


@dataclass
class Mark:
    """A place in a queue that is passed when the test says so, or never where the device has failed."""

    there: threading.Event = field(default_factory=threading.Event)
    broken: bool = False

    def passed(self) -> bool:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.there.is_set()

    def wait_on_host(self) -> None:
        assert self.there.wait(SOON)


class Made:
    """A call with two results that are launched; ``marks`` say when they can be read, and when it is done."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.marks = [Mark(), Mark(), Mark()]
        self.call = Call(0, 0, {}, {}, frozenset({0, 1}), 0, threading.Condition(), lambda: self.failure, Cpu())
        for index in (0, 1):
            self.call.give([(index, torch.tensor(float(index)))], self.marks[index])
        self.call.ended = [self.marks[2]]
        self.call.fired = True

    def fail(self) -> None:
        """As a worker does: first what is there is kept, then transfers are given up, and their marks pass."""
        self.call.keep()
        self.failure = LOST
        for mark in self.marks:
            mark.there.set()


def test_a_result_that_was_there_when_the_work_failed_can_be_read_and_one_that_was_not_cannot() -> None:
    made = Made()
    made.marks[0].there.set()
    made.fail()
    assert made.call.result(0).item() == 0.0
    with pytest.raises(ClusterError, match="rank 1 was lost"):
        made.call.result(1)
    with pytest.raises(ClusterError, match="rank 1 was lost"):
        made.call.wait()


def test_a_call_that_was_done_when_the_work_failed_is_done_with_all_that_it_gives() -> None:
    made = Made()
    for mark in made.marks:
        mark.there.set()
    assert made.call.done
    made.fail()
    made.call.wait()
    assert [made.call.result(index).item() for index in (0, 1)] == [0.0, 1.0]


def test_a_device_that_has_failed_gives_nothing_and_hides_no_failure() -> None:
    made = Made()
    made.marks[0].there.set()
    made.marks[1].broken = made.marks[2].broken = True
    behind = Behind()
    behind.add(made.call)
    behind.keep()
    made.fail()
    assert made.call.result(0).item() == 0.0
    with pytest.raises(ClusterError, match="rank 1 was lost"):
        made.call.result(1)


def test_a_time_limit_counts_until_the_device_is_done() -> None:
    made = Made()
    with pytest.raises(TimeoutError, match=r"call 0: result 1 did not come in 0\.1 s; its device is not done"):
        made.call.result(1, LATE)
    with pytest.raises(TimeoutError, match=r"call 0: its end did not come in 0\.1 s; its device is not done"):
        made.call.wait(LATE)
    for mark in made.marks:
        mark.there.set()
    made.call.wait(LATE)
    assert made.call.result(1, LATE).item() == 1.0


def launched(call: Call) -> None:
    """Return when all that a call does is in its device's queues."""
    call._until(lambda: call.fired, time.monotonic() + SOON, SOON, "its launch")


def test_a_worker_keeps_what_its_calls_have_given_when_it_fails() -> None:
    bench = Bench(eager=0.0)
    p = Program()
    (a,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source")
    p.result(a, on(0), (B,), (1,))
    worker = Worker(0, Switchless(), {}, bench.device(), gated=False, library={})
    worker.install(0, p.plan())
    calls: list[Any] = [worker.issue(0, {"x": torch.full((1,), float(n))}) for n in range(2)]
    launched(calls[1])
    bench.drain()
    worker.fail(LOST)
    assert [call.result(0, SOON).item() for call in calls] == [0.0, 1.0]
    worker.close()
    assert not bench.wrongs
