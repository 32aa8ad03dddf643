"""The data plane between threads of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actorflow.transport.memory import Switchboard
from actorflow_compiler.core.errors import ClusterError, PlanError
from actorflow_compiler.plan.plan import Collective, CollectiveKind, TensorSpec
from runtime.exchanges import CASES, WORLD, expected, run_all


@pytest.fixture(scope="module")
def outputs() -> list[dict[str, list[torch.Tensor]]]:
    board = Switchboard()
    with ThreadPoolExecutor(WORLD) as pool:
        jobs = [pool.submit(run_all, rank, board.plane(rank)) for rank in range(WORLD)]
        return [job.result(200) for job in jobs]


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("name", CASES)
def test_a_transfer_gives_what_its_boxes_say(
    outputs: list[dict[str, list[torch.Tensor]]], name: str, rank: int
) -> None:
    wanted = expected(name, rank)
    assert len(outputs[rank][name]) == len(wanted)
    for found, want in zip(outputs[rank][name], wanted, strict=True):
        assert found.dtype == want.dtype
        assert found.shape == want.shape
        assert torch.equal(found, want)


def test_what_was_sent_does_not_change_with_its_source() -> None:
    board = Switchboard()
    tensor = torch.ones(2)
    board.plane(0).send(1, [tensor])
    tensor.zero_()
    assert torch.equal(board.plane(1).receive(0, [TensorSpec((2,), "float32", "")])[0], torch.ones(2))


def test_closing_wakes_a_blocked_receive() -> None:
    board = Switchboard()
    raised: list[BaseException] = []

    def receive() -> None:
        try:
            board.plane(1).receive(0, [])
        except ClusterError as error:
            raised.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    board.plane(0).close()
    thread.join(100)
    assert not thread.is_alive()
    assert "rank 1 waited for data of rank 0" in str(raised[0])


def test_operands_must_have_the_dtypes_of_their_targets() -> None:
    with pytest.raises(PlanError, match=r"all_reduce 7: operand 0 is torch.int64; its target is float32"):
        Switchboard().plane(0).collective(
            Collective(CollectiveKind.ALL_REDUCE, 7, (0,)),
            [torch.zeros(2, dtype=torch.int64)],
            [TensorSpec((2,), "float32", "")],
        )
