"""Tensors that change places, between calls or in the step, are where eager has them, for one or two plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.swapped import STEPS, WHERE, Step, cases, difference
from two_ranks import right_on_two_ranks

SCRIPT = Path(__file__).parent / "scripts" / "swapped.py"


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_two_that_change_places_compile_at_most_twice(step: Step, where: str, every: int) -> None:
    off, plans = difference(where, step, every, "micro-batches" if every == 3 else "one device")
    assert off < 1e-9
    assert plans <= 2


def test_two_ranks_do_so_too(how: str) -> None:
    right_on_two_ranks(SCRIPT, cases, ["data", "tensor", "zero 3"], how)
