"""Batches that an op fails on, on several ranks: all give the call up and go on, or the run ends and says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actorflow.transport.abandon import Coordinator, Decision, Failed, Hold, Vote
from recipes.layouts import LAYOUTS
from test_runs import actorflow

SCRIPT = Path(__file__).parent / "scripts" / "bad_batches.py"
BEGIN = """
import torch, torch.nn.functional as F
import actorflow as flow
from torch import nn

torch.manual_seed(0)
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, x):
        self.seen += x.detach().mean()
        return self.layer(x)
model = Counted()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.global_function(type="train")
def step(x, y):
BODY
def tried(y):
    try:
        return float(step(x, y))
    except Exception as error:
        print(f"rank {flow.env.rank()} got {type(error.__cause__).__name__} in {error}", flush=True)

x, good, bad = torch.randn(4, 4), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 7])
"""
PLAIN = """
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
AFTER = """
    loss = F.cross_entropy(model(x), y.clamp(max=2))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return F.cross_entropy(model(x), y)
"""


OVERLOOKED = """
import os, pathlib
issued = pathlib.Path(__file__).with_name("issued")
if flow.env.rank() == 0:
    os.mkfifo(issued)
tried(good)
if flow.env.rank() == 0:
    issued.read_text()
handle = step(x, bad)
try:
    if flow.env.rank() == 0:
        float(handle)
except Exception:
    pass
try:
    for number in range(9):
        step(x, good)
        if flow.env.rank() and number == 0:
            issued.write_text("")
except Exception:
    pass
"""


def ran(folder: Path, body: str, lines: str) -> tuple[int, str]:
    """The exit status of a script on two ranks, and what all of them print."""
    script = folder / "train.py"
    script.write_text(BEGIN.replace("BODY", body) + lines)
    run = actorflow("run", str(script), "--devices", "2", "--log-dir", str(folder / "logs"))
    logs = "".join(path.read_text() for path in (folder / "logs").rglob("*") if path.is_file())
    return run.returncode, run.stdout + run.stderr + logs


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    # one device is in frontend/test_failed_calls.py, too
    ["pipeline 2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("one device", "data 2", "tensor 2", "ZeRO 3"))],
)
def test_the_good_batches_train_as_eagerly(layout: str) -> None:
    run = actorflow("run", str(SCRIPT), "--devices", str(LAYOUTS[layout].devices), "--", layout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WRONG" not in run.stdout
    assert run.stdout.count(": right") == 1 + 4 * (1 if layout == "pipeline 2" else 2)


def test_every_rank_gets_the_error_of_the_one_that_failed(tmp_path: Path) -> None:
    code, text = ran(tmp_path, PLAIN, "tried(good)\ntried(bad)\nprint('went on with', tried(good))\n")
    assert code == 0, text
    for rank in (0, 1):
        assert re.search(rf"rank {rank} got \w+Error in rank 1, .*out of bounds.*has changed nothing", text), text
    assert text.count("went on with 0.") + text.count("went on with 1.") >= 1


def test_what_a_call_has_changed_before_ends_the_run(tmp_path: Path) -> None:
    code, text = ran(tmp_path, AFTER, "tried(good)\ntried(bad)\ntried(good)\n")
    assert code == 1
    why = r"No call can follow it: load a checkpoint \(rank \d: the call had changed model\.layer"
    assert re.search(rf"train\.py:\d+: .*{why}", text), text


def test_a_rank_that_overlooks_the_error_is_told_that_ranks_differ(tmp_path: Path) -> None:
    """It makes its next call before the one that fails is made by all, and does not heed the error."""
    code, text = ran(tmp_path, PLAIN, OVERLOOKED)
    assert code == 1
    assert "a call differs between ranks" in text
    assert "1 failed calls" in text


def test_the_coordinator_asks_once_and_decides_when_all_have_voted() -> None:
    coordinator = Coordinator(3)
    first, second = Failed(4, "a", "", ""), Failed(4, "b", "", "")
    assert coordinator.hear(2, first) == Hold(4)
    assert coordinator.hear(0, second) is None
    assert coordinator.hear(0, Vote(4, "")) is None
    assert coordinator.hear(1, Failed(5, "c", "", "")) == Hold(5)
    assert coordinator.hear(2, Vote(4, "it was too late")) is None
    assert coordinator.hear(1, Vote(4, "")) == Decision(first, "rank 2: it was too late")
    for rank in range(2):
        assert coordinator.hear(rank, Vote(5, "")) is None
    assert coordinator.hear(2, Vote(5, "")) == Decision(Failed(5, "c", "", ""), "")
