"""Tensors that go from device to device arrive, ranks that cannot do so use Gloo, and none waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from actorflow.eager import mismatch_watch
from actorflow.eager.group_communicator import GroupCommunicator
from actorflow.eager.layout import Layout
from actorflow.eager.pair_transfers import LOCATION_BYTES, PairCommunicators, can_use_nccl
from actorflow.eager.redistribution import redistribute
from actorflow.transport.communicators import over_gloo
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, P, Split

LIMIT = 200.0  # seconds
WORLD = 3
LINE = Placement("cpu", (0, 1, 2), (3,))
ROWS, COLUMNS, TERMS, WHOLE = (Layout(LINE, (s,)) for s in (Split(0), Split(1), P, B))
VERSION = b"a nccl, "


class Counting:
    """Gloo in NCCL's place: the tensors of these tests are on the CPU."""

    def __init__(self, communicator: Any, log: list[tuple[int, int]]) -> None:
        self._communicator, self._log = communicator, log

    def alltoall_base(self, into: Tensor, out: Tensor, take: list[int], give: list[int]) -> Any:
        self._log.append((out.numel(), into.numel()))
        return self._communicator.alltoall_base(into, out, take, give)

    def abort(self) -> None:
        self._communicator.abort()

    def shutdown(self) -> None:
        self._communicator.shutdown()


class Stuck:
    """A communicator whose transfers end only when it is aborted, as NCCL's do when a peer does not come."""

    def __init__(self) -> None:
        self._aborted = threading.Event()

    def alltoall_base(self, *arguments: Any) -> Stuck:
        return self

    def wait(self) -> None:
        assert self._aborted.wait(LIMIT)

    def abort(self) -> None:
        self._aborted.set()

    def shutdown(self) -> None:
        """Nothing is under way."""


class Failing(Stuck):
    """A communicator that fails at once."""

    def alltoall_base(self, *arguments: Any) -> Stuck:
        raise RuntimeError("out of memory")


class Ranks:
    """Three ranks that are threads; ``gpus`` says on which GPU each of them computes."""

    def __init__(self) -> None:
        self.gpus = ["0", "1", "2"]
        self.moved: list[list[tuple[int, int]]] = [[] for _ in range(WORLD)]  # of each rank's calls, bytes out and in
        self.make: Callable[..., Any] | None = None
        self._comms: list[GroupCommunicator] = []

    def location(self, rank: int) -> bytes:
        gpu = self.gpus[rank]
        return VERSION + gpu.encode().ljust(LOCATION_BYTES - len(VERSION)) if gpu else bytes(LOCATION_BYTES)

    def run(self, *functions: Callable[[GroupCommunicator], Any]) -> list[Any]:
        """What each has returned or raised."""
        store = dist.HashStore()
        found: list[Any] = [None] * WORLD

        def on_rank(rank: int) -> None:
            def make(store: Any, at: int, size: int) -> Any:
                return self.make(rank) if self.make else Counting(over_gloo(store, at, size), self.moved[rank])

            pairs = PairCommunicators(dist.PrefixStore("pairs", store), rank, make, "cpu", lambda: self.location(rank))
            try:
                comm = GroupCommunicator(dist.PrefixStore("test", store), rank, WORLD, pairs=pairs)
                self._comms.append(comm)
                found[rank] = functions[rank % len(functions)](comm)
            except Exception as error:
                found[rank] = error

        _together([lambda rank=rank: on_rank(rank) for rank in range(WORLD)])
        return found

    def close(self) -> None:
        _together([comm.finish for comm in self._comms])


def _together(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a rank hangs"


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


GRID = torch.arange(35).view(5, 7)


def layouts(comm: GroupCommunicator) -> list[Tensor]:
    mine = redistribute(GRID, (5, 7), WHOLE, ROWS, comm)
    other = redistribute(mine, (5, 7), ROWS, COLUMNS, comm)
    far = Layout(Placement("cpu", (2, 0), (2,)), (Split(0),))
    moved = redistribute(other, (5, 7), COLUMNS, far, comm)
    flags = redistribute(torch.tensor([comm.rank == 1, False]), (2,), TERMS, WHOLE, comm)
    sums = redistribute(torch.full((40_000,), comm.rank + 1.0), (40_000,), TERMS, WHOLE, comm)
    return [other, redistribute(moved, (5, 7), far, WHOLE, comm), flags, sums]


@pytest.mark.parametrize("gpus", [["0", "1", "2"], ["0", "1", "0"], ["0", "", "2"], ["0", "0", "0"]])
def test_parts_arrive_from_device_to_device_or_where_that_cannot_be_over_gloo(ranks: Ranks, gpus: list[str]) -> None:
    ranks.gpus = gpus
    found = ranks.run(layouts)
    for rank, made in enumerate(found):
        assert not isinstance(made, Exception), made
        columns, whole, flags, sums = made
        assert torch.equal(columns, GRID.tensor_split([3, 5], 1)[rank])
        assert torch.equal(whole, GRID)
        assert flags.tolist() == [True, False]
        assert torch.equal(sums, torch.full((40_000,), 6.0))
    peers = [sum(can_use_nccl(ranks.location(a), ranks.location(b)) for b in range(WORLD)) for a in range(WORLD)]
    assert [bool(calls) for calls in ranks.moved] == [n > 0 for n in peers]
    assert sum(out for calls in ranks.moved for out, _ in calls) == sum(n for calls in ranks.moved for _, n in calls)


def test_ranks_apart_are_those_with_one_nccl_and_two_gpus() -> None:
    one, other = VERSION + b"0" * 24, VERSION + b"1" * 24
    assert can_use_nccl(one, other)
    assert not can_use_nccl(one, one)
    assert not can_use_nccl(one, bytes(LOCATION_BYTES))
    assert not can_use_nccl(one, b"another " + b"1" * 24)


def summed(comm: GroupCommunicator, why: str = "a sum") -> Tensor:
    return redistribute(torch.ones(6), (6,), TERMS, WHOLE, comm, why)


def test_ranks_in_different_ops_are_named_before_a_device_waits(ranks: Ranks) -> None:
    errors = ranks.run(lambda w: summed(w, "aten.mm.default" if w.rank else "aten.relu.default"))
    assert all(isinstance(e, CallError) for e in errors), errors
    assert "rank 0 is in collective 0 of ranks [0,1,2]: aten.relu.default: float32[6]" in str(errors[0])
    assert "]: aten.mm.default: float32[6]" in str(errors[0])
    assert ranks.moved == [[], [], []]


def test_a_rank_that_fails_between_devices_does_not_leave_the_others_waiting(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mismatch_watch, "NEWS", 2.0)
    ranks.make = lambda rank: Failing() if rank == 1 else Stuck()

    def on_a_rank(comm: GroupCommunicator) -> Tensor:
        try:
            return summed(comm)
        except Exception as error:
            comm.finish(f"raised {type(error).__name__}: {error}")
            raise

    errors = ranks.run(on_a_rank)
    assert all(isinstance(e, Exception) for e in errors), errors
    assert isinstance(errors[0], CallError)
    assert "waits for rank 1, which raised" in str(errors[0])
    assert "out of memory" in str(errors[0])
