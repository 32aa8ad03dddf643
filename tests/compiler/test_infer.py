"""What inference finds: the layouts that people would choose, within a budget, and never far from the bound."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import Hardware
from actorflow_compiler.core.linear_program import Ended, solve
from actorflow_compiler.core.ops import Meta, Ref
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.sbp import B, Split
from actorflow_compiler.graph.graph import Graph, Input, Node
from actorflow_compiler.hints.goal import DATA, Goal, goal_of
from actorflow_compiler.hints.hints import distribute, place, zero
from actorflow_compiler.infer import FixedLayouts, axes, infer
from actorflow_compiler.infer import choose as choosing
from actorflow_compiler.infer import relax as relaxing
from actorflow_compiler.infer.choose import _AxisChoice
from actorflow_compiler.infer.layout_program import LayoutProgram
from actorflow_compiler.infer.problem import Problem
from actorflow_compiler.infer.relax import IntegerChoice, decide, relax
from actorflow_compiler.infer.repeated_blocks import group_repeated
from actorflow_compiler.infer.reports import report_lines
from actorflow_compiler.infer.search import Search
from actorflow_compiler.plan.plan import Collective, CollectiveKind, Plan
from comms import communications
from gpt import GPT
from models import CASES, CONTEXT, Case
from trained import Layout, differences, in_float64, plan_of, train_eagerly, train_planned, trained_as_eagerly

BATCH = 64


def gpt(layers: int = 2) -> Case:
    """A small GPT whose activations are larger than its weights."""
    case = CASES["gpt"]
    return Case(lambda: GPT(layers, 32, 4, CONTEXT), case.optimizer, case.batches, case.stages)


def planned(case: Case, layout: Layout) -> Plan:
    """The plan of a case for a batch of ``BATCH``."""
    return plan_of(case, layout, BATCH)[0]


def moved(plan: Plan) -> Counter[tuple[str, str]]:
    """(kind, phase) → bytes that all ranks send in an iteration."""
    found: Counter[tuple[str, str]] = Counter()
    for c in communications(plan):
        found[(c.kind, c.phase)] += c.nbytes
    return found


def parameter_bytes(plan: Plan) -> int:
    return sum(torch.Size(v.shape).numel() * 4 for v in plan.variables if v.kind == "parameter")


# ---- what the layouts move


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_data_parallelism_moves_the_gradients_once_and_the_loss(world: int) -> None:
    plan = planned(gpt(), Layout(world))
    assert moved(plan).keys() == {("all_reduce", "backward"), ("all_reduce", "forward")}
    assert moved(plan)[("all_reduce", "backward")] == 2 * (world - 1) * parameter_bytes(plan)
    assert moved(plan)[("all_reduce", "forward")] <= 2 * (world - 1) * 8  # the loss, and nothing else
    assert plan.summary.redundant_flops == 0


VOCABULARY = 4096


def gpt_2(layers: int, vocabulary: int = VOCABULARY) -> Case:
    """A GPT-2 whose vocabulary is larger than its batch, as real ones are."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> nn.Module:
        return GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=32, n_head=4, vocab_size=vocabulary, n_positions=CONTEXT,
                       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        )  # fmt: skip

    return Case(make, CASES["gpt"].optimizer, CASES["gpt"].batches, ("", ""), loss=lambda m, x, y: m(x, labels=y).loss)


def megatron(model: nn.Module) -> None:
    """Column, then row; the fused projection in three blocks, the tied embedding over the vocabulary."""
    distribute(model, {
        r".*c_attn\.weight": Split(1, 3), r".*c_attn\.bias": Split(0, 3),
        r".*c_fc\.weight": Split(1), r".*c_fc\.bias": Split(0), r".*c_proj\.weight": Split(0),
        r"transformer\.wte\.weight": Split(0), r"transformer\.wpe\.weight": B,
    })  # fmt: skip


@pytest.mark.parametrize("layers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_megatron_hints_give_two_all_reduces_forward_and_two_backward_in_each_layer(layers: int) -> None:
    batch = 16  # so that its logits are dearer to gather than the messages of a loss in parts
    plan = plan_of(gpt_2(layers), Layout(2, prepare=megatron, goal=goal_of("tensor", None)), batch)[0]
    activations = batch * CONTEXT * 32 * 4
    found = communications(plan)
    large = Counter((c.kind, c.phase, c.nbytes) for c in found if c.nbytes >= activations)
    assert large == {  # one more each way: of the embedding, and of the head
        ("all_reduce", "forward", 2 * activations): 2 * layers + 1,
        ("all_reduce", "backward", 2 * activations): 2 * layers + 1,
    }


def test_stages_that_are_alike_move_nothing_but_activations_gradients_and_the_loss() -> None:
    plan = planned(CASES["gpt"], Layout(4, 4, pipeline=True))  # weights of both have the same shapes
    assert {c.kind for c in communications(plan)} == {"all_reduce", "send"}


def test_zero_1_reduces_and_scatters_gradients_and_gathers_parameters() -> None:
    plan = planned(gpt(), Layout(2, prepare=lambda m: zero(m, 1)))
    found = moved(plan)
    assert found[("reduce_scatter", "backward")] == parameter_bytes(plan)
    assert found[("all_gather", "optimizer")] == parameter_bytes(plan)


# ---- what inference finds by itself


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_tensor_parallelism_is_found_without_a_hint(name: str) -> None:
    plan = planned(CASES[name], Layout(2, goal=goal_of("tensor", None)))
    large = {v.name: v.sbp for v in plan.variables if v.kind == "parameter" and len(v.shape) > 1}
    assert all(isinstance(s, Split) for sbp in large.values() for s in sbp)
    assert plan.summary.redundant_flops < 0.05
    weights = {c.name for c in communications(plan)} & {n.removeprefix("model.") for n in large}
    assert not weights  # they are used as they are stored


@pytest.mark.slow
def test_a_fused_projection_is_split_head_by_head() -> None:
    plan = planned(gpt(), Layout(2, goal=goal_of("tensor", None)))
    lies = {v.name: v.sbp for v in plan.variables}
    assert lies["model.blocks.0.qkv.weight"] == (Split(0, 3),)
    assert lies["model.blocks.1.projection.weight"] == (Split(1),)


@pytest.mark.slow
def test_a_vocabulary_that_does_not_divide_is_split_as_one_that_does() -> None:
    even, odd = (report_of(gpt_2(1, n), Layout(2, goal=goal_of("tensor", None))) for n in (VOCABULARY, VOCABULARY + 1))
    assert odd.seconds <= 1.01 * even.seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd vocabulary", "lstm"])
def test_what_is_found_trains_as_one_device(name: str) -> None:
    case = in_float64(gpt_2(1, VOCABULARY + 1) if name == "odd vocabulary" else CASES[name])
    losses, expected = train_eagerly(case, [8, 8], 1)
    found, state, plan = train_planned(case, Layout(2, goal=goal_of("tensor", None)), [8, 8])
    assert found == pytest.approx(losses, rel=1e-6)
    worst = max(differences(state, expected).items(), key=lambda item: item[1])
    assert worst[1] <= 1e-5, worst
    assert plan.summary.redundant_flops < 0.05


@pytest.mark.slow
def test_data_parallelism_asks_the_solver_only_where_more_than_gradients_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Layout(4, goal=goal_of({"data": 2, "tensor": 2}, None))
    by_template = report_of(gpt(1), mesh)
    assert by_template.bound is None
    monkeypatch.setattr(choosing, "WORTH", 0.0)
    monkeypatch.setattr(choosing, "ASTRAY", 0.0)
    assert report_of(gpt(1), Layout(2)).bound is None  # of the only axis each device reads its own rows of the batch
    solved = report_of(gpt(1), mesh)
    assert solved.bound is not None
    assert solved.bound <= solved.seconds <= by_template.seconds


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_budget_alone_finds_a_plan_no_dearer_than_the_hand_made_one(stage: int) -> None:
    by_hand = report_of(gpt(1), Layout(2, prepare=lambda m: zero(m, stage)))
    assert by_hand.held.peak < report_of(gpt(1), Layout(2)).held.peak
    budget = 1.002 * by_hand.held.peak  # a hair more than the hand-made plan needs
    found = report_of(gpt(1), Layout(2, goal=goal_of(None, budget)))
    assert found.held.peak <= budget
    assert found.seconds <= by_hand.seconds


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_would_and_what_takes_it() -> None:
    with pytest.raises(LayoutError, match=r"budget of 10 KB .* needs .* of variables.* largest .*Use more devices"):
        planned(gpt(1), Layout(2, goal=goal_of(None, "10KB")))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("mode", ["tensor", "auto"])
def test_what_is_found_is_not_far_from_the_bound(mode: str) -> None:
    report = report_of(gpt(), Layout(2, goal=goal_of(mode, None)))
    assert report.bound is not None
    assert report.bound <= report.seconds <= 1.01 * report.bound


@pytest.mark.slow
def test_repeated_layers_are_decided_once() -> None:
    few, many = (report_of(gpt(layers), Layout(2)) for layers in (3, 6))
    assert many.items > 1.7 * few.items
    assert many.classes < 1.1 * few.classes


def test_layers_of_all_stages_are_decided_together() -> None:
    def program(stages: int) -> LayoutProgram:
        layout = replace(PIPELINE, world=2 * stages, prepare=lambda model: place(model, stages=stages))
        problem = problem_of_case(gpt(stages), layout)
        return LayoutProgram(problem, _AxisChoice(problem, layout.goal, 1).classes)

    few, many = program(2), program(4)
    assert len(many.p.items) > 1.7 * len(few.p.items)
    assert len(many.classes) < 1.1 * len(few.classes)
    assert len(many.cost) < 1.3 * len(few.cost)


def report_of(case: Case, layout: Layout):
    from actorflow_compiler.infer import layout_assignment as compiling

    seen = []

    def spy(*args: object, **kwargs: object) -> object:
        layouts = infer(*args, **kwargs)  # type: ignore[arg-type]
        seen.extend(layouts.reports)
        return layouts

    before, compiling.infer = compiling.infer, spy
    try:
        planned(case, layout)
    finally:
        compiling.infer = before
    return seen[0]


# ---- the search against every choice there is

PLACE = Placement("cpu", (0, 1), (2,))
SQUARE = Meta((8, 8), "float32")


def small_graph(seed: int) -> Graph:
    """Five random ops on 8 × 8 matrices, and a weight that is updated."""
    draw = random.Random(seed)
    inputs = (Input(0, "x", "batch"), Input(1, "w", "variable"))
    nodes = []
    for out in range(2, 7):
        op = draw.choice(["aten.mm.default", "aten.add.Tensor", "aten.relu.default", "aten.t.default"])
        count = 2 if op in ("aten.mm.default", "aten.add.Tensor") else 1
        args = tuple(Ref(draw.randrange(out)) for _ in range(count))
        nodes.append(Node(op, args, (), (out,), placement=PLACE))
    return Graph(inputs, tuple(nodes), dict.fromkeys(range(7), SQUARE), (6,), ((1, 5),))


def first_problem(of: Callable[[], object]) -> Problem:
    """The problem of the first axis that is laid out meanwhile."""
    made = []

    def keep(problem: Problem, *rest: object) -> object:
        made.append(problem)
        return before(problem, *rest)  # type: ignore[arg-type]

    before, axes.choose = axes.choose, keep
    try:
        of()
    finally:
        axes.choose = before
    return made[0]


def problem_of(graph: Graph, mode: str) -> Problem:
    fixed = FixedLayouts({"w": (PLACE, (None,))}, {"x": (Split(0),)}, {6: PLACE})
    return first_problem(lambda: infer(graph, fixed, PLACE, 1, Goal((mode,))))


def price(problem: Problem, options: tuple[int, ...]) -> float:
    return search_of(problem, options).total()


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_the_best_of_all_choices_or_nearly(seed: int) -> None:
    problem = problem_of(small_graph(seed), "auto")
    every = itertools.product(*(range(len(item.options)) for item in problem.items))
    best = min(price(problem, options) for options in every)
    choice, report = _AxisChoice(problem, Goal(("auto",)), 1).run(None)
    assert report.bound is not None
    assert report.bound <= best + 1e-9
    assert abs(price(problem, tuple(choice)) - report.seconds) < 1e-12
    assert report.seconds <= 1.2 * best + 1e-9


@pytest.mark.parametrize(("seed", "mode"), [(384, "tensor"), (397, "auto")])
def test_the_integer_program_finds_the_best_of_all_choices_where_the_search_does_not(
    seed: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, goal = problem_of(small_graph(seed), mode), Goal((mode,))
    every = itertools.product(*(range(len(item.options)) for item in problem.items))
    best = min(price(problem, options) for options in every)
    report = _AxisChoice(problem, goal, 1).run(None)[1]
    assert (report.start, report.unclosed) == ("integer program", "")
    assert report.seconds <= best + 1e-12
    assert 0.999 * best <= report.bound <= best + 1e-12

    monkeypatch.setattr(choosing, "decide", lambda relaxed, _, __: IntegerChoice((), relaxed.bound, Ended.SECONDS, 123))
    given_up = _AxisChoice(problem, goal, 1).run(None)[1]
    assert given_up.seconds > 1.04 * best
    assert given_up.bound < best
    [line] = report_lines([given_up])
    assert "%: an integer program of 123 variables was given up after 60 s)" in line


def test_the_integer_program_keeps_to_a_budget_and_finds_what_fits_where_the_search_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = problem_of(small_graph(397), "auto")
    every = list(itertools.product(*(range(len(item.options)) for item in problem.items)))
    peaks = {options: peak(problem, options) for options in every}
    least = min(peaks.values())
    best = min(price(problem, options) for options in every if peaks[options] <= 1.001 * least)
    goal = Goal(("auto",), 1.001 * least)
    relaxed = relax(problem, [[i] for i in range(len(problem.items))], goal.budget, best)
    assert relaxed is not None
    found = decide(relaxed, goal.budget, float("inf"))
    assert peaks[found.options] <= 1.001 * least
    assert price(problem, found.options) <= 1.001 * best

    monkeypatch.setattr(_AxisChoice, "run_searches", lambda *_: [("", search_of(problem, every[-1]))])
    monkeypatch.setattr(choosing, "dive", lambda *_: ())
    monkeypatch.setattr(_AxisChoice, "rounded", lambda *_: search_of(problem, every[-1]))
    report = _AxisChoice(problem, goal, 1).run(None)[1]
    assert report.start == "integer program"
    assert report.held.peak <= goal.budget
    assert report.seconds <= 1.001 * best


PIPELINE = Layout(4, 4, prepare=lambda model: place(model, stages=2), goal=goal_of("tensor", None))


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mlp", Layout(2, goal=goal_of("auto", None))),
        ("gpt", Layout(2, goal=goal_of("tensor", None))),
        ("gpt", PIPELINE),
    ],
    ids=["mlp", "gpt", "gpt in two stages"],
)
def test_the_program_charges_a_choice_what_the_search_does(name: str, layout: Layout) -> None:
    problem = problem_of_case(CASES[name], layout)
    names = [(item.name, item.kind) for item in problem.items]
    classes = group_repeated(names, [[problem.producer.get(v, -1) for v in item.reads] for item in problem.items])
    program, draw = LayoutProgram(problem, classes), random.Random(0)
    for _ in range(3):
        options = [draw.randrange(len(x)) for x in program.x]
        kept = np.ones(len(program.cost), bool)
        for x, option in zip(program.x, options, strict=True):
            kept[[v for o, v in enumerate(x) if o != option]] = False
        one_by_one = {i: options[c] for c, members in enumerate(classes) for i in members}
        expected = price(problem, tuple(one_by_one[i] for i in range(len(problem.items))))
        found = solve(program.linear(kept, 1e3 / expected, None))
        assert found is not None
        assert found.cost == pytest.approx(1e3, rel=1e-6)


def test_a_program_that_is_too_large_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(small_graph(397), "auto")
    monkeypatch.setattr(relaxing, "LARGEST_INTEGER", 10)
    [line] = report_lines([_AxisChoice(problem, Goal(("auto",)), 1).run(None)[1]])
    assert re.search(r"\(gap [1-9].*%: an integer program of \d+ variables is larger than those of", line)
    monkeypatch.setattr(relaxing, "LARGEST", 10)
    [line] = report_lines([_AxisChoice(problem, Goal(("auto",)), 1).run(None)[1]])
    assert re.search(r"no bound is known: the program has \d+ variables, more than the", line)


def search_of(problem: Problem, options: tuple[int, ...]) -> Search:
    search = Search(problem, [[i] for i in range(len(problem.items))])
    for i, option in enumerate(options):
        search.put(i, option)
    return search


def peak(problem: Problem, options: tuple[int, ...]) -> float:
    return max(h.peak for h in search_of(problem, options).held().values())


def problem_of_case(case: Case, layout: Layout) -> Problem:
    """The problem of the first axis of a case."""
    return first_problem(lambda: planned(case, layout))


def test_the_relaxation_knows_when_nothing_fits() -> None:
    problem = problem_of(small_graph(0), "auto")
    alone = [[i] for i in range(len(problem.items))]
    assert relax(problem, alone, None, 1e-3) is not None
    assert relax(problem, alone, 1.0, 1e-3) is None


# ---- ties


def test_blocks_with_numbers_are_tied_and_layers_of_one_list_are_not() -> None:
    names = [("blocks.0.up", "mm"), ("blocks.1.up", "mm"), ("layers.0", "mm"), ("layers.1", "mm")]
    assert group_repeated(names, [[]] * 4) == [[0, 1], [2], [3]]


def test_an_item_without_a_module_is_tied_by_what_it_reads() -> None:
    names = [("blocks.0.up", "mm"), ("blocks.1.up", "mm"), ("", "add"), ("", "add"), ("", "add")]
    assert group_repeated(names, [[], [], [0], [1], [2]]) == [[0, 1], [2, 3], [4]]


# ---- what users ask for


@pytest.mark.parametrize(
    ("parallel", "budget", "expected"),
    [
        (None, None, DATA),
        (None, "2GB", Goal(("auto",), 2e9, search=True)),
        ("auto", None, Goal(("auto",), search=True)),
        ("tensor", "1.5GiB", Goal(("tensor",), 1.5 * 2**30)),
        ({"data": 2, "tensor": 4}, 1000, Goal(("data", "tensor"), 1000.0, mesh=(2, 4))),
        ("pipeline", None, Goal(("data",), mesh=(1,), stages=0)),
        ({"pipeline": 4}, None, Goal(("data",), mesh=(1,), stages=4)),
        ({"data": 2, "pipeline": 3, "tensor": 4}, None, Goal(("data", "tensor"), mesh=(2, 4), stages=3)),
    ],
)
def test_what_users_ask_for_is_understood(parallel: object, budget: object, expected: Goal) -> None:
    assert goal_of(parallel, budget) == expected


@pytest.mark.parametrize(
    ("parallel", "budget", "message"),
    [
        (
            "pipelines",
            None,
            r"parallel='pipelines' was found; one of 'data', 'tensor', .* a pipeline is {\"pipeline\": 2}",
        ),
        ({"data": 0}, None, r"parallel=.* was found; a whole number from 1 on was expected for 'data', not 0$"),
        ({"data": True}, None, r"parallel=.* was found; a whole number from 1 on was expected for 'data', not True$"),
        ({"pipeline": 2.0, "data": 2}, None, r"a whole number from 1 on was expected for 'pipeline', not 2\.0$"),
        ({"data": 2, "pp": 2}, None, r"or flow\.place\(model, stages=2\)"),
        ("zero3", None, r"flow\.zero\(model, stage\)"),
        (None, "many", r"memory_budget='many' was found"),
        (None, "-1GB", r"memory_budget='-1GB' was found"),
        (None, 0, r"memory_budget=0 was found"),
    ],
)
def test_what_means_nothing_is_refused(parallel: object, budget: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        goal_of(parallel, budget)


def test_a_mesh_of_another_size_than_the_run_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"mesh of 2 × 2 = 4 devices; the run has 2"):
        planned(gpt(), Layout(2, goal=goal_of({"data": 2, "tensor": 2}, None)))


def test_weights_that_a_further_axis_splits_are_priced_so_along_the_first() -> None:
    """The gradients that ZeRO 2 scatters for each micro-batch are of an eighth of a weight, fewer than its samples."""
    wide = replace(gpt(), make=lambda: GPT(2, 64, 8, CONTEXT))
    cheap = Hardware(bytes_per_s=1e9, latency_s=1e-9)
    layout = Layout(32, 16, hardware=cheap, goal=goal_of({"data": 4, "tensor": 8}, None), prepare=lambda m: zero(m, 2))
    plan, _, _ = plan_of(wide, layout, 64)
    often = [a.comm for a in plan.actors if a.rate > 1 and isinstance(a.comm, Collective)]
    along_data = {comm.kind for comm in often if comm.ranks[1] - comm.ranks[0] == 8}
    assert along_data == {CollectiveKind.REDUCE_SCATTER}
    assert not [comm for comm in often if len(comm.ranks) == layout.world]


def test_ops_that_make_several_gradients_of_which_some_are_not_needed_are_priced_on_a_mesh() -> None:
    """The norm's weight has two dims, and nothing needs the gradient of the batch that it would also make."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (8, 8)), nn.LayerNorm((8, 8)), nn.Flatten(), nn.Linear(64, 10))

    norm = in_float64(replace(CASES["mlp"], make=make))
    plan = trained_as_eagerly(norm, Layout(4, 2, goal=goal_of({"data": 2, "tensor": 2}, None)), 8)
    assert len({a.rank for a in plan.actors}) == 4


@pytest.mark.slow
def test_weights_that_are_hinted_along_a_second_axis_are_used_as_they_are_stored() -> None:
    mesh = placement("cpu", [[0, 1], [2, 3]])
    hints = {
        r".*qkv\.weight": (None, Split(0, 3)), r".*up\.weight": (None, Split(0)),
        r".*(projection|down)\.weight": (None, Split(1)),
    }  # fmt: skip
    plan = planned(gpt(), Layout(4, mesh=mesh, hints=hints))
    weights = {v.name for v in plan.variables if isinstance(v.sbp[-1], Split) and len(v.shape) > 1}
    assert len(weights) == 3 * 2 * 4  # each with two kinds of optimizer state
    assert not weights & {f"{c.name}" for c in communications(plan)}
