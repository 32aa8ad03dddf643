"""Orders as text and as torch's CSV, which torch's own schedules load."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.plan.plan import Plan
from actorflow_scheduler import schedule
from actorflow_scheduler.notation import frozen, observed, text, to_csv
from plans import Sketch, pipeline

FAST = Hardware(flops_per_s=1e3, bytes_per_s=1e12, latency_s=1e-6, fire_overhead_s=0.0)


def loaded_by_torch(content: str, stages: int, pieces: int, path: Path) -> Any:
    """What torch's runtime of pipeline schedules makes of a CSV: it validates it and adds sends and receives."""
    path.write_text(content)

    class Schedule(schedules._PipelineScheduleRuntime):
        def __init__(self) -> None:  # the real one wants stages with process groups, which loading does not use
            self._stages, self._num_stages, self._n_microbatches = [], stages, pieces
            self.pp_group_size = len(content.splitlines())
            self.pipeline_order: dict[int, Any] = {}
            self._defer_pp_recv = False

    made = Schedule()
    made._load_csv(str(path), format="compute_only")
    return made


def orders_of(plan: Plan) -> dict[int, list[str]]:
    return {rank: line.partition(": ")[2].split() for rank, line in enumerate(text(plan).splitlines())}


@pytest.mark.parametrize("weights", [False, True])
def test_torch_loads_the_csv_of_a_plan(weights: bool, tmp_path: Path) -> None:
    plan = schedule(pipeline(4, 8, weights=weights), FAST)
    made = loaded_by_torch(to_csv(plan), 4, 8, tmp_path / "schedule.csv")
    assert made.stage_index_to_group_rank == {0: 0, 1: 1, 2: 2, 3: 3}
    for rank, words in orders_of(plan).items():
        assert [str(action) for action in made.pipeline_order[rank]] == [w for w in words if "O" not in w]
    sent = [str(a) for a in made.pipeline_order_with_comms[0] if "SEND_F" in str(a)]
    assert sent == [f"0SEND_F{piece}" for piece in range(8)]


def test_a_whole_backward_is_b_and_halves_are_i_and_w() -> None:
    whole = to_csv(schedule(pipeline(2, 2), FAST))
    assert whole == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    halves = to_csv(schedule(pipeline(2, 2, weights=True), FAST))
    assert sorted(halves.splitlines()[1].split(",")) == ["1F0", "1F1", "1I0", "1I1", "1W0", "1W1"]


def test_replicas_have_one_row() -> None:
    assert to_csv(schedule(pipeline(2, 4, replicas=2), FAST)) == to_csv(schedule(pipeline(2, 4), FAST))


def test_a_stage_of_several_actors_has_one_cell_for_each_micro_batch(tmp_path: Path) -> None:
    s = Sketch(2)
    once = s.actor("shift", rate=1)
    first, second = s.actor("F", rate=2), s.actor("F'", rate=2)
    b, w = s.actor("B", "backward", rate=2), s.actor("W", "weight", rate=2)
    for before, after in ((first, second), (second, b), (b, w)):
        s.join(before, after, slots=2)
    order = (once, first, first, second, b, second, w, b, w)
    plan = s.plan({(0, "compute"): order})
    assert text(plan) == "rank 0: 0F0 0F0 0F1 0F0 0I0 0F1 0W0 0I1 0W1"
    assert to_csv(plan) == "0F0,0I0,0F1,0W0,0I1,0W1\n"
    loaded_by_torch(to_csv(plan), 1, 2, tmp_path / "schedule.csv")


def test_weight_gradients_of_a_part_wait_for_all_input_gradients_of_their_micro_batch() -> None:
    s = Sketch(1)
    f, b, w, later = s.actor("F"), s.actor("B", "backward"), s.actor("W", "weight"), s.actor("B'", "backward")
    for before, after in ((f, b), (b, w), (b, later)):
        s.join(before, after)
    assert to_csv(s.plan({(0, "compute"): (f, b, w, later)})) == "0F0,0I0,0W0\n"


def test_ranks_that_compute_nothing_have_no_row() -> None:
    s = Sketch(1)
    f, o = s.actor("F"), s.actor("O", "optimizer", rank=1)
    s.send(f, o, to=1)
    rows = list(csv.reader(io.StringIO(to_csv(s.plan({(0, "compute"): (f,), (1, "compute"): (o,)})))))
    assert rows == [["0F0"]]


def test_what_was_observed_is_told_iteration_by_iteration() -> None:
    plan = schedule(pipeline(2, 3), FAST)
    order = frozen(plan)[1]
    lines = observed(plan, 1, (*order, *order, *order[:2]))
    assert lines == [*([text(plan).splitlines()[1]] * 2), "rank 1: 1F0 1B0"]
