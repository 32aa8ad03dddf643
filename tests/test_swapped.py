"""Tensors that change places, between calls or in the step, are where eager has them, for one or two plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.swapped import STEPS, WHERE, Step, difference
from test_runs import actorflow

SCRIPT = Path(__file__).parent / "scripts" / "swapped.py"


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_two_that_change_places_compile_at_most_twice(step: Step, where: str, every: int) -> None:
    off, plans = difference(where, step, every, "micro-batches" if every == 3 else "one device")
    assert off < 1e-9
    assert plans <= 2


def test_two_ranks_do_so_too() -> None:
    layouts = ["data", "tensor", "zero 3"]
    run = actorflow("run", str(SCRIPT), "--devices", "2", "--", *layouts)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WRONG" not in run.stdout
    assert run.stdout.count(": right") == len(layouts) * len(STEPS)
