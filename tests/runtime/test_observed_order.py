"""The order in which a run's actors fire is the frozen one, and prints like it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow.testing.local_cluster import LocalCluster
from actorflow.tracing.folder import write_order
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler import schedule
from actorflow_scheduler.notation import frozen, observed, text
from runtime.trainings import LIBRARY, batches, training, weights


def run(plan: Plan, calls: int, trace: int | None) -> list[list[tuple[Plan, tuple[int, ...]]]]:
    """What each worker saw, of calls that nobody waits between."""
    values = dict(zip(("w0", "w1"), weights(), strict=True))
    with LocalCluster(plan, variables=values, library=LIBRARY, trace=trace) as cluster:
        for x, t in batches(calls):
            cluster.issue({"x": x, "t": t}, {"step": -0.01})
        for worker in cluster.workers:
            worker.wait_all(200)
        return [worker.observed() for worker in cluster.workers]


@pytest.mark.parametrize("name", ["by hand", "scheduled"])
def test_the_observed_order_is_the_frozen_one(name: str) -> None:
    plan = training()
    if name == "scheduled":
        plan = schedule(replace(plan, orders=()))
    seen = run(plan, calls=5, trace=3)
    for rank, ((part, actors),) in enumerate(seen):
        assert actors == frozen(plan)[rank] * 3
        assert observed(part, rank, actors) == [text(plan).splitlines()[rank]] * 3


def test_nothing_is_kept_where_nobody_asked() -> None:
    assert run(training(), calls=1, trace=None) == [[], []]


def test_a_rank_s_file_has_a_line_for_each_iteration(tmp_path: object) -> None:
    plan = training()
    fired = frozen(plan)[1] * 2
    write_order(f"{tmp_path}/orders", 1, [(plan, fired)])
    with open(f"{tmp_path}/orders/rank1.txt", encoding="utf-8") as file:
        assert file.read().splitlines() == [f"plan {plan.name}", *[text(plan).splitlines()[1]] * 2]
