"""``actorflow plan``: the forecast, hardware files, measured costs, CSV; and ``actorflow run --trace``."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import warm

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


def actorflow(*arguments: object, cache: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "actorflow", *map(str, arguments)]
    environment = os.environ if cache is None else {**os.environ, "ACTORFLOW_CACHE": cache}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)


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


def test_the_observed_order_is_the_forecast_one(script: Path, tmp_path: Path) -> None:
    done = actorflow("run", script, "--devices", 2, "--trace", tmp_path / "orders")
    assert done.returncode == 0, done.stderr
    foretold = actorflow("plan", script, "--devices", 2, "--forecast")
    for rank in range(2):
        (line,) = (x for x in foretold.stdout.splitlines() if x.startswith(f"rank {rank}: {rank}F0"))
        assert (tmp_path / "orders" / f"rank{rank}.txt").read_text().splitlines() == ["plan step", line, line, line]
