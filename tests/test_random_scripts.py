"""Random scripts, which change what a step can reach in random ways, do as jobs what they do in plain PyTorch."""

from __future__ import annotations

import pytest

from random_scripts import draw, outcome

FEW, MANY, AT_ONCE = 20, 1000, 25
AGAIN = "run it alone: PYTHONPATH=tests python tests/random_scripts.py {seed} (--shrink leaves parts out)"


def check(seeds: range) -> None:
    """All of them are as eagerly or refused with their line; of the first that is not, say what it is."""
    equal = 0
    for seed in seeds:
        drawn = draw(seed)
        found = outcome(drawn)
        what = f"{AGAIN.format(seed=seed)}\n{', '.join(drawn.titles)}\n{found.kind}: {found.text}"
        assert found.kind in ("same", "refused", "skipped"), what
        equal += found.kind == "same"
    assert equal > len(seeds) // 3


@pytest.mark.parametrize("first", range(0, FEW, 10))
def test_random_scripts_do_as_jobs_what_they_do_eagerly(first: int) -> None:
    check(range(first, first + 10))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
def test_many_random_scripts_do_as_jobs_what_they_do_eagerly(first: int) -> None:
    check(range(first, first + AT_ONCE))
