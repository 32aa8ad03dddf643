"""Whole scripts under the launcher, with real processes, equal the eager script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import warm
from actorflow_compiler.plan.text import from_json, to_json
from actorflow_compiler.plan.verify import verify
from models import CASES

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"


def actorflow(
    *arguments: str, timeout: float = 250, python: str | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line program, in a fork unless ``python`` is named; the script can import modules of tests."""
    path = os.pathsep.join([str(HERE), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [python or warm.python(), "-m", "actorflow", *arguments], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "PYTHONPATH": path, **env},
    )  # fmt: skip


def eagerly(name: str) -> dict[str, object]:
    """What ``scripts/whole.py`` does, in eager PyTorch on one device."""
    case = CASES[name]
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    *batches, last = case.batches([16, 16, 16, 6, 10])
    losses, held_out = [], []
    for inputs, targets in batches:
        loss = case.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        with torch.no_grad():
            held_out.append(case.loss(model, *last).item())
    return {"losses": losses, "held out": held_out, "state": model.state_dict()}


@pytest.mark.parametrize(
    ("name", "layout", "devices"),
    [
        ("mlp", "data", 1),
        pytest.param("mlp", "split", 2, marks=pytest.mark.slow),
        ("gpt", "data", 2),
        pytest.param("gpt", "pipeline", 2, marks=pytest.mark.slow),
        pytest.param("gpt", "pipeline", 4, marks=pytest.mark.slow),  # test_pipeline_runs.py has quicker ones
        pytest.param("gpt", "home", 2, marks=pytest.mark.slow),
    ],
)
def test_a_whole_script_equals_the_eager_one(name: str, layout: str, devices: int, tmp_path: Path) -> None:
    path = tmp_path / "result.pt"
    run = actorflow(
        "run", str(HERE / "scripts" / "whole.py"), "--devices", str(devices), "--log-dir", str(tmp_path / "logs"), "--",
        name, layout, str(path),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found, expected = torch.load(path), eagerly(name)
    for key in ("losses", "held out"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=1e-5, atol=0)
    assert found["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        scale = value.abs().max().clamp(min=1e-6)
        assert (found["state"][key] - value).abs().max() / scale <= 1e-4, key


@pytest.mark.slow
def test_a_plan_is_shown_without_running_it_and_its_json_loads_back_to_an_equal_plan(tmp_path: Path) -> None:
    """The JSON does not depend on the order of sets, either, which another hash seed changes."""
    shape = ["--", "--pipeline", "2", "--data", "2", "--layers", "2"]
    shown = actorflow("plan", str(EXAMPLES / "gpt.py"), "--devices", "4", *shape)
    assert shown.returncode == 0, shown.stderr
    for rank in range(4):
        assert f"rank {rank}:" in shown.stdout
    for word in ("done redundantly", "queue compute", "slots of", "S(0)", "peers"):
        assert word in shown.stdout
    sends = re.findall(r"send \d+ from rank \d to rank \d, (\w+)", shown.stdout)
    assert set(sends) == {"shared"}  # as in a run on one machine
    paths = [tmp_path / f"plan{number}.json" for number in range(2)]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # that of a fork is random, or the variable's
    for path, python in zip(paths, (None, sys.executable), strict=True):
        arguments = ("--devices", "4", "--out", str(path), *shape)
        written = actorflow("plan", str(EXAMPLES / "gpt.py"), *arguments, python=python, PYTHONHASHSEED=seed)
        assert written.returncode == 0, written.stderr
    assert paths[0].read_text() == paths[1].read_text()
    plan = verify(from_json(paths[0].read_text()))
    assert from_json(to_json(plan)) == plan
    assert (plan.world, plan.pieces) == (4, 4)
    assert plan.summary.redundant_flops == 0
    assert list(plan.summary.stages) == ["cpu:[0,1]", "cpu:[2,3]"]


RAISES = """
import torch

import actorflow as flow

model = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(30)])
optimizer = torch.optim.SGD(model.parameters(), 0.01)


@flow.global_function(type="train")
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for _ in range(4):
    step(torch.randn(1000, 500))
raise ValueError("no")
"""


@pytest.mark.parametrize("launcher", [("run", "--devices", "1"), pytest.param((), marks=pytest.mark.slow)])
def test_a_script_that_raises_while_calls_are_under_way_ends_with_its_own_error(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    if launcher:
        run = actorflow(*launcher, "--log-dir", str(tmp_path / "logs"), str(script))
    else:
        run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250)
    assert run.returncode == 1, run.stderr
    assert "ValueError: no" in run.stderr
    assert "terminate called" not in run.stderr
