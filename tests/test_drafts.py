"""Forecasts by drafts of a step, with fewer of its blocks, are those of the whole; the whole one is what is chosen."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

from actorflow.auto_parallel import drafts
from actorflow.auto_parallel.comparison import choice_note
from actorflow.auto_parallel.drafts import DraftForecaster
from actorflow.auto_parallel.search import Choice, Compared, PlanSearch
from actorflow.auto_parallel.strategy import Strategy
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.errors import LayoutError, PlanError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.hints.goal import ParallelMode
from actorflow_scheduler import extrapolation
from actorflow_scheduler.forecast import Forecast, RankForecast
from compiler.test_fewer_blocks import Chain, layer
from models import CASES, Case, small_gpt
from test_auto_parallel import FAST_NODES, all_strategies, search_of
from trained import Layout

DEEP = replace(CASES["mlp"], make=lambda: Chain([layer() for _ in range(24)]))
DEEP_GPT = replace(CASES["gpt"], make=lambda: small_gpt(24))
DATA, TENSOR = ParallelMode.DATA, ParallelMode.TENSOR
STRATEGIES = [
    Strategy(1, (4,), (DATA,), 0),
    Strategy(1, (4,), (DATA,), 3, 2),
    Strategy(1, (2, 2), (DATA, TENSOR), 1),
    Strategy(2, (2,), (TENSOR,), 0, 4),
]


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "LARGE", 0)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("case", [DEEP, DEEP_GPT], ids=["layers", "gpt"])
def test_a_forecast_by_drafts_is_that_of_the_whole(case: Case, strategy: Strategy) -> None:
    search, _ = search_of(case, 4, layout=Layout(4, hardware=FAST_NODES))
    search._estimated()
    assert strategy in search.estimates
    drafted = search.compare(strategy)
    assert drafted.drafted
    assert not drafted.refused
    search.drafts = None
    whole = search.compare(strategy)
    assert not whole.drafted
    about = 0.12 if TENSOR in strategy.modes else 1e-3  # layouts of a few blocks may be others than those of many
    # with more blocks, something else may be what a step's end waits for: times are straight lines but for that
    assert drafted.seconds == pytest.approx(whole.seconds, rel=max(about, 2e-3))
    assert drafted.nbytes == pytest.approx(whole.nbytes, rel=about)
    assert drafted.moved == pytest.approx(whole.moved, rel=about)


@pytest.mark.parametrize("pieces", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_long_pipeline_is_forecast_from_drafts_of_a_short_one(pieces: int) -> None:
    """They have fewer stages, of as many devices each, and less in each stage."""
    long = replace(CASES["mlp"], make=lambda: Chain([layer() for _ in range(48)]))
    slow = Hardware(flops_per_s=1e8, memory_bytes_per_s=1e9, bytes_per_s=1e9, latency_s=1e-7, fire_overhead_s=1e-7)
    search, _ = search_of(long, 16, layout=Layout(16, hardware=slow), size=32)  # stages of about equal length
    search._estimated()
    strategy = Strategy(8, (2,), (DATA,), 1, pieces)
    assert strategy in search.estimates
    assert search.drafts is not None
    made: list[int] = []
    forecast = search.forecast

    def noted(captured: Capture, request: StepRequest, name: ScheduleName) -> tuple[Forecast, int]:
        made.append(request.devices.world)
        return forecast(captured, request, name)

    search.forecast = noted
    drafted = search.compare(strategy)
    assert drafted.drafted
    assert made == [8, 8]
    assert drafted.forecast is not None
    assert drafted.forecast.world == 16
    search.drafts = None
    whole = search.compare(strategy)
    assert made[2:] == [16]
    assert drafted.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert drafted.nbytes == pytest.approx(whole.nbytes, rel=0.1)


def test_only_what_the_search_shares_among_devices_that_are_alike_has_drafts_of_fewer_stages() -> None:
    long = replace(CASES["mlp"], make=lambda: Chain([layer() for _ in range(48)]))
    strategy = Strategy(8, (1,), (DATA,), 0, 8)
    for layout, shortens in ((Layout(8), True), (Layout(8, hardware=Hardware(speeds=(1.0,) * 7 + (2.0,))), False)):
        search, _ = search_of(long, 8, layout=layout)
        search._estimated()
        assert search.drafts is not None
        assert (search.drafts.sizes(strategy) is not None) == shortens


def test_less_is_compiled_for_drafts_and_a_small_step_or_many_stages_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, _ = search_of(DEEP, 4)
    all_strategies(search)
    made: list[int] = []
    forecast = search.forecast

    def noted(captured: object, request: object, name: object) -> object:
        made.append(len(captured.graph.nodes))  # type: ignore[attr-defined]
        return forecast(captured, request, name)  # type: ignore[arg-type]

    search.forecast = noted  # type: ignore[assignment]
    search.compare(STRATEGIES[0])
    assert len(made) == 2
    assert sum(made) < 0.6 * len(search.captured.graph.nodes)
    assert search.drafts is not None
    assert search.drafts.sizes(replace(STRATEGIES[0], stages=8)) is None
    monkeypatch.setattr(drafts, "LARGE", 1 << 30)
    given = search.drafts.whole
    assert DraftForecaster.of(given.captured, given.parts, given.estimator, False).sizes(STRATEGIES[0]) is None


def test_the_time_to_compile_what_is_chosen_as_a_whole_is_a_part_of_the_searchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, _ = search_of(DEEP, 4, budget=1e12)
    search._estimated()
    search.enough = 45.0
    clock = iter((0.0, 7.0, 7.0, 15.0))  # the shorter draft, 4 of 24 blocks, takes 7 s, the longer one of 8 takes 8 s
    with monkeypatch.context() as patch:
        patch.setattr(drafts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        best = search.compare(STRATEGIES[0])
    assert best.drafted
    assert search.drafts is not None
    assert search.drafts.seconds[best.strategy] == 24.0
    for whole, passed, late in ((10, 17, False), (10, 18, True), (40, 11.9, False), (40, 12.1, True), (300, 22, False)):
        search.drafts.seconds[best.strategy] = whole
        search.begun = time.monotonic() - passed
        assert search._is_late() == late, (whole, passed)
    search.begun = time.monotonic() - 23  # and one more
    assert search._is_late()


def test_blocks_of_which_too_few_are_alike_have_no_drafts() -> None:
    """Of 24 blocks only ten are: whatever is to be left, sixteen are, and no line goes through one point."""
    unlike = replace(CASES["mlp"], make=lambda: Chain([layer(8 + max(0, k - 9)) for k in range(24)]))
    search, _ = search_of(unlike, 4)
    search._estimated()
    assert search.drafts is not None
    assert search.drafts.blocks.left(4) == search.drafts.blocks.left(8) > 8
    assert search.drafts.sizes(STRATEGIES[0]) is None
    assert not search.compare(STRATEGIES[0]).drafted


def settled(search: PlanSearch, wholes: Mapping[Strategy, Forecast | Exception]) -> Compared:
    """What a search takes whose whole plans have these forecasts, or cannot be made."""

    def make(choice: Choice) -> Forecast:
        whole = wholes[choice.best.strategy]
        if isinstance(whole, Exception):
            raise whole
        return replace(whole, drafted=False)

    choice, whole = search.settled(search._choice(), make, lambda whole: whole)
    assert choice.best.forecast is whole
    assert not choice.best.drafted
    return choice.best


@pytest.mark.parametrize("fails", [False, True], ids=["too large", "cannot be made"])
def test_a_choice_that_does_not_fit_as_a_whole_makes_way_for_the_next(fails: bool) -> None:
    search, _ = search_of(DEEP, 4, budget=1e12)
    search._estimated()
    for strategy in STRATEGIES[:2]:
        search.compare(strategy)
    choice = search._choice()
    assert choice.best.drafted
    assert "by drafts with fewer of the repeated blocks or micro-batches" in choice_note(choice)
    first, other = choice.best, choice.others[0]
    assert first.forecast is not None
    assert other.forecast is not None
    large = replace(first.forecast, ranks=(replace(first.forecast.ranks[0], variables=1 << 50),))
    wholes = {first.strategy: PlanError("it needs more") if fails else large, other.strategy: other.forecast}
    assert settled(search, wholes).strategy == other.strategy
    assert search.compared[first.strategy].refused


def test_where_no_whole_plan_can_be_made_an_error_says_what_was_tried() -> None:
    search, _ = search_of(DEEP, 4, budget=1e12)
    search._estimated()
    for strategy in STRATEGIES[:2]:
        search.compare(strategy)
    with pytest.raises(LayoutError, match=r"none of 2 plans that were tried is possible.*that needs more"):
        settled(search, {s: PlanError(f"{s}: that needs more") for s in STRATEGIES[:2]})


def test_after_a_draft_that_was_too_small_those_come_first_that_fit_if_they_are_as_wrong() -> None:
    search, _ = search_of(DEEP, 4, budget=1e12)
    search._estimated()
    for strategy in STRATEGIES[:3]:
        search.compare(strategy)
    first, second, third = sorted(search.compared.values(), key=lambda c: c.seconds)
    for one, share in ((first, 0.6), (second, 0.7), (third, 0.4)):
        search.compared[one.strategy] = held(one, share * 1e12)
    choice = search._choice()
    assert choice.best.strategy == first.strategy
    twice = {one.strategy: held(one, 2 * one.nbytes).forecast for one in search.compared.values()}
    assert settled(search, twice).strategy == third.strategy  # 0.8 of the budget; the second would be 1.4


def held(one: Compared, nbytes: float, seconds: float | None = None, refused: str = "") -> Compared:
    """A drafted strategy with other bytes that each device holds, and another time of a step."""
    assert one.forecast is not None
    rank = replace(one.forecast.ranks[0], registers=0, workspace=0, variables=int(nbytes))
    period = one.forecast.period if seconds is None else seconds
    return replace(one, forecast=replace(one.forecast, ranks=(rank,), period=period), refused=refused)


@pytest.mark.parametrize("bytes_of_whole", [0.99e12, 1.02e12, None])
def test_a_faster_draft_that_hardly_exceeds_the_budget_is_tried_as_a_whole_once(bytes_of_whole: float | None) -> None:
    search, _ = search_of(DEEP, 4, budget=1e12)
    search._estimated()
    doubtful, other, fits = (search.compare(strategy) for strategy in STRATEGIES[:3])
    for one, share, seconds in ((doubtful, 1.01, 0.9), (other, 1.05, 0.91), (fits, 0.5, 1.0)):
        search.compared[one.strategy] = held(one, share * 1e12, seconds, "too large" if share > 1 else "")
    choice = search._choice()
    assert choice.best.strategy == doubtful.strategy
    whole = None if bytes_of_whole is None else held(doubtful, bytes_of_whole, 0.92).forecast
    wholes = {doubtful.strategy: whole or PlanError("it needs more"), fits.strategy: held(fits, 0.5e12, 1.0).forecast}
    taken = settled(search, wholes)
    assert taken.strategy == (doubtful if bytes_of_whole == 0.99e12 else fits).strategy
    assert not taken.refused


@pytest.mark.parametrize(("share", "seconds"), [(1.2, 0.9), (1.01, 0.98)], ids=["too large", "hardly faster"])
def test_a_draft_over_the_budget_that_is_not_worth_it_is_not_taken(share: float, seconds: float) -> None:
    search, _ = search_of(DEEP, 4, budget=1e12)
    search._estimated()
    over, fits = (search.compare(strategy) for strategy in STRATEGIES[:2])
    search.compared[over.strategy] = held(over, share * 1e12, seconds, "too large")
    search.compared[fits.strategy] = held(fits, 0.5e12, 1.0)
    assert search._choice().best.strategy == fits.strategy


@pytest.mark.parametrize(
    ("takes", "interrupted"),
    [(1.06, False), (1.2, False), (None, False), (None, True)],
    ids=["faster", "slower", "no time", "interrupted"],
)
def test_a_draft_that_is_faster_than_the_whole_plan_if_it_is_right_is_compiled_while_there_is_time(
    takes: float | None, interrupted: bool
) -> None:
    """Others' drafts are taken to be as much too fast, and not to need more than they say."""
    search, _ = search_of(DEEP, 4, budget=1e12)
    search._estimated()
    first, second = (search.compare(strategy) for strategy in STRATEGIES[:2])
    search.compared[first.strategy] = held(first, 0.4e12, 1.0)
    search.compared[second.strategy] = held(second, 0.7e12, 1.05)
    choice = search._choice()
    assert choice.best.strategy == first.strategy
    wholes: dict[Strategy, Forecast | Exception] = {first.strategy: forecast_of(held(first, 0.99e12, 1.1))}
    search.enough, search.interrupted = math.inf, interrupted
    if takes is not None:
        wholes[second.strategy] = forecast_of(held(second, 0.7e12, takes))
    elif not interrupted:
        assert search.drafts is not None
        search.enough = time.monotonic() - search.begun + search.drafts.seconds[second.strategy] / 2
    assert settled(search, wholes).strategy == (second if takes == 1.06 else first).strategy
    assert search.more == 1.0
    if takes is None:
        (told,) = (one for one in search._choice().others if one.strategy == second.strategy)
        assert told.seconds == pytest.approx(1.05 * 1.1)  # if it is as wrong as the one whose whole plan is known


def forecast_of(one: Compared) -> Forecast:
    assert one.forecast is not None
    return one.forecast


def test_all_memory_of_a_rank_is_drawn_out_to_the_blocks_that_a_draft_leaves_out() -> None:
    few = RankForecast((0,), {}, 100, 10, 1000, (), 5)
    more = RankForecast((0,), {}, 200, 10, 1500, (), 7)
    found = extrapolation._rank(SimpleNamespace(ranks=(few,)), more, 3.0)  # type: ignore[arg-type]
    assert (found.registers, found.workspace, found.variables, found.shared) == (500, 10, 3000, 13)
    assert found.total == 3523
