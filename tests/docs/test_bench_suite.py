"""The suite of benchmarks: wrong losses are found, what is kept is complete, and the page is what was kept."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import warm

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.extend(str(BENCHMARKS / name) for name in ("peers", "pipelines"))  # behind all else

import turns  # noqa: E402
from contest import contest, task_of  # noqa: E402
from results import RESULTS, figures, write  # noqa: E402
from turns import Lost, Turn, play  # noqa: E402
from workloads import BY_NAME, WORKLOADS, Workload  # noqa: E402

sys.path.append(str(BENCHMARKS))
import report  # noqa: E402

sys.path.remove(str(BENCHMARKS))  # its eager.py would stand for the folder of tests

TINY: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "context": 8, "batch": 4}
DATA = replace(BY_NAME["data-2"], steps=2, ours=("data",), theirs=("DDP",))


def raw(workload: Workload, **more: Any) -> dict[str, Any]:
    """A record with figures that are made up: two contenders of theirs, of which the second is faster."""

    def one(seconds: list[float], cpu: list[float], peak: int) -> dict[str, Any]:
        memory = [{"rank": rank, "before": 100, "first": peak - rank, "turns": peak - 100} for rank in (0, 1)]
        return {"seconds": seconds, "cpu": cpu, "losses": [1.0] * len(seconds), "memory": memory}

    contenders = {
        "ours: data": one([1.0, 1.0, 3.0], [2.0, 2.0, 2.0], 300),
        "theirs: slow": one([4.0, 4.0, 4.0], [4.0, 4.0, 4.0], 900),
        "theirs: DDP": one([2.0, 1.0, 2.0], [4.0, 2.0, 1.0], 500),
    }
    return {"workload": workload.name, "left out": {}, "contenders": contenders} | more


@pytest.mark.slow
def test_a_tiny_row_is_measured_and_all_is_kept(tmp_path: Path) -> None:
    task = task_of(DATA, **TINY)
    record = contest(DATA, lambda: range(2), {"ours": task, "theirs": task}, python=warm.python())
    assert json.loads(write(record, tmp_path).read_text("utf-8")) == record
    assert set(record["contenders"]) == {"ours: data", "theirs: DDP"}
    assert record["setting"]["width"] == 32
    assert record["machine"].keys() == {"cores", "processor", "load before", "load after"}
    assert {"torch", "python", "actorflow", "ray", "compiler", "commit"} <= record["versions"].keys()
    for found in record["contenders"].values():
        assert len(found["seconds"]) == len(found["cpu"]) == len(found["losses"]) == 2
        assert [notes["rank"] for notes in found["memory"]] == [0, 1]
        assert all(0 < notes["before"] < notes["first"] for notes in found["memory"])
        assert all(notes["before"] < notes["turns"] for notes in found["memory"])
    assert figures(DATA, record).time > 0


def test_contenders_whose_losses_differ_end_the_row() -> None:
    workload = replace(BY_NAME["device-5m"], steps=2, ours=("data",), theirs=("eager",))
    task = task_of(workload, **TINY)
    with pytest.raises(Lost, match=r"losses differ: ours: data \d.*, theirs: eager \d"):
        contest(workload, lambda: range(1), {"ours": task, "theirs": replace(task, lr=0.1)}, python=warm.python())


@pytest.mark.parametrize("loss", [1.001, math.nan])
def test_a_loss_that_is_not_the_others_ends_the_row(loss: float) -> None:
    class Alone:
        def __init__(self, loss: float) -> None:
            self.loss = loss

        def turn(self, name: str, steps: int) -> Turn:
            return Turn(1.0, 1.0, self.loss)

    assert play({"one": Alone(1.0), "other": Alone(1.00001)}, 1, range(2)).keys() == {"one", "other"}
    with pytest.raises(Lost, match="losses differ"):
        play({"one": Alone(1.0), "other": Alone(loss)}, 1, range(2))


def test_a_rank_that_fails_is_told_of_while_another_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "GRACE", 0.01)
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    process: Any = None
    group = turns.Group("theirs", process, [mine for mine, _ in pairs], Path("log"))
    pairs[1][1].send(("failed", "ValueError: no such schedule", (0.0, 1.0)))
    with pytest.raises(Lost, match=r"theirs, ranks \[0\]: no answer(.|\n)*rank 1 failed: ValueError: no such schedule"):
        group.make("DDP", 1)
    pairs[0][1].close()
    with pytest.raises(Lost, match="rank 0: ended"):
        group.make("DDP", 1)


def test_each_contender_is_first_as_often() -> None:
    class Noting:
        def turn(self, name: str, steps: int) -> Turn:
            order.append(name)
            return Turn(1.0, 1.0, 1.0)

    for names in ("ab", "abc"):
        order: list[str] = []
        play({name: Noting() for name in names}, 1, range(2 * len(names)))
        firsts = order[:: len(names)]
        assert {firsts.count(name) for name in names} == {2}


def test_ratios_are_medians_against_the_fastest_of_theirs() -> None:
    found = figures(DATA, raw(DATA))
    assert (found.ours, found.theirs, found.rounds) == ("data", "DDP", 3)
    assert (found.time, found.low, found.high, found.cpu) == (1.0, 0.5, 1.5, 1.0)
    assert (found.memory, found.memory_of_steps) == (0.5, 100 / 300)


@pytest.mark.parametrize(
    ("target", "memory", "kept"), [(1.0, None, True), (0.99, None, False), (1.0, 0.5, True), (1.0, 0.49, False)]
)
def test_targets_of_time_and_memory_are_kept_or_not(target: float, memory: float | None, kept: bool) -> None:
    workload = replace(DATA, target=target, memory_target=memory)
    assert figures(workload, raw(workload)).kept is kept


def test_an_idle_run_is_a_share_of_a_core() -> None:
    idle = BY_NAME["idle"]
    record = {"contenders": {"ours: data": {"seconds": [10.0, 20.0, 10.0], "cpu": [0.05, 0.4, 0.1], "memory": []}}}
    found = figures(idle, record)
    assert (found.time, found.low, found.high, found.kept) == (0.01, 0.005, 0.02, True)


def test_the_page_is_what_the_results_give() -> None:
    page, picture = report.made(report.PAGE.read_text("utf-8"), RESULTS)
    assert page == report.PAGE.read_text("utf-8"), "run: make bench-report"
    assert picture == report.PICTURE.read_text("utf-8"), "run: make bench-report"
    kept = {path.stem for path in RESULTS.glob("*.json")}
    assert kept <= set(BY_NAME)
    assert all(f"| {BY_NAME[name].title} |" in page for name in kept)


def test_another_result_gives_another_page(tmp_path: Path) -> None:
    page = report.PAGE.read_text("utf-8")
    for path in RESULTS.glob("*.json"):
        record = json.loads(path.read_text("utf-8"))
        for name, found in record["contenders"].items():
            found["cpu"] = [cpu * (2 if name.startswith("ours") else 1) for cpu in found["cpu"]]
            found["seconds"] = [s * (2 if name.startswith("ours") else 1) for s in found["seconds"]]
        write(record, tmp_path)
    changed, picture = report.made(page, tmp_path)
    assert changed != page
    assert picture != report.PICTURE.read_text("utf-8")


def test_names_of_workloads_are_unique() -> None:
    assert len(BY_NAME) == len(WORKLOADS)
