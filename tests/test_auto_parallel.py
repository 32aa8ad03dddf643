"""``parallel="auto"``: whole plans are compared, and whichever is taken trains as the eager script does."""

from __future__ import annotations

import functools
import gc
import json
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import actorflow.auto_parallel.search
import warm
from actorflow.auto_parallel.comparison import SHOWN, choice_note, considered
from actorflow.auto_parallel.estimate import StrategyEstimate
from actorflow.auto_parallel.search import NEAR, Compared, PlanSearch
from actorflow.auto_parallel.space import divisors, marked_for_zero, open_choices, strategies
from actorflow.auto_parallel.strategy import Strategy
from actorflow.show.formats import write_compared
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.compile import capture_step, fold_captured, lower_captured
from actorflow_compiler.core import garbage_collection
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.garbage_collection import young_only
from actorflow_compiler.core.hardware import CPU_CORE, Hardware, Link, SharedCores
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.hints.constrain import constrain
from actorflow_compiler.hints.goal import ParallelMode, goal_of
from actorflow_compiler.hints.hints import StagesHint, distribute, place, zero
from actorflow_compiler.plan.folded import FoldedPlan
from actorflow_compiler.plan.plan import Plan
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_compiler.plan.rank_location import RankLocation
from actorflow_compiler.plan.text import considered_lines
from actorflow_compiler.plan.variant import PLAIN, Variant
from actorflow_compiler.values.variables import real_optimizer_state
from actorflow_scheduler.cost import variable_bytes
from actorflow_scheduler.fewer_pieces import forecast_draft
from actorflow_scheduler.forecast import Forecast, forecast
from actorflow_scheduler.schedule import schedule
from cluster.runs import Run
from gpt import GPT
from models import CASES, CONTEXT, Case, narrow
from trained import Layout, request_of, train, train_eagerly

SIZE, STEPS = 8, 3
DATA, TENSOR = ParallelMode.DATA, ParallelMode.TENSOR
TWO = StagesHint(2, (), "flow.place")
FAST_NODES = Hardware(node_size=2, inside=Link(4e11, 1e-6), bytes_per_s=1e7, latency_s=1e-4)


def foreseen(captured: Capture, request: StepRequest, name: ScheduleName) -> tuple[Forecast, int]:
    """The forecast of the scheduled plan of one rank of each class, for the search."""
    step, hardware = fold_captured(captured, request), request.devices.hardware
    return forecast_draft(step.cut, hardware, room_for_registers(step.cut().plan, request), name)


def scheduled(captured: Capture, request: StepRequest) -> Plan:
    """The scheduled plan of all ranks, to train by."""
    lowered = lower_captured(captured, request)
    return schedule(lowered.cut, request.devices.hardware, room_for_registers(lowered.cut(), request))


def room_for_registers(plan: Plan, request: StepRequest) -> dict[int, int] | None:
    budget = request.preferences.goal.budget
    if budget is None or plan.pieces == 1:
        return None
    return {rank: int(budget) - taken for rank, taken in variable_bytes(plan).items()}


def search_of(
    case: Case, world: int, budget: float | None = None, least: int = 1, layout: Layout | None = None, size: int = SIZE
) -> tuple[PlanSearch, torch.optim.Optimizer]:
    """The search over all strategies of a case, with micro-batches open."""
    asked = replace(layout or Layout(world), world=world, goal=goal_of("auto", budget))
    request, optimizer = request_of(case, asked, size)
    captured = capture_step(marked_for_zero(request))
    choices = open_choices(captured, request, micro_batches=True, budget=budget)
    search = PlanSearch(captured, request, choices, foreseen, budget, beside=False, least=least, enough=math.inf)
    return search, optimizer


def all_strategies(search: PlanSearch) -> list[Strategy]:
    return sorted(search.estimates or dict.fromkeys(search._estimated()))


@functools.cache
def eagerly(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_eagerly(CASES[name], [SIZE] * STEPS, 1)


def check_trains(name: str, search: PlanSearch, optimizer: torch.optim.Optimizer, strategy: Strategy) -> Plan:
    """Train by the plan of a strategy; it must do what the eager script does."""
    plan = scheduled(search.captured_for(strategy), search.request_of(strategy))
    state = search.request.step.state
    values = {h.name: h.tensor.detach().clone() for h in state.held.values()} | real_optimizer_state(state)
    for v in plan.variables:
        values.setdefault(v.name, torch.zeros(v.shape, dtype=getattr(torch, v.dtype)))
    losses, found = train(CASES[name], plan, values, optimizer, [SIZE] * STEPS)
    expected, parameters = eagerly(name)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found, parameters, rtol=1e-3, atol=1e-5)
    return plan


SPACE = [(name, world, n) for name in ("mlp", "gpt") for world in (2, 4) for n in range(60)]


@pytest.mark.matrix(every=80)
@pytest.mark.parametrize(("name", "world", "number"), SPACE)
def test_every_strategy_of_the_space_trains_as_the_eager_script_does(name: str, world: int, number: int) -> None:
    search, optimizer = search_of(CASES[name], world)
    every = all_strategies(search)
    assert len(every) <= 60
    if number < len(every):
        check_trains(name, search, optimizer, every[number])


def test_a_step_without_marks_is_what_is_captured_without_them() -> None:
    search, _ = search_of(CASES["gpt"], 2)
    plain = capture_step(search.request)
    assert str(search.captured.graph) != str(plain.graph)
    dropped = Strategy(zero=1).captured(search.captured).graph
    assert [(n.op, n.phase, n.where) for n in dropped.nodes] == [(n.op, n.phase, n.where) for n in plain.graph.nodes]
    assert Strategy(zero=2).captured(search.captured) is search.captured


def test_the_space_has_data_tensor_and_pipeline_parallelism_and_all_of_them() -> None:
    search, _ = search_of(CASES["gpt"], 4)
    every = {str(s) for s in all_strategies(search)}
    assert {
        "data 4", "data 4, ZeRO 3", "tensor 4", "auto 4", "data 2, tensor 2", "data 2, tensor 2, ZeRO 1",
        "2 stages, data 2, ZeRO 2, 4 micro-batches", "2 stages, tensor 2, 8 micro-batches", "4 stages, 8 micro-batches",
    } <= every  # fmt: skip
    assert "data 4, 4 micro-batches" not in every  # a micro-batch would have fewer samples than devices


def test_tensors_are_split_within_a_node_only() -> None:
    choices = open_choices(*(lambda s: (s.captured, s.request))(search_of(CASES["mlp"], 4)[0]), micro_batches=False)
    asked = search_of(CASES["mlp"], 4)[0].request.preferences
    found = {s.mesh for s in strategies(choices, asked, FAST_NODES, 4, SIZE, 1) if ParallelMode.TENSOR in s.modes}
    assert found == {(2, 2)}


@pytest.mark.parametrize(("name", "world"), [("mlp", 2), pytest.param("gpt", 4, marks=pytest.mark.slow)])
def test_what_is_chosen_is_the_fastest_that_was_compared_and_trains_as_well(name: str, world: int) -> None:
    search, optimizer = search_of(CASES[name], world)
    choice = search.run()
    assert all(choice.best.seconds <= other.seconds for other in choice.others if not other.refused)
    assert choice.request.preferences.micro_batches == choice.best.strategy.micro_batches
    check_trains(name, search, optimizer, choice.best.strategy)


@pytest.mark.slow
def test_a_strategy_that_was_left_out_is_not_faster() -> None:
    search, _ = search_of(CASES["mlp"], 4)
    best = search.run().best
    for strategy in all_strategies(search)[::5]:
        assert strategy in search.compared or search.compare(strategy).seconds >= 0.9 * best.seconds


@pytest.mark.slow
def test_a_slow_network_between_nodes_makes_stages_of_them() -> None:
    search, _ = search_of(CASES["gpt"], 4, layout=Layout(4, hardware=FAST_NODES))
    best = search.run().best.strategy
    assert (best.stages, best.mesh) == (2, (2,))


def test_a_budget_is_kept_and_the_next_best_are_told_with_the_reason() -> None:
    free = search_of(CASES["mlp"], 2)[0].run()
    budget = 0.9 * free.best.nbytes
    search, optimizer = search_of(CASES["mlp"], 2, budget, least=5)
    choice = search.run()
    assert choice.best.nbytes <= budget
    made = 1 + sum(one.forecast is not None for one in choice.others)
    assert choice_note(choice).startswith(f"chosen: {choice.best.strategy}; the best of {made} ")
    first, *others = considered(choice)
    assert (first.text, first.why) == (str(choice.best.strategy), "")
    assert len(others) == min(SHOWN, len(choice.others) + len(choice.estimated)) >= 4
    assert all(other.why for other in others)
    compiled = [other for other in others if not other.estimated]
    assert len(compiled) == min(SHOWN, len(choice.others))
    assert all(other.seconds >= first.seconds or "memory" in other.why for other in compiled if other.seconds)
    check_trains("mlp", search, optimizer, choice.best.strategy)


def test_where_the_time_is_over_the_best_of_further_meshes_are_told_by_their_estimates(tmp_path: Path) -> None:
    search, _ = search_of(CASES["gpt"], 4, budget=1e9, least=1 + SHOWN)
    search.enough = 0.0
    choice = search.run()
    told = considered(choice)
    estimated = [one for one in told if one.estimated]
    assert len(choice.others) < SHOWN
    assert len(told) == min(1 + SHOWN, 1 + len(choice.others) + len({s.shape for s in search.estimates}) - 1)
    assert {one.text for one in estimated} <= {str(s) for s in search.estimates if s not in search.compared}
    fit = [one.seconds for one in estimated if one.why != "does not fit the memory"]
    assert fit == sorted(fit)
    why = r"the chosen one's estimate is \d+% less|not compiled, as its 0 s were used up|does not fit the memory"
    assert all(re.fullmatch(why, one.why) for one in estimated)
    plan = replace(scheduled(choice.captured, choice.request), considered=told)
    plan = from_bytes(to_bytes(plan))
    assert plan.considered == told
    line = next(line for line in considered_lines(plan) if estimated[0].text in line)
    assert re.search(r"  about [\d.]+ [mµ]?s +about [\d.]+ [KM]iB +–  ", line), line
    files = write_compared(plan, [None] * (len(told) - 1), Hardware(), tmp_path / "plan.html")
    assert files[0].read_text().count('class="plan estimated"') == len(estimated)


@pytest.mark.slow
def test_after_a_strategy_that_does_not_fit_comes_the_fastest_that_fits_by_estimates_as_wrong_as_its_own() -> None:
    search, _ = search_of(CASES["gpt"], 4, budget=1e9)
    order = search._estimated()
    alike = [s for s in order if (s.stages, s.mesh, s.modes) == (order[0].stages, order[0].mesh, order[0].modes)]
    found = search.compare(alike[0])
    search.budget = 0.8 * found.nbytes
    taken = search._smaller(found, alike)
    expected = {s: search.estimates[s].nbytes * found.nbytes / search.estimates[alike[0]].nbytes for s in alike}
    assert expected[taken] <= search.budget < min(expected[s] for s in alike[: alike.index(taken)])
    search.budget = 1.0
    assert search._smaller(found, alike) == min(alike, key=lambda s: (expected[s], search.estimates[s].seconds))


@pytest.mark.slow
def test_of_about_equal_estimates_those_are_compiled_first_that_take_less_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actorflow.auto_parallel.search, "ABOUT", 1e9)  # all are about equal
    search, _ = search_of(CASES["mlp"], 4)
    search.run()
    shapes: dict[object, Strategy] = {}
    for s in search.compared:
        shapes.setdefault((s.stages, s.mesh, s.modes), s)
    first = list(shapes.values())[: actorflow.auto_parallel.search.SHAPES]
    efforts = [s.effort for s in first]
    assert len(set(efforts)) > 2
    assert efforts == sorted(efforts)


def test_once_something_fits_what_would_not_by_estimates_as_wrong_as_before_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, _ = search_of(CASES["mlp"], 4, budget=1e12)
    search._estimated()
    forecast = search.compare(Strategy(1, (4,), (ParallelMode.DATA,), 0)).forecast
    assert forecast is not None
    wrong = 1.5

    def compared(self: PlanSearch, strategy: Strategy, _: ScheduleName | None = None) -> Compared:
        """What a forecast would say by which all estimates of memory are too small."""
        asked = self.estimates[strategy]
        rank = replace(forecast.ranks[0], registers=0, workspace=0, variables=int(wrong * asked.nbytes))
        found = replace(forecast, ranks=(rank,), period=asked.seconds)
        self.compared[strategy] = Compared(strategy, found, refused=self._over(found))
        return self.compared[strategy]

    monkeypatch.setattr(PlanSearch, "compare", compared)
    sizes = sorted(e.nbytes for e in search.estimates.values())
    search.budget, search.compared = 1.8 * sizes[0], {}
    search._compare_shapes(sorted(search.estimates, key=lambda s: search.estimates[s].seconds))
    order = list(search.compared.values())
    first = next(k for k, c in enumerate(order) if not c.refused)
    later = order[first + 1 :]
    assert len(later) > 2
    assert all(c.nbytes <= (1 + NEAR) * search.budget for c in later)
    assert any(wrong * nbytes > (1 + NEAR) * search.budget > nbytes for nbytes in sizes)  # which were left out


def test_stages_with_micro_batches_and_tensors_that_are_split_are_more_effort() -> None:
    data = Strategy(1, (4,), (ParallelMode.DATA,), 3, 8)
    tensor = Strategy(1, (2, 2), (ParallelMode.DATA, ParallelMode.TENSOR), 0, 1)
    pipeline = Strategy(2, (2,), (ParallelMode.DATA,), 0, 8)
    assert data.effort < tensor.effort < pipeline.effort
    assert replace(data, micro_batches=1).effort == data.effort


DEEPER = replace(CASES["gpt"], make=lambda: GPT(layers=6, width=192, heads=4, context=CONTEXT))


def foreseen_on_nccl(captured: Capture, request: StepRequest, name: ScheduleName) -> tuple[Forecast, int]:
    """As ``foreseen``, with collectives that run while devices compute."""
    step, hardware = fold_captured(captured, request), request.devices.hardware
    gpus = tuple([RankLocation("", f"GPU {rank}", nccl=True) for rank in range(request.devices.world)])

    @functools.cache
    def make(variant: Variant) -> FoldedPlan:
        return replace(step.cut(variant), spots=gpus)

    return forecast_draft(make, hardware, room_for_registers(make(PLAIN).plan, request), name)


@pytest.mark.parametrize(
    ("case", "bytes_per_s"),
    [
        pytest.param(DEEPER, 1e8, marks=pytest.mark.slow),
        pytest.param(DEEPER, 3e8, marks=pytest.mark.slow),
        pytest.param(narrow(DEEPER), 1e8, marks=pytest.mark.slow),
        (narrow(DEEPER), 3e8),
    ],
    ids=["float32, slower", "float32", "autocast, slower", "autocast"],
)
def test_estimates_are_about_as_wrong_whatever_is_exchanged_behind_computing(case: Case, bytes_per_s: float) -> None:
    """All that differs is what is exchanged, and when: as wrong as one estimate is, so are the others."""
    hardware = Hardware(bytes_per_s=bytes_per_s, latency_s=1e-7, fire_overhead_s=1e-7)
    search, _ = search_of(case, 4, layout=Layout(4, hardware=hardware))
    search.beside, search.forecast = True, foreseen_on_nccl
    search._estimated()
    wrong = {}
    for stage, pieces in ((0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (3, 2)):
        strategy = Strategy(1, (4,), (ParallelMode.DATA,), stage, pieces)
        wrong[strategy] = search.estimates[strategy].seconds / search.compare(strategy).seconds
    assert max(wrong.values()) < 1.25 * min(wrong.values()), wrong


def test_devices_share_what_a_step_without_arguments_works_on_by_estimates_as_if_it_were_given() -> None:
    plain = CASES["mlp"]
    (batch,) = plain.batches([SIZE])
    inside = replace(
        plain, loss=lambda model: plain.loss(model, *batch), batches=lambda sizes: [()] * len(sizes), names=()
    )
    given, made = search_of(plain, 4)[0], search_of(inside, 4)[0]
    shared = Strategy(1, (4,), (DATA,), 0, 1)
    for search in (given, made):
        all_strategies(search)
    assert made.estimates[shared].seconds == pytest.approx(given.estimates[shared].seconds, rel=0.05)
    assert made.estimates[shared].nbytes == pytest.approx(given.estimates[shared].nbytes, rel=0.2)


def test_estimates_know_what_of_the_activations_the_devices_of_a_tensor_axis_hold_whole() -> None:
    """The stream of residuals, and what norms make of it, is not split; with many samples it is most of the memory."""
    search, _ = search_of(CASES["gpt"], 4, size=64)
    search._estimated()
    wrong = {}
    for mesh in ({DATA: 4}, {DATA: 2, TENSOR: 2}, {TENSOR: 4}):
        strategy = Strategy(1, tuple(mesh.values()), tuple(mesh), 0, 1)
        wrong[strategy] = search.estimates[strategy].nbytes / search.compare(strategy).nbytes
    assert max(wrong.values()) < 1.5 * min(wrong.values()), wrong


def test_estimates_know_that_each_micro_batch_in_a_pipeline_keeps_copies_of_weights_that_autocast_makes() -> None:
    """With few samples they are most of what is kept, and there are as many as micro-batches under way."""
    search, _ = search_of(narrow(DEEPER), 4, size=4)
    search._estimated()
    wrong = {}
    for stages, mesh, pieces in ((1, 4, 1), (2, 2, 2), (4, 1, 4)):
        strategy = Strategy(stages, (mesh,), (DATA,), 0, pieces)
        wrong[strategy] = search.estimates[strategy].nbytes / search.compare(strategy).nbytes
    assert max(wrong.values()) < 1.3 * min(wrong.values()), wrong


def test_what_all_strategies_share_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def speed(self: Hardware, rank: int) -> float:
        looked_at.append(rank)
        return 1.0

    monkeypatch.setattr(Hardware, "speed", speed)
    search, _ = search_of(CASES["mlp"], 4)
    search._estimated()
    assert len(search.estimates) > 20
    estimator = search.drafts.whole.estimator  # type: ignore[union-attr]
    looked_at.clear()
    for strategy in search.estimates:
        estimator.of(strategy)
    assert not looked_at


@pytest.mark.parametrize("needed", [2e9, 0.0], ids=["what it needs", "nothing"])
def test_after_a_strategy_without_a_plan_comes_the_fastest_that_fits_by_what_its_error_says(needed: float) -> None:
    """An error of layouts says how many bytes are needed; from another one it is not known how many lack."""
    search, _ = search_of(CASES["gpt"], 4, budget=1e9)
    first = search._estimated()[0]

    def fails(*_: object) -> tuple[Forecast, int]:
        error = LayoutError("no layout fits")
        error.needed = needed
        raise error

    search.forecast = fails
    found = search.compare(first)
    assert found.nbytes == needed
    half, fits, least = (replace(first, micro_batches=1000 + k) for k in range(3))
    for one, share, seconds in ((first, 0.9, 1), (half, 0.7, 2), (fits, 0.4, 3), (least, 0.1, 4)):
        search.estimates[one] = StrategyEstimate(seconds, seconds, share * 1e9)
    assert search._smaller(found, [first, half, fits, least]) == fits


def test_a_budget_that_nothing_fits_is_refused_with_what_is_needed() -> None:
    search, _ = search_of(CASES["mlp"], 2, 1000.0)
    with pytest.raises(LayoutError, match=r"none of \d+ plans .*memory budget of 1 KB .*least that was found needs"):
        search.run()


def test_devices_that_the_samples_of_a_micro_batch_are_too_few_for_are_an_error_that_says_so() -> None:
    search, _ = search_of(CASES["mlp"], 4)
    search.choices = replace(search.choices, micro_batches=False, stages=False)
    asked, devices = search.request.preferences, search.request.devices
    search.request = replace(
        search.request,
        preferences=replace(asked, micro_batches=8, hints=replace(asked.hints, stages=TWO)),
        devices=replace(devices, hardware=Hardware(node_size=1)),
    )
    found = "each of the 8 micro-batches has 1 of the 8 samples, fewer than the 2 devices of a stage"
    with pytest.raises(LayoutError, match=found):
        search.run()


def test_micro_batches_into_which_the_batch_does_not_divide_are_an_error_that_says_so() -> None:
    search, _ = search_of(CASES["mlp"], 4)
    search.choices = replace(search.choices, micro_batches=False)
    search.request = replace(search.request, preferences=replace(search.request.preferences, micro_batches=2 * SIZE))
    with pytest.raises(LayoutError, match=r"micro_batches=16: the batch has 8 samples \(dim 0\), which do not divide"):
        search.run()


def test_micro_batches_of_a_step_without_arguments_are_refused_as_without_a_choice() -> None:
    inside = replace(CASES["mlp"], loss=lambda model: model(torch.ones(8, 64)).sum(), batches=lambda _: [()], names=())
    request, _ = request_of(inside, Layout(4, 4, goal=goal_of("auto", None)), SIZE)
    captured = capture_step(marked_for_zero(request))
    choices = open_choices(captured, request, micro_batches=False)
    with pytest.raises(LayoutError, match="the job has no batch to divide"):
        PlanSearch(captured, request, choices, foreseen, None, beside=False).run()


def test_what_is_wrong_with_every_plan_alike_is_said_without_a_word_of_plans() -> None:
    search, _ = search_of(CASES["mlp"], 2)

    def refused(*_: object) -> tuple[Forecast, int]:
        raise LayoutError("8 stages were found")

    search.forecast = refused
    with pytest.raises(LayoutError, match=r"^8 stages were found$"):
        search.run()
    assert len(search.compared) > 1


def test_a_strategy_that_leaves_all_to_hints_is_named_by_its_micro_batches() -> None:
    assert str(Strategy(micro_batches=1)) == "1 micro-batch"
    assert str(Strategy(micro_batches=2)) == "2 micro-batches"
    assert str(Strategy(1, (1,), (DATA,))) == "one device"


def test_when_the_time_is_over_and_nothing_fits_only_what_needs_least_is_compiled() -> None:
    search, _ = search_of(CASES["mlp"], 4, 1000.0)
    search.enough = 0.0
    with pytest.raises(LayoutError, match="least that was found needs"):
        search.run()
    shapes = {s: (s.stages, s.mesh, s.modes) for s in search.compared}
    first = [s for s in shapes if shapes[s] == next(iter(shapes.values()))]
    least = [s for s in search.compared if s not in first]
    assert 1 <= len(first) <= 1 + actorflow.auto_parallel.search.SMALLER
    assert len(least) <= actorflow.auto_parallel.search.LAST
    nbytes = {s: search.estimates[s].nbytes for s in search.compared}
    assert min(search.estimates[s].nbytes for s in search.estimates) == min(nbytes.values())


def test_an_interrupt_ends_the_search_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = search_of(CASES["mlp"], 4)
    compare = PlanSearch.compare

    def interrupted(self: PlanSearch, strategy: Strategy, name: ScheduleName | None = None) -> object:
        if len(self.compared) == 2:
            raise KeyboardInterrupt
        return compare(self, strategy, name)

    monkeypatch.setattr(PlanSearch, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search_of(CASES["mlp"], 4)[0].run()
    search.may_stop = True
    choice = search.run()
    assert choice.stopped == "it was interrupted"
    assert len(choice.others) == 1
    search.compared.clear()  # where nothing has been found yet
    monkeypatch.setattr(PlanSearch, "compare", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        search.run()


def test_what_could_not_be_made_is_not_counted_among_what_was_compiled() -> None:
    search, _ = search_of(CASES["mlp"], 2)
    choice = search.run()
    made = next(one for one in choice.others if one.forecast is not None)
    others = (made, replace(made, refused="it does not fit the memory"), Compared(made.strategy, refused="no such cut"))
    note = choice_note(replace(choice, others=others))
    assert "the best of 3 plans that were compiled" in note
    assert "; 1 of them does not fit the memory; 1 more could not be made" in note
    assert "the best of 1 plan that was compiled" in choice_note(replace(choice, others=()))


def test_a_search_leaves_no_garbage_of_one_plan_while_it_compiles_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = search_of(CASES["mlp"], 2)
    first, second = all_strategies(search)[:2]
    forecast, left = search.forecast, list[weakref.ref[nn.Module]]()

    def noted(captured: Capture, request: StepRequest, name: ScheduleName) -> tuple[Forecast, int]:
        assert [one() for one in left] == [None] * len(left)
        cycle = nn.Module()
        cycle.__dict__["itself"] = cycle
        gc.collect(1)
        left.append(weakref.ref(cycle))
        return forecast(captured, request, name)

    search.forecast = noted
    monkeypatch.setattr(garbage_collection, "GROWN", -(1 << 50))  # so that any process has
    with young_only():
        search.compare(first)
        search.compare(second)
    assert len(left) >= 2


@pytest.mark.parametrize(("enough", "made"), [(0.0, ScheduleName.ONE_F_ONE_B), (math.inf, ScheduleName.AUTO)])
def test_the_plan_of_a_search_whose_time_is_over_has_the_schedule_that_was_compared(
    enough: float, made: ScheduleName, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, _ = search_of(CASES["mlp"], 2)
    pipeline = next(s for s in all_strategies(search) if s.stages == 2 and s.micro_batches == 2)
    monkeypatch.setattr(PlanSearch, "_estimated", lambda _: [pipeline])
    search.enough = enough
    assert search.run().schedule is made


@pytest.mark.matrix(every=20)
@pytest.mark.parametrize(("world", "number"), [(world, number) for world in (2, 4) for number in range(60)])
def test_what_is_compared_is_the_forecast_of_the_plan_that_would_run(world: int, number: int) -> None:
    search, _ = search_of(CASES["mlp"], world)
    every = all_strategies(search)
    if number >= len(every):
        return
    found = search.compare(every[number], ScheduleName.AUTO)
    plan = scheduled(every[number].captured(search.captured), search.request_of(every[number]))
    expected = forecast(plan, CPU_CORE)
    assert found.forecast is not None
    assert found.seconds == pytest.approx(expected.period, rel=1e-6)
    assert found.nbytes == max(rank.total for rank in expected.ranks)
    assert found.moved == sum(nbytes for _, nbytes in plan.summary.moved)


def test_unequal_devices_share_by_their_speeds() -> None:
    unequal = Hardware(flops_per_s=1e7, speeds=(1.0, 0.25))  # arithmetic takes longer than all else
    search, optimizer = search_of(CASES["mlp"], 2, layout=Layout(2, hardware=unequal))
    choice = search.run()
    shared = [c for c in (choice.best, *choice.others) if c.strategy.stages == 1]
    assert shared
    assert all(c.strategy.weights == ((4, 1),) and "shares by speed" in str(c.strategy) for c in shared)
    best = min(shared, key=lambda c: c.seconds)
    assert best.seconds < 0.7 * search.compare(replace(best.strategy, weights=())).seconds
    check_trains("mlp", search, optimizer, best.strategy)
    mixed = Hardware(speeds=(1.0, 1.0, 0.5, 0.25))  # the slower one of the second pair counts
    search, _ = search_of(CASES["mlp"], 4, layout=Layout(4, hardware=mixed))
    assert {s.weights for s in all_strategies(search) if s.mesh == (2, 2)} == {(), ((4, 1), (1, 1))}


# ---- hints are kept


def test_hints_of_stages_and_zero_are_kept() -> None:
    search, _ = search_of(CASES["gpt"], 4, layout=Layout(4, prepare=lambda model: place(model, stages=2)))
    asked = search.request.preferences.hints.stages
    assert asked is not None
    assert asked.count == 2
    assert all(search.request_of(s).preferences.hints.stages is asked for s in all_strategies(search))
    assert {s.mesh for s in all_strategies(search)} >= {(2,)}
    free, _ = search_of(CASES["gpt"], 4)
    all_strategies(free)
    assert all(
        found == free.estimates[s] for s, found in search.estimates.items() if s in free.estimates
    )  # as 2 stages
    assert search.estimates.keys() & free.estimates.keys()
    search, _ = search_of(CASES["gpt"], 2, layout=Layout(2, prepare=lambda model: zero(model, stage=3)))
    found = {z.stage for s in all_strategies(search) for z in search.request_of(s).preferences.hints.zero.values()}
    assert found == {3}


def test_layouts_that_are_hinted_leave_only_micro_batches_open() -> None:
    search, _ = search_of(CASES["mlp"], 2, layout=Layout(2, hints={r".*weight": Split(0)}))
    assert all_strategies(search) == [Strategy(micro_batches=m) for m in divisors(SIZE)]


def outputs_hinted(model: nn.Module) -> None:
    distribute(model, outputs={"": Split(0)})


def optimizer_hinted(model: nn.Module) -> None:
    distribute(model, optimizer={r".*weight": Split(0)})


@pytest.mark.parametrize("prepare", [outputs_hinted, optimizer_hinted])
def test_hints_of_what_modules_return_and_of_the_optimizers_state_leave_only_micro_batches_open(
    prepare: Callable[[nn.Module], None],
) -> None:
    search, _ = search_of(CASES["mlp"], 2, layout=Layout(2, prepare=prepare))
    assert all_strategies(search) == [Strategy(micro_batches=m) for m in divisors(SIZE)]


def test_a_layout_that_the_step_gives_to_a_tensor_leaves_only_micro_batches_open() -> None:
    plain = CASES["mlp"]
    case = replace(plain, loss=lambda model, x, y: plain.loss(model, constrain(x, B), y))
    search, _ = search_of(case, 2)
    assert all_strategies(search) == [Strategy(micro_batches=m) for m in divisors(SIZE)]


def test_one_device_has_only_micro_batches_to_choose() -> None:
    search, _ = search_of(CASES["mlp"], 1)
    assert search.run().best.strategy == Strategy(micro_batches=1)
    assert search.request.devices.hardware is CPU_CORE


# ---- a run


def ran(folder: Path, *options: str, budget: str = "") -> dict[str, Any]:
    """What a run of the script wrote."""
    out = folder / "out.json"
    script = Path(__file__).parent / "scripts" / "chosen_plan.py"
    run = Run(folder, script, *options, "--log-dir", str(folder), "--", str(out), budget, python=warm.python())
    assert run.wait() == 0, run.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("budget", [pytest.param("", marks=pytest.mark.slow), "700KB"])
def test_a_run_with_auto_trains_as_one_device_also_with_other_jobs_and_batches(tmp_path: Path, budget: str) -> None:
    expected = ran(tmp_path, "--devices", "1")
    found = ran(tmp_path, "--devices", "2", "--auto", budget=budget)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4, abs=1e-5)
    assert found["state"] == pytest.approx(expected["state"], rel=1e-4)
    if budget:  # which no plan without micro-batches or stages fits
        assert (found["stages"], found["pieces"]) != (1, 1)


def test_estimates_know_that_ranks_share_cores_and_that_stages_that_wait_leave_theirs() -> None:
    alone, _ = search_of(CASES["gpt"], 4)
    crowded, _ = search_of(CASES["gpt"], 4, layout=Layout(4, hardware=replace(CPU_CORE, cores=SharedCores(0.5, 1))))
    alone._estimated()
    crowded._estimated()
    data, stages = Strategy(1, (4,), (ParallelMode.DATA,), 0), Strategy(4, (1,), (ParallelMode.DATA,), 0)
    slower = {s: crowded.estimates[s].seconds / alone.estimates[s].seconds for s in (data, stages)}
    assert slower[data] == pytest.approx(2, rel=0.01)
    assert 1 <= slower[stages] < 1.2  # one of them computes at a time
