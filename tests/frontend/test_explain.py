"""``actorflow plan --explain`` says what ops and variables could have been."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import warm

SCRIPT = """
import torch
import torch.nn.functional as F
import actorflow as flow

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function(parallel="tensor")
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

step(torch.randn(8, 64), torch.zeros(8, dtype=torch.int64))
raise SystemExit("the script went on")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "train.py"
    path.write_text(SCRIPT)
    return path


def explain(script: Path, pattern: str) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "actorflow", "plan", str(script), "--devices", "2", "--explain", pattern]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def test_every_alternative_has_its_price_and_one_is_chosen(script: Path) -> None:
    done = explain(script, r"model\.0\.weight|aten\.addmm\.default")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "layouts of mesh axis 0, tensor" in text
    assert "model.0.weight: variable, mesh axis 0" in text
    assert "0: aten.addmm.default (forward), mesh axis 0" in text
    assert "S(0), B, S(1) -> S(1)" in text  # the first layer's columns
    assert "the same work on every device" in text
    assert 'not with parallel="tensor"' in text
    assert all(paragraph.count(" chosen") == 1 for paragraph in text.split("mesh axis 0\n")[1:])


def test_a_pattern_that_is_no_regular_expression_is_refused(script: Path) -> None:
    done = explain(script, "(")
    assert done.returncode == 2
    assert "is no regular expression" in done.stderr


def test_a_pattern_that_matches_nothing_is_refused_with_a_name_that_would(script: Path) -> None:
    done = explain(script, "model")
    assert done.returncode == 1
    assert "'model' matches no op, module or variable" in done.stderr
    assert "model.0.weight" in done.stderr
