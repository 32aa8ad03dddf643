"""Random programs train under random layouts as they do in eager PyTorch."""

from __future__ import annotations

import pytest

from random_programs import describe, draw, outcome

FEW, MANY, AT_ONCE = 48, 2000, 50
AGAIN = "run it alone: PYTHONPATH=tests:examples python tests/random_programs.py {seed} (--shrink leaves moves out)"


def check(seeds: range) -> None:
    """All of them, and say of the first that fails what it is."""
    compared = 0
    for seed in seeds:
        found = outcome(draw(seed))
        again = AGAIN.format(seed=seed)
        assert found.kind in ("same", "skipped"), f"{again}\n{describe(seed)}\n{found.kind}: {found.text}"
        compared += found.kind == "same"
    assert compared > len(seeds) // 2


@pytest.mark.parametrize("first", range(0, FEW, 12))
def test_random_programs_train_as_they_do_eagerly(first: int) -> None:
    check(range(first, first + 12))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
def test_many_random_programs_train_as_they_do_eagerly(first: int) -> None:
    check(range(first, first + AT_ONCE))
