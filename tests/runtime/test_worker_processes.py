"""Workers in processes of their own, with tensors over Gloo."""

from __future__ import annotations

import multiprocessing
import re
from typing import Any

import pytest
import torch

import warm
from cluster.ranks import free_port
from runtime.trainings import SECONDS, batches, serve, torch_training, weights


def train(calls: int, dies: int | None = None, over: str = "gloo", stalls: int | None = None) -> list[Any]:
    """What each of two ranks says in the end; None for one that died."""
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*warm.OURS])  # imported once, for all
    links = context.Pipe()
    how = calls, dies, over, stalls
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=serve, args=(rank, port, links[rank], pipes[rank][1], *how), daemon=True)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        for theirs in (*links, *(pipe[1] for pipe in pipes)):
            theirs.close()
        said: list[Any] = []
        for rank, (mine, _) in enumerate(pipes):
            assert mine.poll(SECONDS), f"rank {rank} said nothing in {SECONDS} s"
            said.append(None if rank == dies else mine.recv())
        for rank, (mine, _) in enumerate(pipes):
            if rank != dies:
                mine.send("done")
                ranks[rank].join(SECONDS)
                assert ranks[rank].exitcode == 0
        return said
    finally:
        for process in ranks:
            process.kill()


def test_a_pipeline_over_processes_trains_like_torch() -> None:
    (_, got0), (losses, got1) = train(calls=6)
    w0, w1 = weights()
    wanted = [torch_training(x, t, w0, w1, 0.01) for x, t in batches(6)]
    assert losses == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(torch.tensor(got0), w0.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(got1), w1.detach(), rtol=1e-5, atol=1e-6)


def test_a_rank_whose_peer_dies_gets_an_error_and_does_not_hang() -> None:
    said, _ = train(calls=2, dies=1)
    assert "ActorError: rank 0" in said or "ClusterError: rank 1 is gone" in said


def test_calls_in_the_order_of_the_plan_train_like_torch_and_one_that_takes_too_long_says_what_waits() -> None:
    said, (losses, got1) = train(calls=4, over="nccl", stalls=1)
    w0, w1 = weights()
    assert losses == pytest.approx([torch_training(x, t, w0, w1, 0.01) for x, t in batches(3)], rel=1e-5)
    torch.testing.assert_close(torch.tensor(got1), w1.detach(), rtol=1e-5, atol=1e-6)
    late = r"ClusterError: rank 0: (send 0>1|receive 1>0) over NCCL has not ended in \d+ s \(ACTORFLOW_NCCL_TIMEOUT\); "
    assert re.match(late, said), said
    assert "next NCCL call, of " in said
    assert "oldest NCCL call of 1 under way" in said
    assert "thread nccl: " in said
