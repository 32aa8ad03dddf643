"""Common steps, logged by each rank and compared rank by rank, without any process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actorflow.control.drops import DropTally, drop_set
from actorflow.control.ledger import Ledger, StepDifference, differs
from actorflow.control.step_log import DIGEST, CommonStep, Described, StepBatch, StepKind, StepLog


def call(number: int, digest: str = "d", text: str = "train_step(f32[8, 2])") -> CommonStep:
    return CommonStep(StepKind.CALL, digest, text, number)


def logged(*steps: CommonStep) -> StepLog:
    log = StepLog()
    for step in steps:
        log.add(step)
    return log


def tell(ledger: Ledger, rank: int, log: StepLog) -> StepDifference | None:
    batch = log.take()
    assert batch is not None
    return ledger.add(rank, batch.digests, batch.ended)


def told(found: StepDifference | None, *logs: StepLog) -> str:
    """The error's text for a difference."""
    assert found is not None
    first, second = (logs[rank].describe(found.step) for rank in (found.first, found.second))
    assert first is not None
    assert second is not None
    return differs(found, first, second)


# -- what a rank logs ------------------------------------------------------------------------------


def test_a_log_gives_each_step_once_and_says_what_it_was_until_all_have_done_it() -> None:
    log = logged(call(0), CommonStep(StepKind.GATHER, "plans"), call(1))
    batch = log.take()
    assert batch is not None
    assert len(batch.digests) == 3 * DIGEST
    assert log.take() is None
    assert log.told == 3
    log.add(call(2), drop_set([1], []))
    assert log.told == 3
    log.want()
    last = log.take()
    assert last == StepBatch(last.digests if last else b"", ((2, drop_set([1], [])),), False, 4)
    assert log.describe(1) == Described(StepKind.GATHER, "is at gather 'plans', after 1 call")
    assert log.describe(4) is None
    assert log.forget(0) == -1
    assert log.forget(2) == 0
    assert log.forget(3) == 1
    assert log.describe(2) is None
    assert log.describe(3) == Described(StepKind.CALL, "made call 3: train_step(f32[8, 2])")
    log.add(CommonStep(StepKind.END))
    assert log.describe(4) == Described(StepKind.END, "came to the end of its script after 3 calls")


def test_the_digest_of_a_step_stands_for_all_steps_before_it() -> None:
    one, other = logged(call(0, "a"), call(1)), logged(call(0, "b"), call(1))
    assert one.add(call(2)) != other.add(call(2))
    assert logged(call(0)).add(call(1)) == logged(call(0)).add(call(1))


# -- what the master compares ----------------------------------------------------------------------


def test_steps_are_alike_when_the_last_rank_has_done_them() -> None:
    ledger = Ledger(range(3))
    for rank in (2, 0):
        assert tell(ledger, rank, logged(call(0), call(1))) is None
        assert ledger.alike == 0
    assert tell(ledger, 1, logged(call(0))) is None
    assert ledger.alike == 1


def test_ranks_may_run_ahead_of_each_other() -> None:
    ledger, slow = Ledger(range(2)), StepLog()
    tell(ledger, 0, logged(*map(call, range(500))))
    for number in range(500):
        slow.add(call(number))
        assert tell(ledger, 1, slow) is None
        assert ledger.alike == number + 1


def test_calls_with_other_arguments_show_both_ranks_and_both_texts() -> None:
    ledger = Ledger(range(2))
    one = logged(call(0), call(1, "a", "train_step(f32[8, 2])"))
    two = logged(call(0), call(1, "b", "evaluate(f32[8, 2])"))
    assert tell(ledger, 0, one) is None
    text = told(tell(ledger, 1, two), one, two)
    assert text.startswith("a call differs between ranks:")
    assert "rank 0 made call 2: train_step(f32[8, 2])" in text
    assert "rank 1 made call 2: evaluate(f32[8, 2])" in text


def test_the_first_difference_is_told_however_many_calls_were_made_since() -> None:
    ledger = Ledger(range(3))
    logs = [logged(*(call(n, str(n == 40 and rank == 2)) for n in range(90))) for rank in range(3)]
    assert tell(ledger, 1, logs[1]) is None
    assert tell(ledger, 0, logs[0]) is None
    assert tell(ledger, 2, logs[2]) == StepDifference(40, 1, 2)


def test_who_told_first_of_a_step_is_known_when_steps_before_it_are_forgotten() -> None:
    ledger, logs = Ledger(range(3)), [StepLog() for _ in range(3)]
    for rank, until in ((0, 2), (1, 4), (2, 6), (0, 3), (1, 5)):
        for number in range(logs[rank].told, until):
            logs[rank].add(call(number))
        assert tell(ledger, rank, logs[rank]) is None
        ledger.take_alike()
    assert ledger.missing(0) == (3, 1)
    assert ledger.missing(1) == (5, 2)
    logs[0].add(call(3, "other"))
    assert tell(ledger, 0, logs[0]) == StepDifference(3, 1, 0)


def test_a_rank_that_ended_while_another_calls_is_an_error_that_counts_calls() -> None:
    ledger = Ledger(range(2))
    one, two = logged(call(0)), logged(call(0), CommonStep(StepKind.END))
    for rank, log in enumerate((one, two)):
        assert tell(ledger, rank, log) is None
    one.add(call(1))
    text = told(tell(ledger, 0, one), one, two)
    assert text.startswith("a script ended while another rank went on:")
    assert "rank 1 came to the end of its script after 1 call\n" in text
    assert "rank 0 made call 2: train_step" in text


def test_a_call_that_an_ended_rank_can_never_make_is_an_error_at_once() -> None:
    ledger, ended, one = Ledger(range(3)), logged(CommonStep(StepKind.END)), logged(call(0))
    assert tell(ledger, 2, ended) is None
    text = told(tell(ledger, 0, one), one, one, ended)
    assert "rank 2 came to the end of its script after 0 calls" in text


def test_a_run_is_over_when_all_ranks_have_ended() -> None:
    ledger = Ledger(range(2))
    for rank in range(2):
        assert not ledger.over
        tell(ledger, rank, logged(call(0), CommonStep(StepKind.END)))
    assert ledger.over


def test_a_gather_where_another_rank_scatters_is_an_error() -> None:
    ledger = Ledger(range(2))
    one, two = (logged(CommonStep(kind, "plans")) for kind in (StepKind.GATHER, StepKind.SCATTER))
    tell(ledger, 0, one)
    text = told(tell(ledger, 1, two), one, two)
    assert text.startswith("ranks do different things:")
    assert "rank 0 is at gather 'plans', after 0 calls\n  rank 1 is at scatter 'plans', after 0 calls" in text


def test_a_call_where_another_rank_gathers_is_an_error() -> None:
    ledger = Ledger(range(2))
    one, two = logged(CommonStep(StepKind.GATHER, "specs")), logged(call(0))
    tell(ledger, 0, one)
    text = told(tell(ledger, 1, two), one, two)
    assert "rank 0 is at gather 'specs'" in text
    assert "rank 1 made call 1" in text


def test_the_step_that_a_rank_has_not_done_is_the_first_that_another_has() -> None:
    ledger = Ledger(range(3))
    assert ledger.missing(1) is None
    logs = [logged(call(0)) for _ in range(3)]
    for rank in (0, 2):
        tell(ledger, rank, logs[rank])
    logs[2].add(CommonStep(StepKind.GATHER, "losses"))
    tell(ledger, 2, logs[2])
    assert ledger.missing(2) is None
    assert ledger.missing(1) == (0, 0)
    assert ledger.missing(0) == (1, 2)
    tell(ledger, 1, logs[1])
    assert ledger.alike == 1
    assert ledger.missing(1) == (1, 2)
    assert ledger.late(2) == [0, 1]


@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=30),
    st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 19))),
)
def test_the_ledger_finds_a_difference_where_there_is_one_and_none_elsewhere(
    common: list[int], told_in: list[tuple[int, int]], differing: tuple[int, int] | None
) -> None:
    """Ranks tell of their steps in any order and in batches of any size."""
    scripts = [list(map(str, common)) for _ in range(3)]
    if differing is not None and differing[1] < len(common):
        scripts[differing[0]][differing[1]] = "other"
    ledger, logs, at = Ledger(range(3)), [StepLog() for _ in range(3)], [0] * 3
    for rank, count in [*told_in, (0, 20), (1, 20), (2, 20)]:
        for name in scripts[rank][at[rank] : at[rank] + count]:
            logs[rank].add(call(at[rank], name))
            at[rank] += 1
        batch = logs[rank].take()
        found = None if batch is None else ledger.add(rank, batch.digests)
        if found is not None:
            assert differing is not None
            assert found.step == differing[1]
            assert differing[0] in (found.first, found.second)
            return
        assert ledger.alike == min(at)
    assert len(set(map(tuple, scripts))) == 1


# -- what is dropped -------------------------------------------------------------------------------


def test_what_all_ranks_have_told_of_is_agreed_on_once() -> None:
    tally = DropTally(range(3))
    tally.report(0, drop_set([1, 2], ["a", "b"]), 0)
    tally.report(1, drop_set([2], ["b", "c"]), 0)
    assert not tally.agreed(0)
    tally.report(2, drop_set([2, 3], ["a", "b"]), 1)
    assert tally.agreed(1) == drop_set([2], ["b"])
    tally.report(1, drop_set([1], []), 2)
    assert not tally.agreed(2)  # rank 2 still has it
    tally.report(2, drop_set([1], []), 3)
    tally.forget(drop_set([], ["a"]), 3)
    assert tally.agreed(3) == drop_set([1], [])
    tally.report(1, drop_set([], ["a"]), 4)
    assert not tally.agreed(4)


def test_what_a_rank_tells_with_a_later_call_is_not_agreed_on_with_an_earlier_one() -> None:
    tally = DropTally(range(2))
    tally.report(1, drop_set([1], ["a"]), 5)  # it is ahead
    tally.report(0, drop_set([1], ["a"]), 2)
    assert not tally.agreed(4)
    tally.forget(drop_set([], ["a"]), 5)
    assert tally.agreed(5) == drop_set([1], [])
    tally.report(0, drop_set([], ["a"]), 6)  # another of that name
    assert not tally.agreed(6)
