"""Common steps, compared rank by rank, without any process."""

from __future__ import annotations

import pytest

from actorflow.control.drops import DropTally, drop_set
from actorflow.control.ledger import CommonStep, Ledger
from actorflow_compiler.core.errors import CallError


def call(number: int, digest: str = "d", text: str = "train_step(f32[8, 2])") -> CommonStep:
    return CommonStep("call", f"{number} {digest}", text, number)


def test_a_step_is_complete_when_the_last_rank_issues_it() -> None:
    ledger = Ledger(3)
    assert [ledger.issue(rank, call(0)) for rank in (2, 0, 1)] == [False, False, True]


def test_ranks_may_run_ahead_of_each_other() -> None:
    ledger = Ledger(2)
    assert [ledger.issue(0, call(n)) for n in range(5)] == [False] * 5
    assert [ledger.issue(1, call(n)) for n in range(5)] == [True] * 5


def test_calls_with_other_arguments_show_both_ranks_and_both_texts() -> None:
    ledger = Ledger(2)
    ledger.issue(0, call(0))
    ledger.issue(1, call(0))
    ledger.issue(0, call(1, "a", "train_step(f32[8, 2])"))
    with pytest.raises(CallError) as e:
        ledger.issue(1, call(1, "b", "evaluate(f32[8, 2])"))
    assert "rank 0 made call 2: train_step(f32[8, 2])" in str(e.value)
    assert "rank 1 made call 2: evaluate(f32[8, 2])" in str(e.value)


def test_a_rank_that_ended_while_another_calls_is_an_error_that_counts_calls() -> None:
    ledger = Ledger(2)
    for rank in (0, 1):
        ledger.issue(rank, call(0))
    ledger.issue(1, CommonStep("end"))
    with pytest.raises(CallError, match=r"(?s)rank 1 .* after 1 call\n.*rank 0 made call 2: train_step"):
        ledger.issue(0, call(1))


def test_a_call_that_an_ended_rank_can_never_make_is_an_error_at_once() -> None:
    ledger = Ledger(3)
    ledger.issue(2, CommonStep("end"))
    with pytest.raises(CallError, match="rank 2 came to the end of its script after 0 calls"):
        ledger.issue(0, call(0))


def test_a_gather_where_another_rank_scatters_is_an_error() -> None:
    ledger = Ledger(2)
    ledger.issue(0, CommonStep("gather", "plans"))
    with pytest.raises(CallError, match=r"(?s)rank 0 is at gather 'plans'.*rank 1 is at scatter 'plans'"):
        ledger.issue(1, CommonStep("scatter", "plans"))


def test_a_call_where_another_rank_gathers_is_an_error() -> None:
    ledger = Ledger(2)
    ledger.issue(0, CommonStep("gather", "specs"))
    with pytest.raises(CallError, match=r"(?s)rank 0 is at gather 'specs'.*rank 1 made call 1"):
        ledger.issue(1, call(0))


def test_what_all_ranks_have_told_of_is_agreed_on_once() -> None:
    tally = DropTally(world=3)
    tally.report(0, drop_set([1, 2], ["a", "b"]), 0)
    tally.report(1, drop_set([2], ["b", "c"]), 0)
    assert not tally.agreed(0)
    tally.report(2, drop_set([2, 3], ["a", "b"]), 1)
    assert tally.agreed(1) == drop_set([2], ["b"])
    tally.report(1, drop_set([1], []), 2)
    assert not tally.agreed(2)  # rank 2 still has it
    tally.report(2, drop_set([1], []), 3)
    tally.forget(drop_set([], ["a"]))
    assert tally.agreed(3) == drop_set([1], [])
    tally.report(1, drop_set([], ["a"]), 4)
    assert not tally.agreed(4)


def test_what_a_rank_tells_with_a_later_call_is_not_agreed_on_with_an_earlier_one() -> None:
    tally = DropTally(world=2)
    tally.report(1, drop_set([1], ["a"]), 5)  # it is ahead
    tally.report(0, drop_set([1], ["a"]), 2)
    assert not tally.agreed(4)
    tally.forget(drop_set([], ["a"]))
    assert tally.agreed(5) == drop_set([1], [])
