"""The data planes between processes: three of them, started once, run every case on each plane."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
import torch

import warm
from cluster.ranks import free_port
from runtime.exchanges import CASES, PLANES, SECONDS, WORLD, expected, serve


@pytest.fixture(scope="module")
def outputs(
    request: pytest.FixtureRequest,
) -> Iterator[list[dict[str, list[tuple[bytes, tuple[str, tuple[int, ...]]]]]]]:
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*warm.OURS])  # imported once, for all
    pipes = [context.Pipe() for _ in range(WORLD)]
    ranks = [context.Process(target=serve, args=(rank, port, pipes[rank][1]), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        found = []
        for rank, (mine, _) in enumerate(pipes):
            assert mine.poll(SECONDS), f"rank {rank} gave nothing in {SECONDS} s"
            data, kinds = mine.recv(), mine.recv()
            found.append({name: list(zip(data[name], kinds[name], strict=True)) for name in data})
        yield found
        for mine, _ in pipes:
            mine.send("done")
        for process in ranks:
            process.join(SECONDS)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("plane", PLANES)
def test_a_transfer_gives_what_its_boxes_say(
    outputs: list[dict[str, list[tuple[bytes, tuple[str, tuple[int, ...]]]]]], plane: str, name: str, rank: int
) -> None:
    wanted = [
        (t.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), (str(t.dtype), tuple(t.shape)))
        for t in expected(name, rank)
    ]
    assert outputs[rank][f"{plane} {name}"] == wanted
