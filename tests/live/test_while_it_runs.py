"""While a run goes on: how far it is, in a bar or in lines; what each rank does; and how far compiling is."""

from __future__ import annotations

import io
import json
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console

from actorflow.live import observer, view
from actorflow.live.meter import MeterReading, StepMeter
from actorflow.live.pulse import RankPulse, pulse_row, take_pulse
from actorflow.live.view import LiveView
from actorflow.rendezvous.settings import Settings
from actorflow.session.plan_summary import summary_lines
from actorflow.support import progress
from actorflow.support.progress import Progress, show_progress
from actorflow.testing.local_cluster import LocalCluster
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.sbp import B, P
from actorflow_compiler.plan.plan import Result
from actorflow_compiler.plan.summary import summarise
from cluster.ranks import LIMIT
from runtime.coming_rows import LOADER, ComingRows, fed
from runtime.programs import on
from runtime.trainings import LIBRARY, batches, training, weights


class Handle:
    done = False


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def metered(done: int, of: int, total: int | None = None) -> tuple[StepMeter, Clock]:
    """A meter of some calls of 32 samples each that took half a second each."""
    clock = Clock()
    meter = StepMeter(clock)
    meter.total = total
    calls = [Handle() for _ in range(of)]
    for i, call in enumerate(calls):
        meter.step(call, 32, lambda i=i: 1.0 / (i + 1))  # type: ignore[misc]
    for call in calls[:done]:
        clock.now += 0.5
        call.done = True
        meter.look()
    return meter, clock


def test_a_meter_counts_what_is_done_and_how_fast() -> None:
    meter, _ = metered(done=4, of=6, total=10)
    found = meter.look()
    assert found == MeterReading(4, 10, 2.0, 64.0, 0.25, 2.0)
    assert found.left == 3.0
    assert str(found) == "step 4 of 10, 2 steps/s, 64 samples/s, loss 0.25, 3 s left"
    assert str(replace(found, total=None)) == "step 4, 2 steps/s, 64 samples/s, loss 0.25, 2 s so far"


def test_the_speed_is_that_of_the_last_seconds() -> None:
    meter, clock = metered(done=40, of=40)
    clock.now += 6.0  # nothing was done in these
    found = meter.look()
    assert found is not None
    assert found.steps_per_s == pytest.approx(8 / 10, abs=0.11)


def test_a_meter_keeps_no_call_that_is_done() -> None:
    meter, _ = metered(done=5, of=5)
    assert not meter._open
    assert StepMeter(Clock()).look() is None


def test_off_a_terminal_there_are_plain_lines_further_and_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "TICK", 0.01)
    monkeypatch.setattr(view, "LINES", (0.02, 0.04, 30.0))
    out = io.StringIO()
    meter, _ = metered(done=2, of=2, total=4)
    shown_ = LiveView(meter, 1, None, Console(file=out, soft_wrap=True))
    shown_.start()
    end = time.monotonic() + LIMIT
    while out.getvalue().count("\n") < 2 and time.monotonic() < end:
        time.sleep(0.01)
    shown_.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3  # two, and the last state
    assert all(line.startswith("actorflow: step 2 of 4, ") and "\x1b" not in line for line in lines)


def lines(shown_: LiveView, width: int) -> list[str]:
    """What is shown now in a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, _environ={})
    with console.capture() as captured:
        console.print(shown_._frame())
    return captured.get().splitlines()


def test_on_a_terminal_there_is_a_bar_and_a_row_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "POLL", 0.01)
    monkeypatch.setattr(view, "TICK", LIMIT)  # seconds: no frame but the first and the last
    out = io.StringIO()
    meter, _ = metered(done=2, of=4, total=4)
    asked = threading.Event()

    def pull(rank: int) -> bytes:
        if rank == 1:
            asked.set()
            raise ClusterError("nothing is served here yet")
        waits = ("all_reduce0B3.2@0 is in all_reduce 1 with ranks [0, 1]",)
        return json.dumps(asdict(RankPulse(0, 1, "fires F0, firing 3", True, {"compute": 1}, 3, 8, waits))).encode()

    shown_ = LiveView(meter, 2, pull, Console(file=out, force_terminal=True, width=140, _environ={"TERM": "xterm"}))
    shown_.start()
    progress.listen(shown_._noted)
    assert asked.wait(LIMIT)
    asked.clear()
    assert asked.wait(LIMIT)  # so that the first round is in
    wide, narrow = lines(shown_, 140), lines(shown_, 72)
    before = len(out.getvalue())
    shown_.close()
    for shown_lines in (wide, narrow):
        head, first, second, bar = shown_lines  # nothing is broken into two lines
        assert head.split() == ["rank", "state", "compute", "comm", "send", "registers", "waits", "for"]
        assert " 3 of 8 " in first
        assert second.split()[:3] == ["1", "says", "nothing"]
        assert "━" in bar
        assert "step 2 of 4" in bar
    assert "fires F0, firing 3" in wide[1]
    assert "with ranks [0, 1]" in wide[1]
    assert narrow[1].rstrip().endswith("…")
    last = out.getvalue()[before:]  # what ranks did is over
    assert "step 2 of 4" in last
    assert "says nothing" not in last
    assert progress._listener is None


def test_a_row_says_how_busy_queues_were_since_the_last_look() -> None:
    before = RankPulse(2, 1_000, "", True, {"compute": 100, "send:0": 0, "send:1": 0}, 0, 9, ())
    busy = {"compute": 850, "send:0": 100, "send:1": 200}
    now = RankPulse(2, 2_000, "", True, busy, 4, 9, ("F2 waits for a slot", "x"))
    assert pulse_row(before, now) == ("2", "waits", "75%", "0%", "20%", "4 of 9", "F2 waits for a slot (+1)")
    assert pulse_row(None, replace(now, under_way=False, waits=()))[1:4] == ("idle", "–", "–")


def test_a_pulse_says_which_rows_a_source_waits_for() -> None:
    with LocalCluster(fed(), trace=0) as cluster:
        (worker,) = cluster.workers
        coming = ComingRows(32)
        call = worker.issue(0, coming.argument())
        assert coming.asked.wait(LIMIT)
        row = pulse_row(None, take_pulse(0, worker))
        assert (row[1], row[-1]) == ("waits", f"rows 32-33 of epoch 0 of {LOADER}")
        coming.given.set_result(torch.zeros(2, 1))
        call.wait(LIMIT)
        assert pulse_row(None, take_pulse(0, worker))[-1] == ""


def test_a_pulse_of_a_worker_at_work() -> None:
    values = dict(zip(("w0", "w1"), weights(), strict=True))
    with LocalCluster(training(), variables=values, library=LIBRARY, trace=0) as cluster:
        alone = cluster.workers[0]  # rank 1 is not called, so that this one gets no further than its slots allow
        alone.issue(0, {"x": batches(1)[0][0]}, {"step": -0.01})
        end = time.monotonic() + LIMIT
        while "read on rank 1" not in str((found := take_pulse(0, alone)).waits) and time.monotonic() < end:
            time.sleep(0.01)
    assert found.under_way
    assert found.busy["compute"] > 0
    assert 0 < found.taken <= found.slots
    assert any("of register" in wait or "waits for register" in wait for wait in found.waits)
    assert RankPulse.from_json(json.loads(json.dumps(asdict(found)))) == found
    assert alone.record is not None
    assert alone.record.fired == []  # counting is all that it does


@pytest.mark.parametrize(
    ("live", "launcher", "terminal", "modules", "expected"),
    [
        ("", "socket", True, (), True),
        ("", "socket", True, ("tqdm",), False),
        ("", "socket", False, (), False),
        ("", "", True, (), False),
        ("bar", "", False, ("tqdm",), True),
        ("live", "socket", False, (), True),
        ("none", "socket", True, (), False),
    ],
)
def test_who_gets_a_bar(
    live: str, launcher: str, terminal: bool, modules: tuple[str, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    for name in observer._OWN_BARS:
        monkeypatch.delitem(observer.sys.modules, name, raising=False)
    for name in modules:
        monkeypatch.setitem(observer.sys.modules, name, observer)
    assert observer._wanted(Settings(live=live, launcher=launcher)) == expected


def test_the_loss_is_the_first_number_that_the_master_holds_whole() -> None:
    plan = training()
    results = (
        Result(0, (4,), "float32", on(0), (B,)),
        Result(1, (), "int64", on(0), (B,)),
        Result(2, (), "float32", on(1), (B,)),
        Result(3, (), "float32", on(0), (P,)),
        Result(4, (), "float32", on(0), (B,)),
    )
    assert observer._loss(replace(plan, results=results)) == 4
    assert observer._loss(replace(plan, results=results[:4])) is None


def test_a_loop_with_a_bar_gives_the_items_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer.clusters, "process_settings", lambda: Settings(rank=1, world=2))
    assert list(observer.progress(range(3))) == [0, 1, 2]
    assert observer._view is None


# -- compiling ------------------------------------------------------------------------------------


def test_long_work_says_in_which_part_it_is_and_of_how_many(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    parts = ("infer", "choosing layouts"), ("cut", "cutting it")
    with show_progress("compiling step", "compiled step", parts) as work:
        assert work.shown.wait(LIMIT)
        work("infer")
        work("measure 3 of 4 bodies")
        work("cut")
        work.sum_up(lambda: ["one", "two"])
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "actorflow: compiling step …"
    assert said[1:4] == [
        "actorflow: compiling step: choosing layouts (1 of 2) …",
        "actorflow: compiling step: measure 3 of 4 bodies …",
        "actorflow: compiling step: cutting it (2 of 2) …",
    ]
    assert said[4].startswith("actorflow: compiled step in ")
    assert said[5:] == ["  one", "  two"]


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 1000.0)
    with show_progress("compiling step", "compiled step") as work:
        work.sum_up(lambda: pytest.fail("nobody asked"))
    assert capsys.readouterr().err == ""


def test_who_has_the_terminal_is_told_instead(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []
    progress.listen(heard.append)
    try:
        work = Progress("compiling step", "compiled step", (("infer", "choosing layouts"),))
        work.show()
        work("infer")
        work.stop()
    finally:
        progress.listen(None)
    assert heard == ["actorflow: compiling step", "actorflow: compiling step: choosing layouts (1 of 1)", ""]
    assert capsys.readouterr().err == ""


def test_five_lines_sum_up_a_plan() -> None:
    lines = summary_lines(summarise(training()), CPU_CORE)
    assert [line.split()[0] for line in lines] == ["parallelism", "communication", "bubble", "memory", "step"]
    assert lines[0] == "parallelism    2 devices in 4 micro-batches"  # made by hand: its actors name no stage
    assert lines[1].endswith("send 192 B")  # 4 pieces of 2 × 3 numbers, there and back
    assert "% of the computing time" in lines[2]
    assert "registers" in lines[3]
    assert lines[4].endswith("expected on CPU cores of one host")
