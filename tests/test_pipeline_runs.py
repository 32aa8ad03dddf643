"""Pipelines over four processes: every model, layout and schedule trains as the eager script does on one device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import warm
from cluster.runs import Run
from scripts.pipelines import BATCH, BENT, LAYOUTS, STEPS, Ended, case_of
from trained import differences, train_eagerly

SCRIPT = Path(__file__).parent / "scripts" / "pipelines.py"
MODELS = ("gpt", "cnn", "llama", "t5")
SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
CLOSE = 1e-5  # in float64; some norms are in float32 all the same
FEW = [  # layouts of all four; without models whose library each process would import for seconds
    "gpt, pipeline 4, zb-v, 8",
    "cnn, data 2 × pipeline 2, 1f1b, 4",
    "gpt, tensor 2 × pipeline 2, auto, 4",
]


@functools.cache
def on_one_device(name: str, micro_batches: int) -> tuple[list[float], Mapping[str, torch.Tensor]]:
    """The eager training's losses, and the state that its model ends with."""
    return train_eagerly(case_of(name), [BATCH] * STEPS, micro_batches)


def check(titles: list[str], folder: Path, limit: float) -> None:
    """Train all in one run, one after the other, and compare each."""
    options = ("--devices", "4", "--log-dir", str(folder / "logs"), "--", str(folder / "out"))
    run = Run(folder, SCRIPT, *options, *titles, python=warm.python())
    try:
        assert run.wait(limit) == 0, run.output
    finally:
        if run.process.poll() is None:
            run.process.kill()  # its ranks die with it
    found: dict[str, Ended] = torch.load(folder / "out")
    assert [*found] == titles
    wrong = {title: fault for title, ended in found.items() if (fault := fault_of(title, ended))}
    assert not wrong


def fault_of(title: str, ended: Ended) -> str:
    """What is not as on one device; empty if all is."""
    name, layout, schedule, micro_batches = title.split(", ")
    losses, state = on_one_device(name, int(micro_batches))
    halves, _ = LAYOUTS[layout]
    stages = (4 if halves is None else 2) * (2 if schedule in BENT else 1)
    assert ended["pieces"] == int(micro_batches)
    assert len(ended["stages"]) == stages, title
    assert ended["planes"] == ["shared"], title
    assert ended["told"] == [], title
    assert ended["state"].keys() == state.keys()
    off = differences(ended["state"], state) | {
        f"loss {i}": abs(a - b) / abs(b) for i, (a, b) in enumerate(zip(ended["losses"], losses, strict=True))
    }
    worst = max(off, key=off.__getitem__)
    return f"{worst} is off by {off[worst]:.2g}" if off[worst] > CLOSE else ""


def test_four_processes_train_in_every_layout_as_one_device(tmp_path: Path) -> None:
    check(FEW, tmp_path, 280)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_four_processes_train_under_every_schedule_as_one_device(name: str, layout: str, tmp_path: Path) -> None:
    check([f"{name}, {layout}, {schedule}, {m}" for schedule in SCHEDULES for m in (4, 8)], tmp_path, 1700)
