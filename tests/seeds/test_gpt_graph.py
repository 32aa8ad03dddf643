"""The GPT of examples/seeds by nn.Graph has the losses of a plain PyTorch loop, under data, tensor and pipeline."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import actorflow as flow
import warm
from second.launching import command, run

SCRIPT = Path(__file__).parents[2] / "examples" / "seeds" / "gpt_graph.py"
STEPS = 4


@pytest.fixture(scope="module")
def plainly() -> list[float]:
    """The losses of one device, without a graph."""
    names = runpy.run_path(str(SCRIPT))
    flow.manual_seed(0)
    model = names["Gpt"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in names["batches"](STEPS):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, "--stages 2"),
        *(
            pytest.param(number, options, marks=pytest.mark.slow)
            for number, options in [
                (2, "--tensor 2"),
                (2, "--zero 3"),
                (4, "--tensor 2 --stages 2"),
                (4, "--tensor 2 --zero 2"),
                (8, "--tensor 2 --stages 2 --zero 1"),
            ]
        ),
    ],
)
def test_a_gpt_on_many_devices_has_the_losses_of_one(
    processes: int, options: str, plainly: list[float], tmp_path: Path
) -> None:
    line = command(
        "launch", str(SCRIPT), "--steps", str(STEPS), *options.split(), processes=processes, python=warm.python()
    )
    done = run(line, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [float(loss) for loss in re.findall(r"^\d+ loss: (\S+)$", done.stdout, re.MULTILINE)]
    assert found == pytest.approx(plainly, abs=1e-5), done.stdout
