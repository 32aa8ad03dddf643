"""NCCL's plane over communicators that only note what is asked of them, and over ones that never end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, Store, distributed_c10d  # type: ignore[attr-defined]

from actorflow.devices.cpu import Cpu
from actorflow.session.lifecycle import planes_of
from actorflow.transport import nccl, timeouts
from actorflow.transport.communicators import over_nccl
from actorflow.transport.nccl import NcclPlane, nccl_version
from actorflow.transport.timeouts import Patience, Started
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Exchange, TensorSpec

SECONDS = 200.0  # for what comes at once, which only a hang takes
VECTOR = TensorSpec((3,), "float32", "")
THIRDS = tuple((Box((i,), (i + 1,)),) for i in range(3))
SWAPPED = Exchange(THIRDS, THIRDS)  # element i of what rank i gives goes to element i of what all get


@dataclass
class FakeMark:
    """A mark that has passed when the test says so."""

    ended: threading.Event

    def passed(self) -> bool:
        return self.ended.is_set()

    def wait_on_host(self) -> None:
        pass


@dataclass
class Journal:
    """Communicators that note what is asked of them; their calls end when ``ended`` is set."""

    notes: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    made: int = 0

    def make(self, store: Store, rank: int, size: int) -> Any:
        self.made += 1
        self.notes.append(f"make {self.made}: {rank} of {size}")
        return FakeCommunicator(self, self.made)


@dataclass
class FakeCommunicator:
    journal: Journal
    number: int

    def note(self, what: str, options: Any = None) -> None:
        """As on a GPU the current stream does what it is told to, and nobody gets anything to wait for."""
        if options is not None:
            assert not options.asyncOp, "torch would hold the tensors, and run it on a stream of its own"
        self.journal.notes.append(f"{self.number} {what}")

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        assert (options.rootRank, options.rootTensor) == (0, 0)
        return self.note(f"move {tensors[0].numel()}", options)

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        return self.note(f"all_reduce {tensors[0].numel()} {tensors[0].dtype}", options)

    def alltoall_base(self, output: Tensor, input: Tensor, receive: list[int], send: list[int], options: Any) -> None:
        return self.note(f"all_to_all {send} {receive}", options)

    def abort(self) -> None:
        self.end("abort")

    def shutdown(self) -> None:
        self.end("shutdown")

    def end(self, how: str) -> None:
        self.note(how)
        if sum(note.endswith(how) for note in self.journal.notes) == self.journal.made:
            self.journal.closed.set()


class Ahead(Cpu):
    """A device whose calls return before they have ended; its marks pass when the journal says so."""

    ahead = True

    def __init__(self, journal: Journal | None = None) -> None:
        super().__init__()
        self._journal = journal or Journal()

    def here(self) -> Any:
        return self

    def queue(self, name: str) -> Any:
        return self

    def context(self) -> Any:
        return nullcontext()

    def mark(self) -> FakeMark:
        ended = self._journal.ended
        if ended.is_set():  # now, and for ever
            ended = threading.Event()
            ended.set()
        return FakeMark(ended)


def plane(journal: Journal, **options: Any) -> NcclPlane:
    made = NcclPlane(1, HashStore(), Ahead(journal), make=journal.make, **options)
    made.open([(0, 1), (1, 2)], [(0, 1, 2)])
    return made


def test_every_communicator_is_made_and_used_in_the_order_that_all_ranks_share() -> None:
    journal = Journal()
    made = plane(journal)
    wanted = [
        "make 1: 1 of 2", "1 move 1", "make 2: 0 of 2", "2 move 1",
        "make 3: 1 of 3", "3 all_reduce 3 torch.uint8", "3 all_to_all [1, 1, 1] [1, 1, 1]",
    ]  # fmt: skip
    assert journal.notes == wanted
    made.open([(0, 1), (1, 2)], [(0, 1, 2)])
    assert journal.notes == wanted, "what exists was made again"


def test_small_tensors_travel_together_and_empty_ones_not_at_all() -> None:
    journal = Journal()
    made = plane(journal)
    del journal.notes[:]
    large = torch.zeros(40_000)
    made.send(2, [torch.zeros(3), large, torch.empty(0, 2), torch.zeros(1)])
    found = made.receive(0, [VECTOR, TensorSpec((40_000,), "float32", ""), TensorSpec((0, 2), "int64", ""), VECTOR])
    assert journal.notes == ["2 move 160000", "2 move 32", "1 move 160000", "1 move 32"]
    assert [tuple(t.shape) for t in found] == [(3,), (40_000,), (0, 2), (3,)]


def test_nothing_holds_tensors_once_a_call_is_in_its_queue_however_late_it_ends() -> None:
    journal = Journal()
    journal.ended.set()
    made = plane(journal)
    journal.ended.clear()
    all_to_all = Collective(CollectiveKind.ALL_TO_ALL, 1, (0, 1, 2), exchanges=(SWAPPED,))
    held = []
    for _ in range(3):  # calls that are under way for ever
        large, summed, cut = torch.zeros(40_000), torch.ones(3), torch.ones(3)
        made.send(2, [large])
        (came,) = made.receive(0, [TensorSpec((40_000,), "float32", "")])
        (total,) = made.collective(Collective(CollectiveKind.ALL_REDUCE, 0, (0, 1, 2)), [summed], [VECTOR])
        (whole,) = made.collective(all_to_all, [cut], [VECTOR])
        held += [weakref.ref(t.untyped_storage()) for t in (large, came, summed, total, cut, whole)]
        del large, came, summed, total, cut, whole
    assert "of 12 under way" in made.explain()
    assert [ref() for ref in held] == [None] * 18
    made.close()


def test_an_all_reduce_is_one_call_for_each_dtype_summed_in_one_that_nccl_knows() -> None:
    journal = Journal()
    made = plane(journal)
    del journal.notes[:]
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.bool), torch.ones(4)]
    specs = [TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."), "") for t in tensors]
    found = made.collective(Collective(CollectiveKind.ALL_REDUCE, 0, (0, 1, 2)), tensors, specs)
    assert journal.notes == ["3 all_reduce 7 torch.float32", "3 all_reduce 2 torch.int32"]
    assert [t.dtype for t in found] == [torch.float32, torch.bool, torch.float32]


def test_a_call_that_does_not_end_is_told_once_with_its_name_and_one_that_does_is_not() -> None:
    journal, told, late = Journal(), [], threading.Event()

    def tell(started: Started) -> None:
        told.append(started.what)
        late.set()

    journal.ended.set()
    made = plane(journal, patience=2.0, late=tell)  # the first has ended by then, also on a machine that stalls
    made.send(2, [torch.zeros(3)])
    assert made.explain() == ""
    journal.ended.clear()
    made.receive(0, [VECTOR])
    made.send(2, [torch.zeros(3)])
    assert "of 2 under way: receive 0>1" in made.explain()
    assert late.wait(SECONDS)
    assert told == ["receive 0>1"]
    made.close()


@pytest.mark.parametrize(("orderly", "how"), [(False, "abort"), (True, "shutdown")])
def test_closing_gives_up_what_is_under_way_and_finishing_shuts_down_in_order(orderly: bool, how: str) -> None:
    journal = Journal()
    made = plane(journal)
    if orderly:
        journal.ended.set()
        made.finish()
    else:
        made.close()
    assert journal.closed.wait(SECONDS)
    assert sorted(journal.notes[-3:]) == [f"1 {how}", f"2 {how}", f"3 {how}"]
    with pytest.raises(ClusterError, match=r"send 1>2 came after the run had ended"):
        made.send(2, [torch.zeros(3)])
    made.close()
    assert journal.notes.count(f"1 {how}") == 1


ENDS_EARLY = """
import time

import torch

from actorflow.transport.communicators import abort_all


class Slow:
    def abort(self):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            torch.ones(300, 300).mm(torch.ones(300, 300))


abort_all([Slow()], "slow")
"""


@pytest.mark.slow
def test_a_process_ends_in_order_while_communicators_are_given_up() -> None:
    run = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, timeout=250)
    assert (run.returncode, run.stderr) == (0, "")


def test_an_error_of_nccl_says_which_transfer_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    made = plane(Journal())
    monkeypatch.setattr(FakeCommunicator, "broadcast", broken)
    with pytest.raises(ClusterError, match=r"rank 1: send 1>2 over NCCL failed: NCCL error"):
        made.send(2, [torch.zeros(3)])


def test_a_torch_without_nccl_says_so() -> None:
    if hasattr(distributed_c10d, "ProcessGroupNCCL"):
        pytest.skip("this torch has NCCL")
    assert nccl_version() == ""
    with pytest.raises(ClusterError, match="this torch has no NCCL"):
        over_nccl(HashStore(), 0, 1)
    assert set(planes_of(0, HashStore(), Ahead(), 1.0, lambda started: None)) == {"gloo"}


@pytest.mark.skipif(
    not hasattr(distributed_c10d, "ProcessGroupNCCL") or torch.cuda.is_available(), reason="for NCCL without GPUs"
)
def test_torchs_own_class_takes_what_it_is_given_and_what_it_lacks_is_told() -> None:
    with pytest.raises(ClusterError, match=r"rank 1 could not make a communicator of NCCL with ranks \[0, 1\]: .*GPU"):
        NcclPlane(1, HashStore(), Ahead()).open([(0, 1)], [])
    for method in ("broadcast", "allreduce", "alltoall_base", "abort", "shutdown"):
        assert callable(getattr(distributed_c10d.ProcessGroupNCCL, method))


QUIET = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
)  # fmt: skip


def test_torchs_own_threads_are_told_not_to_end_the_process_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str | None]] = []

    class Group:
        class Options:
            def __init__(self, is_high_priority_stream: bool) -> None:
                assert is_high_priority_stream, "a communicator must not share its stream with what computes"

        def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:
            assert options._timeout >= timedelta(hours=1)
            seen.append([os.environ.get(name) for name in QUIET])

    monkeypatch.setattr(nccl.distributed_c10d, "ProcessGroupNCCL", Group, raising=False)
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    over_nccl(HashStore(), 0, 1)
    assert not os.environ.keys() & set(QUIET)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    over_nccl(HashStore(), 0, 1)
    assert seen == [["0"] * 4, ["3", "0", "0", "0"]]
    assert os.environ.keys() & set(QUIET) == {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}


def test_patience_looks_at_the_oldest_call_alone_and_ends_when_it_is_closed() -> None:
    told: list[str] = []
    patience = Patience(1e6, lambda started: told.append(started.what))
    first, second = patience.start("first"), patience.start("second")
    assert "of 2 under way: first" in patience.explain()
    first.issued = True
    assert "of 1 under way: second" in patience.explain()
    second.issued = True
    assert patience.explain() == ""
    thread = patience._thread
    patience.close()
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not told


def test_calls_that_end_one_after_the_other_are_not_late_however_far_the_host_is_ahead() -> None:
    """The last call is under way for longer than patience, and waits for the ones before it all that time."""
    while True:
        late, longest = threading.Event(), 0.0
        patience = Patience(1.5, lambda started, late=late: late.set())  # five times what a call takes
        calls = [patience.start(str(number)) for number in range(6)]
        for call in calls:
            before = time.monotonic()
            late.wait(0.3)
            call.issued = True
            longest = max(longest, time.monotonic() - before)
        told = late.is_set()
        if longest < 1.0:  # or the machine has stalled, and a call was late indeed
            break
        patience.close()
    assert not told
    stuck = patience.start("stuck")
    assert late.wait(SECONDS)
    assert stuck.seconds >= 1.5


def test_calls_of_a_process_that_was_stopped_begin_anew_when_it_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = [0.0]
    monkeypatch.setattr(timeouts, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(asleep)))
    told: list[float] = []
    patience = Patience(0.5, lambda started: told.append(started.seconds))
    as_it_is = patience._changed.wait

    def wait(seconds: float | None = None) -> bool:
        if len(asleep) == 1:
            asleep.append(1000.0)  # it is stopped while it waits
            return False
        return as_it_is(seconds)

    monkeypatch.setattr(patience._changed, "wait", wait)
    patience.start("a call that does not end")
    assert patience._thread is not None
    patience._thread.join(SECONDS)
    patience.close()
    assert told[0] < 500.0


def test_a_device_that_has_failed_says_nothing_of_calls_and_they_count_as_under_way() -> None:
    class Failed:
        def passed(self) -> bool:
            raise RuntimeError("CUDA error: device-side assert triggered")

        def wait_on_host(self) -> None:
            raise AssertionError("nobody waits for it")

    patience = Patience(1e6, lambda started: None)
    started = patience.start("send 0>1")
    started.marks.append(Failed())
    started.issued = True
    assert "of 1 under way: send 0>1" in patience.explain()
    patience.close()
