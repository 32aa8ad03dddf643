"""Random scripts, which change what a step can reach in random ways, do as jobs what they do in plain PyTorch.

They run in processes of their own: what they change of torch and of Python is nobody else's.
"""

from __future__ import annotations

from collections import Counter

import pytest

import warm
from random_script_runs import FINE, SCRIPT, outcomes

FEW, MANY, AT_ONCE = 3, 1000, 25  # on one device
FEW_ON_TWO, MANY_ON_TWO = 4, 200  # each under one of the layouts


def check(seeds: range, devices: int = 1, layout: str = "one device") -> None:
    """All of them are as eagerly or refused with their line; of those that are not, say what they are."""
    found = outcomes(seeds, devices, layout, warm.python())
    wrong = [str(one) for one in found if one.kind not in FINE]
    assert not wrong, f"run one alone: python {SCRIPT} SEED (--shrink leaves parts out)\n" + "\n".join(wrong)
    assert [one.seed for one in found] == [*seeds]
    counts = Counter(one.kind for one in found)
    assert counts["same"] > len(seeds) // 3, counts


def test_random_scripts_do_as_jobs_what_they_do_eagerly() -> None:
    check(range(FEW))


@pytest.mark.slow
def test_they_do_so_on_two_devices() -> None:
    check(range(FEW_ON_TWO), 2, "each")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
def test_many_random_scripts_do_as_jobs_what_they_do_eagerly(first: int) -> None:
    check(range(first, first + AT_ONCE))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, MANY_ON_TWO, AT_ONCE))
def test_many_do_so_on_two_devices(first: int) -> None:
    check(range(first, first + AT_ONCE), 2, "each")
