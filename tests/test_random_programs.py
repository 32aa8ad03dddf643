"""Random programs train under random layouts as they do in eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from random_programs import STATE, describe, draw, outcome

FEW, SEVERAL, MANY, AT_ONCE = 2, 6, 2000, 50
AGAIN = "run it alone: PYTHONPATH=tests:examples python tests/random_programs.py {seed} (--shrink leaves moves out)"


def check(seeds: range, only: Sequence[str] = ()) -> None:
    """All of them, and say of the first that fails what it is."""
    compared = 0
    for seed in seeds:
        found = outcome(draw(seed, only=only))
        again = AGAIN.format(seed=f"{seed}{' --state' * bool(only)}")
        what = f"{again}\n{describe(seed, only=only)}\n{found.kind}: {found.text}"
        assert found.kind in ("same", "skipped"), what
        compared += found.kind == "same"
    assert compared > len(seeds) // 2


def test_random_programs_train_as_they_do_eagerly() -> None:
    check(range(FEW))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
def test_many_random_programs_train_as_they_do_eagerly(first: int) -> None:
    check(range(first, first + AT_ONCE))


def test_no_plan_waits_for_ever_where_state_is_read_and_written_in_several_pieces() -> None:
    check(range(FEW), STATE)


def test_a_value_that_moves_in_several_hops_goes_on_from_other_devices_than_it_came_from() -> None:
    check(range(8, 9), STATE)  # over fewer devices


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 40 * SEVERAL, SEVERAL))
def test_many_plans_wait_for_ever_nowhere_where_state_is_read_and_written_in_several_pieces(first: int) -> None:
    check(range(first, first + SEVERAL), STATE)
