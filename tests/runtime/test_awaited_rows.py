"""A source that waits for rows of a data source: the rank says for which, and its recorder how long."""

from __future__ import annotations

import pytest
import torch

from actorflow.runtime.recorder import Recorder
from actorflow.testing.local_cluster import LocalCluster
from runtime.coming_rows import LOADER, ComingRows, fed

LIMIT = 60.0


@pytest.mark.parametrize("trace", [None, 0, 8])
def test_a_rank_says_which_rows_its_source_waits_for_until_they_are_here(trace: int | None) -> None:
    with LocalCluster(fed(), trace=trace) as cluster:
        (worker,) = cluster.workers
        coming = ComingRows(32)
        call = worker.issue(0, coming.argument())
        assert coming.asked.wait(LIMIT)
        assert worker.awaited == f"rows 32-33 of epoch 0 of {LOADER}"
        assert f"\nx waits for rows 32-33 of epoch 0 of {LOADER}" in worker.explain()
        coming.given.set_result(torch.ones(2, 1))
        assert call.result(0, LIMIT).tolist() == [[2.0], [2.0]]
        assert worker.awaited == ""
        assert LOADER not in worker.explain()


def test_a_recorder_has_each_wait_for_rows_and_none_where_they_are_here_in_time() -> None:
    with LocalCluster(fed(), trace=3) as cluster:
        (worker,) = cluster.workers
        for firing, late in enumerate([True, False, True, True]):
            coming = ComingRows(4 * firing)
            if not late:
                coming.given.set_result(torch.zeros(2, 1))
            call = worker.issue(0, coming.argument())
            if late:
                assert coming.asked.wait(LIMIT)
                coming.given.set_result(torch.zeros(2, 1))
            call.wait(LIMIT)
        kept = worker.record
        assert kept is not None
    assert [(w.plan, w.firing, w.rows, w.source) for w in kept.waits] == [
        (0, 0, "rows 0-1 of epoch 0", LOADER),
        (0, 2, "rows 8-9 of epoch 0", LOADER),  # and the fourth call is not recorded
    ]
    began = {b.iteration: b.at for b in kept.begun}
    fired = {f.firing: f.start for f in kept.fired if f.actor == kept.waits[0].actor}
    for wait in kept.waits:
        assert began[wait.firing] <= wait.start < wait.end <= fired[wait.firing]


def test_what_the_script_reads_is_recorded_while_a_plan_is() -> None:
    record, plan = Recorder(1), fed()
    record.script_read(0, ComingRows(0))
    record.install(0, plan)
    record.script_read(1, ComingRows(2))
    record.began(0, 0, 0)
    record.script_read(2, ComingRows(4))
    record.began(0, 1, 0)
    record.script_read(3, ComingRows(6))
    assert [(r.start, r.rows) for r in record.script_reads] == [
        (1, "rows 2-3 of epoch 0"),
        (2, "rows 4-5 of epoch 0"),
    ]
