"""``actorflow plan``: the forecast, hardware files, measured costs, CSV; and ``actorflow run --trace``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import warm
from actorflow.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "h100x8.toml"
SCRIPT = """
import torch
import torch.nn.functional as F
import actorflow as flow

torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
half = flow.env.world_size() // 2
if half:
    ranks = range(2 * half)
    flow.place(model, {"[01]": flow.placement("cpu", ranks[:half]), "[234]": flow.placement("cpu", ranks[half:])})

@flow.global_function(micro_batches=4)
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for _ in range(3):
    print(float(step(torch.randn(16, 64), torch.zeros(16, dtype=torch.int64))))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "train.py"
    path.write_text(SCRIPT)
    return path


def actorflow(*arguments: object, cache: str | None = None, patience: float = 250) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "actorflow", *map(str, arguments)]
    environment = os.environ if cache is None else {**os.environ, "ACTORFLOW_CACHE": cache}
    return subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False, env=environment)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_hardware_file_says_what_its_devices_are(tmp_path: Path, kind: str) -> None:
    script, file = tmp_path / "train.py", tmp_path / "cluster.toml"
    script.write_text(
        "import torch\nimport actorflow as flow\nmodel = torch.nn.Linear(256, 256)\n"
        "sgd = torch.optim.SGD(model.parameters(), 0.1)\n@flow.global_function\ndef step(x):\n"
        "    loss = model(x).sum()\n    loss.backward()\n    sgd.step()\n    return loss\nstep(torch.ones(64, 256))\n"
    )
    file.write_text(EXAMPLE.read_text().replace("[device]", '[device]\ntype = "cpu"' if kind == "cpu" else "[device]"))
    command = ("plan", script, "--devices", 16, "--forecast", "--hardware", file)
    done, named = actorflow(*command), actorflow(*command, "--device-type", kind)
    assert done.returncode == 0, done.stderr
    assert done.stdout == named.stdout
    assert done.stdout != actorflow(*command, "--device-type", "cpu" if kind == "cuda" else "cuda").stdout


def test_a_forecast_for_other_hardware_and_many_replicas(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "schedule.csv"
    done = actorflow("plan", script, "--devices", 4, "--forecast", "--hardware", EXAMPLE, "--replicas", 8, "--out", out)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "forecast on 8 × H100 SXM a node, 400 Gb/s a GPU"
    assert lines[1].endswith(" µs") or " ms" in lines[1]
    assert "all ranks fit 74.5 GiB" in done.stdout
    assert [line.partition(":")[0] for line in lines if ": 0F0" in line or ": 1F0" in line] == [
        "ranks 0-15",
        "ranks 16-31",
    ]
    for stage, row in enumerate(out.read_text().splitlines()):
        letters = "FIW" if "I" in row else "FB"
        assert sorted(row.split(",")) == sorted(f"{stage}{letter}{i}" for letter in letters for i in range(4))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_schedule_is_found_for_the_planes_on_which_transfers_go(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace('"cpu"', repr(kind)))
    done = actorflow("plan", script, "--devices", 4)
    assert done.returncode == 0, done.stderr
    note, period = re.search(r"tried: period (.*), bubble", done.stdout), re.search(r"  period +(.*) for", done.stdout)
    assert note is not None
    assert period is not None
    assert note[1] == period[1]


def test_a_hardware_file_with_a_mistake_is_answered_before_anything_is_compiled(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[device]\nflop = 1\n")
    done = actorflow("plan", script, "--devices", 2, "--hardware", path)
    assert done.returncode == 1
    assert "key 'device.flop' was found" in done.stderr
    assert "did you mean 'flops'?" in done.stderr
    assert "compiling" not in done.stderr


def test_measuring_and_a_hardware_file_contradict_each_other(script: Path) -> None:
    done = actorflow("plan", script, "--devices", 2, "--hardware", EXAMPLE, "--measure")
    assert done.returncode == 2
    assert "--measure measures this machine" in done.stderr


def test_a_plan_by_measured_costs_ends_with_its_forecast(script: Path, tmp_path: Path) -> None:
    done = actorflow("plan", script, "--devices", 1, "--measure", cache=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan step: 1 rank, 4 micro-batches")
    assert "forecast on this machine, as measured\n  period " in done.stdout
    assert list(tmp_path.rglob("costs/**/cpu-*.json"))


@pytest.mark.parametrize("options", [(), ("--forecast",), ("--out", "plan.txt")], ids=["plan", "forecast", "file"])
def test_costs_that_are_measured_count_where_nothing_is_kept(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = actorflow("plan", script, "--devices", 1, "--measure", *options, cache="0")
    assert done.returncode == 0, done.stderr
    assert "forecast on this machine, as measured\n" in (
        Path("plan.txt").read_text() if "--out" in options else done.stdout
    )


WAITING = """
import multiprocessing, threading, time

child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
child.start()
print("child", child.pid)
threading.Thread(target=threading.Event().wait).start()
"""


@pytest.mark.parametrize("fails", [False, True], ids=["a plan", "an error"])
def test_looking_at_a_plan_ends_beside_threads_and_processes_of_the_script_that_wait(
    tmp_path: Path, fails: bool
) -> None:
    script, out = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(WAITING + ("raise ValueError('on the way')" if fails else SCRIPT))
    done = actorflow("plan", script, "--devices", 2, "--out", out)
    assert done.returncode == fails, done.stderr
    assert out.exists() is not fails
    assert ("ValueError: on the way" in done.stderr) is fails
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("child "))
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(line.split()[1])).wait(250)


ENDS = {  # what goes wrong once threads of the script wait → (more of the script, options, exit status, what is said)
    "nothing to explain": (SCRIPT, ("--explain", "nothing"), 1, "'nothing' matches no op, module or variable"),
    "no such job": (SCRIPT, ("--job", "other"), 1, "a call of a job 'other'; it called step (train), so"),
    "no room": (SCRIPT, ("--out", "full.json"), 1, "No space left on device"),
    "an exit status": ("raise SystemExit(3)", (), 3, ""),
    "an exit with words": ("raise SystemExit('words')", (), 1, "words"),
    "an interrupt": ("raise KeyboardInterrupt", (), 1, "interrupted before the plan was made"),
}


@pytest.mark.parametrize("case", ENDS)
def test_errors_are_told_and_the_process_ends_beside_threads_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    more, options, status, said = ENDS[case]
    Path("full.json").symlink_to("/dev/full")
    Path("train.py").write_text(f"import threading\nthreading.Thread(target=threading.Event().wait).start()\n{more}")
    done = actorflow("plan", "train.py", "--devices", 2, *options, patience=40)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("then", ["pass", "raise SystemExit(1)", "raise ValueError", "step(*batch)"])
def test_a_script_that_catches_everything_is_shown_its_plan_all_the_same(tmp_path: Path, then: str) -> None:
    script, catch = tmp_path / "train.py", SCRIPT.partition("\nfor _ in")[0] + "\n"
    catch += "batch = (torch.randn(16, 64), torch.zeros(16, dtype=torch.int64))\n"
    script.write_text(f"{catch}try:\n    step(*batch)\nexcept BaseException:\n    {then}\n")
    done = actorflow("plan", script, "--devices", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan step: 2 ranks, 4 micro-batches")


def test_a_script_that_goes_to_another_folder_takes_no_file_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("train.py").write_text(f"import os\nos.chdir('other')\n{SCRIPT}")
    shutil.copy(EXAMPLE, "cluster.toml")
    done = actorflow("plan", "train.py", "--devices", 2, "--hardware", "cluster.toml", "--out", "plan.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "plan written to plan.json\n"
    assert Path("plan.json").is_file()
    assert not list(Path("other").iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--explain .* --out plan.json", "--out would be without effect"),
        ("--explain .* --forecast", "--forecast would be without effect"),
        ("--explain .* --replicas 2", "--replicas would be without effect"),
        ("--replicas 2 --out plan.json", "add --forecast, or drop one of them"),
    ],
)
def test_an_option_that_would_be_without_effect_is_refused(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["plan", str(script), "--devices", "2", *options.split()])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_the_observed_order_is_the_forecast_one(script: Path, tmp_path: Path) -> None:
    done = actorflow("run", script, "--devices", 2, "--trace", tmp_path / "orders")
    assert done.returncode == 0, done.stderr
    foretold = actorflow("plan", script, "--devices", 2, "--forecast")
    for rank in range(2):
        (line,) = (x for x in foretold.stdout.splitlines() if x.startswith(f"rank {rank}: {rank}F0"))
        assert (tmp_path / "orders" / f"rank{rank}.txt").read_text().splitlines() == ["plan step", line, line, line]


def test_an_interrupt_while_pages_of_other_plans_are_made_spares_the_rest_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    patch = """
from actorflow.session import compiling
page_of = compiling._page_of

def once(*arguments):
    compiling._page_of = interrupted
    return page_of(*arguments)

def interrupted(*_):
    raise KeyboardInterrupt

compiling._page_of = once
"""
    Path("train.py").write_text(patch + SCRIPT.partition("half =")[0] + SCRIPT.partition("ranks[half:])})")[2])
    done = actorflow("plan", "train.py", "--devices", 2, "--auto", "--out", "plan.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "plan written to plan.html, and 1 that it was compared with to plan-compared\n"
    assert [file.name for file in Path("plan-compared").iterdir()] == ["2.html"]


TWO_JOBS = """
import torch
import torch.nn.functional as F
import actorflow as flow

with flow.deferred_init() if {deferred} else torch.no_grad():
    model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function(type="predict")
def evaluate(x):
    print("evaluated")
    return {{"classes": model(x).argmax(1), "of": 4}}

@flow.global_function(type="train")
def train(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for epoch in range(4):
    found = evaluate(torch.ones(8, 8))
    print("classes", tuple(found["classes"].shape), found["classes"].dtype, found["of"])
train(torch.ones(8, 8), torch.zeros(8, dtype=torch.int64))
"""


@pytest.mark.parametrize("deferred", [False, True], ids=["real", "deferred"])
def test_a_job_that_nobody_asked_for_is_compiled_once_and_runs_where_it_has_values(
    tmp_path: Path, deferred: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWO_JOBS.format(deferred=deferred))
    done = actorflow("plan", script, "--devices", 2, "--job", "train")
    assert done.returncode == 0, done.stderr
    assert "plan train: 2 ranks" in done.stdout
    assert done.stdout.count("classes (8,) torch.int64 4\n") == 4
    assert done.stdout.count("evaluated") == 1 + 4 * (not deferred)
    assert ("evaluate is not run, as its model is deferred" in done.stderr) is deferred
