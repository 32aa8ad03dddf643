"""First-generation jobs on two devices, through the real launcher, and their plans."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import warm
from cluster.runs import Run
from scripts import classic

SCRIPT = Path(classic.__file__)
LIMIT = 200  # seconds: six plans are compiled


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the script has printed as JSON on two devices, and all that the terminal shows."""
    folder = tmp_path_factory.mktemp("classic")
    made = Run(folder, SCRIPT, "--devices", "2", "--log-dir", str(folder / "logs"), python=warm.python())
    try:
        code = made.process.wait(LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.process.pid, signal.SIGKILL)
    assert code == 0, made.output + "".join(p.read_text() for p in sorted((folder / "logs").glob("*.log")))
    return json.loads(next(line for line in made.output.splitlines() if line.startswith("{"))), made.output


def eager() -> list[Any]:
    """The losses of the same network in eager PyTorch, sample by sample."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    names = {"hidden": "1", "out": "3"}
    state = {f"{names[k.split('-')[0]]}.{k.split('-')[1]}": torch.tensor(v) for k, v in classic.start().items()}
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found = []
    for number in range(classic.STEPS):
        optimizer.param_groups[0]["lr"] = 0.2 if number <= 9 else 0.1
        x, y = classic.batch(number)
        loss = cross_entropy(model(torch.tensor(x, dtype=torch.float)), torch.tensor(y), reduction="none")
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.tolist())
    return found


def test_mirrored_equals_consistent_over_20_steps(ended: tuple[dict[str, Any], str]) -> None:
    losses = ended[0]["losses"]
    mirrored = np.array(losses["mirrored"])
    assert mirrored.shape == (20, 2, 8)
    np.testing.assert_allclose(mirrored.reshape(20, 16), losses["consistent"], rtol=1e-6, atol=1e-6)
    assert max(ended[0]["differences"]) < 1e-5  # of what predict jobs make of their variables, after every step


@pytest.mark.parametrize("job", ["consistent", "hybrid", "pipeline"])
def test_every_layout_trains_as_eager_pytorch_does(ended: tuple[dict[str, Any], str], job: str) -> None:
    np.testing.assert_allclose(ended[0]["losses"][job], eager(), rtol=1e-5, atol=1e-6)


def test_layouts_and_placements_are_what_the_script_says(ended: tuple[dict[str, Any], str]) -> None:
    found, text = ended
    assert found["hybrid"] == ["S(0)"]
    assert found["pipeline"] == ["cpu:[0]", "cpu:[1]"]
    assert found["second"] == [2.0] * classic.SIZE
    assert text.count("this machine has no CUDA device") == (0 if torch.cuda.is_available() else 1)


def test_every_rank_hears_what_is_wrong_and_goes_on(ended: tuple[dict[str, Any], str]) -> None:
    split, short, node = ended[0]["errors"]
    assert "mirrored view, and S(0) for variables.hybrid-hidden-weight" in split
    assert "data parallelism only" in split
    assert short.startswith("CallError: mirrored: argument x is a list with 1 item; 2 were expected")
    assert node.startswith("LayoutError: scope.placement: '1:0' was found, and node 1 is not in the run")


def test_a_plan_is_shown_of_a_job_behind_a_mirrored_one() -> None:
    command = [warm.python(), "-m", "actorflow", "plan", str(SCRIPT), "--devices", "2", "--job", "consistent"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan consistent: 2 ranks")
    assert "variable variables.consistent-hidden-weight" in done.stdout
