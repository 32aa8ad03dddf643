"""What ranks exchange arrives, whole and in order; ranks that do different things are told so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import actorflow as flow
from actorflow.eager.communicator import CHECK, CollectiveLabel, SingleRankCommunicator
from actorflow.eager.current import comparing_ops, current, use
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import CallError, LayoutError
from actorflow_compiler.core.placement import placement

TEST = CollectiveLabel.of("a test")
OTHER = CollectiveLabel.of("something else")


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadRanks]:
    with ThreadRanks(4) as made:
        yield made


def test_every_thread_is_another_rank(threads: ThreadRanks) -> None:
    assert threads.run(lambda: (current().rank, current().world)) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_a_process_without_peers_is_alone() -> None:
    assert isinstance(current(), SingleRankCommunicator)
    x = torch.ones(3)
    total = current().all_reduce(TEST, (0,), x)
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr()
    assert current().gather(TEST, (0,), b"me") == [b"me"]


def test_wires_of_use_are_of_this_thread_and_of_its_body_only() -> None:
    before = current()
    other = SingleRankCommunicator()
    with use(other):
        assert current() is other
    assert current() is before


def test_ragged_exchanges_arrive(threads: ThreadRanks) -> None:
    def on_a_rank() -> list[list[float]]:
        comm = current()
        me = comm.rank  # gives rank r r elements, takes its own number from each
        send = [torch.full((r,), 10.0 * me + r) if r and r != me else None for r in range(4)]
        came = comm.exchange(TEST, (0, 1, 2, 3), send, [me if r != me else 0 for r in range(4)], torch.empty(0))
        return [[] if t is None else t.tolist() for t in came]

    assert threads.run(on_a_rank)[2] == [[2.0, 2.0], [12.0, 12.0], [], [32.0, 32.0]]


def test_what_was_given_may_be_changed_at_once(threads: ThreadRanks) -> None:
    def on_a_rank() -> float:
        comm = current()
        mine = torch.full((1,), float(comm.rank))
        other = 1 - comm.rank
        if comm.rank > 1:
            return -1.0
        send = [mine if r == other else None for r in (0, 1)]
        (came,) = (
            t for t in comm.exchange(TEST, (0, 1), send, [int(r == other) for r in (0, 1)], mine) if t is not None
        )
        mine.fill_(99.0)
        return came.item()

    assert threads.run(on_a_rank) == [1.0, 0.0, -1.0, -1.0]


@pytest.mark.parametrize("size", [1, 3, 40_000])
def test_sums_are_the_same_on_every_rank(threads: ThreadRanks, size: int) -> None:
    terms = [torch.randn(size) for _ in range(4)]
    sums = threads.run(lambda: current().all_reduce(TEST, (0, 1, 2, 3), terms[current().rank]))
    torch.testing.assert_close(sums[0], terms[0] + terms[1] + terms[2] + terms[3])
    assert all(torch.equal(sums[0], other) for other in sums[1:])


def test_payloads_of_any_length_are_gathered(threads: ThreadRanks) -> None:
    texts = [b"", b"a", b"bc" * 1000, b"d"]
    assert threads.run(lambda: current().gather(TEST, (0, 1, 2, 3), texts[current().rank])) == [texts] * 4


def test_ranks_in_different_collectives_are_told_of_each_other(threads: ThreadRanks) -> None:
    def on_a_rank() -> Tensor:
        return current().all_reduce(OTHER if current().rank == 2 else TEST, (0, 1, 2, 3), torch.ones(1))

    with pytest.raises(CallError, match="different ops") as error:
        threads.run(on_a_rank)
    assert "a test" in str(error.value)
    assert "something else" in str(error.value)
    assert "rank 2" in str(error.value)


def test_ranks_that_wait_in_different_groups_are_found_out(threads: ThreadRanks) -> None:
    def on_a_rank() -> None:
        comm = current()
        for group in ((0, 1), (1, 2), (0, 2)) if comm.rank != 0 else ((0, 2), (0, 1)):
            if comm.rank in group:
                comm.all_reduce(TEST, group, torch.ones(1))

    with pytest.raises(CallError, match="wait for each other"):
        threads.run(on_a_rank)


def test_a_rank_that_ends_early_is_named(threads: ThreadRanks) -> None:
    def on_a_rank() -> None:
        if current().rank != 3:
            current().all_reduce(TEST, (0, 1, 2, 3), torch.ones(1))

    with pytest.raises(CallError, match="waits for rank 3, which has ended its script"):
        threads.run(on_a_rank)


def test_the_error_of_the_rank_that_raised_is_what_comes_out(threads: ThreadRanks) -> None:
    def on_a_rank() -> None:
        if current().rank == 1:
            raise ValueError("only here")
        current().all_reduce(TEST, (0, 1, 2, 3), torch.ones(1))

    with pytest.raises(ValueError, match="only here"):
        threads.run(on_a_rank)
    assert threads.run(lambda: current().rank) == [0, 1, 2, 3]  # and they go on


def test_ranks_go_on_after_an_error_that_they_have_caught(threads: ThreadRanks) -> None:
    def on_a_rank() -> str:
        try:
            current().all_reduce(OTHER if current().rank == 2 else TEST, (0, 1, 2, 3), torch.ones(1))
        except CallError as error:
            return str(error)
        return ""

    assert all(threads.run(on_a_rank))
    total = threads.run(lambda: current().all_reduce(TEST, (0, 1, 2, 3), torch.ones(1)).item())
    assert total == [4.0] * 4


def test_comparing_ops_shows_what_every_rank_is_about_to_do(threads: ThreadRanks) -> None:
    def on_a_rank() -> None:
        with comparing_ops():
            assert current().checks
            current().compare("aten.relu" if current().rank else "aten.gelu")

    with pytest.raises(CallError) as error:
        threads.run(on_a_rank)
    assert str(error.value).splitlines()[1:] == [
        "  rank 0: aten.gelu",
        "  rank 1: aten.relu",
        "  rank 2: aten.relu",
        "  rank 3: aten.relu",
    ]


def test_in_the_checking_mode_ops_that_move_nothing_are_compared_as_well(threads: ThreadRanks) -> None:
    where = {"placement": placement("cpu", [0, 1, 2, 3]), "sbp": flow.sbp.split(0)}

    def on_a_rank(parts: bool) -> None:
        x = flow.ones(4, **where)
        _ = x * 2, x + 1  # planned before
        with comparing_ops():
            _ = x + 1
            _ = x * 2 if parts and current().rank == 2 else x + 1

    threads.run(lambda: on_a_rank(False))
    with pytest.raises(CallError) as error:
        threads.run(lambda: on_a_rank(True))
    lines = str(error.value).splitlines()
    assert "rank 2: aten.mul.Tensor(float32" in lines[3]
    assert "rank 3: aten.add.Tensor(float32" in lines[4]


def test_the_checking_mode_can_be_set_for_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not SingleRankCommunicator().checks
    monkeypatch.setenv(CHECK, "1")
    assert SingleRankCommunicator().checks


def test_a_placement_of_ranks_that_are_not_in_the_run_is_an_error_that_lists_those_that_are() -> None:
    with pytest.raises(LayoutError, match=r"ranks 1, 7 .* not in this run, which has rank 0 only"):
        SingleRankCommunicator().check_placement(placement("cpu", [0, 1, 7]))
    with ThreadRanks(2) as two, pytest.raises(LayoutError, match=r"rank 2 .* which has ranks 0 … 1; .*--devices 3"):
        two.run(lambda: current().check_placement(placement("cpu", [0, 2])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_sums_of_small_floats_are_made_in_large_ones(threads: ThreadRanks, dtype: torch.dtype) -> None:
    def run() -> tuple[Tensor, Tensor]:
        part = torch.arange(8.0).to(dtype)
        terms = part.to_global(flow.placement.all("cpu"), flow.sbp.partial_sum)
        split = terms.to_global(sbp=flow.sbp.split(0)).to_global(sbp=flow.sbp.broadcast)
        return terms.to_global(sbp=flow.sbp.broadcast).to_local(), split.to_local()

    wanted = (4 * torch.arange(8.0)).to(dtype).float()
    for made in threads.run(run)[0]:
        assert made.dtype == dtype
        assert torch.equal(made.float(), wanted)
