"""Check that two ranks train the cases of a script of trainings as eager PyTorch does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from scripts.trainings import Cases, trainings
from test_runs import actorflow

__all__ = ["right_on_two_ranks"]

T = TypeVar("T")


def right_on_two_ranks(script: Path, cases: Cases[T], layouts: Sequence[str], how: str) -> None:
    """Raise AssertionError unless two ranks train the cases of a script as eager PyTorch does.

    ``how`` is "every" (case under every layout) or "some" (cases, each under one), as the fixture of this name says.
    """
    run = actorflow("run", str(script), "--devices", "2", "--", how, *layouts)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WRONG" not in run.stdout
    assert run.stdout.count(": right") == len(trainings(cases, layouts, how))
