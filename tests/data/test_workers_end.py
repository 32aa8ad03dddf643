"""Workers end with the loader that they read for."""

from __future__ import annotations

import multiprocessing

import torch

import actorflow as flow

LIMIT = 60.0


def test_the_workers_of_a_loader_that_is_let_go_of_end() -> None:
    before = {*multiprocessing.active_children()}
    rows = [torch.tensor([float(i)]) for i in range(12)]
    for _ in range(3):
        loader = flow.data.loader(rows, 4, workers=2)
        assert [float(x.sum()) for x in loader] == [6.0, 22.0, 38.0]
    workers = {*multiprocessing.active_children()} - before
    assert len(workers) >= 2
    del loader
    for worker in workers:
        worker.join(LIMIT)
        assert not worker.is_alive()
