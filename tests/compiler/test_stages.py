"""Virtual pipeline stages: what makes one, which ops are in it, and what bad stages are answered with."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actorflow as flow
from actorflow.script_state.search import find_state
from actorflow_compiler.capture.capture import StepToTrace, TensorArgument, capture
from actorflow_compiler.capture.request import History, Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import compile_step
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.hardware import CPU_CORE, Hardware, Link
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.placement import Placement, placement
from actorflow_compiler.core.schedule_names import schedule_name
from actorflow_compiler.cutting.lowered_step import LoweredStep
from actorflow_compiler.graph.graph import Graph, Node
from actorflow_compiler.hints.goal import DATA, Goal, goal_of
from actorflow_compiler.hints.hints import StagesHint, ZeroHint, resolve
from actorflow_compiler.placing.automatic_stages import placements_of
from actorflow_compiler.placing.stages import place_ops
from actorflow_compiler.placing.variable_shares import WHOLE, VariableShares
from actorflow_compiler.plan.plan import Plan, Variable
from actorflow_compiler.plan.variant import Variant
from actorflow_scheduler.schedule import schedule
from fewer import fewer
from models import CASES
from trained import Layout, plan_of

WIDTH, BATCH = 8, 8
RANKS = [placement("cpu", [k]) for k in range(4)]


class Chain(nn.Module):
    """Float32[n, 8] through linear layers, as many as wanted, with a function between them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def laid(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor] = torch.sum,
    *,
    world: int = 2,
    micro_batches: int = 4,
    train: bool = True,
    fixed: Mapping[str, Variable] = {},
    batch: int = BATCH,
    goal: Goal = DATA,
    schedule: str = "auto",
    hardware: Hardware = CPU_CORE,
) -> LoweredStep:
    """One step of SGD, or a prediction, with the model's hints."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if list(model.parameters()) else None

    def step(x: Tensor) -> Tensor:
        found = loss(model(x))
        if train and optimizer is not None:
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    state = find_state(step, model=model, optimizer=optimizer)
    argument = TensorArgument("x", (batch, WIDTH), torch.float32, True)
    return compile_step(
        StepRequest(
            UserStep("step", lambda given: [step(*given)], [argument], state, train),
            TargetDevices(world, hardware=hardware),
            Preferences(resolve(state.modules), micro_batches, goal, schedule_name(schedule)),
            History(fixed),
        )
    )


def chain(order: Sequence[int], **given: Any) -> Plan:
    """The plan of a chain whose layers are on these ranks."""
    model = Chain(len(order))
    flow.place(model, {rf"layers\.{k}": RANKS[r] for k, r in enumerate(order)})
    return laid(model, world=1 + max(order), **given).cut()


def stages_of(plan: Plan, kind: str) -> dict[int, set[int]]:
    """Stage → the ranks of its actors of a kind."""
    found: dict[int, set[int]] = {}
    for a in plan.actors:
        if a.kind == kind:
            found.setdefault(a.stage, set()).add(a.rank)
    return found


def homes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {v.name.removeprefix("model."): v.placement.ranks for v in plan.variables}


def circle(plan: Plan) -> bool:
    """Whether actors wait for each other in a circle, within one iteration."""
    before: dict[int, set[int]] = {a.id: set() for a in plan.actors}
    for r in plan.registers:
        if not r.initial:
            for read in r.readers:
                before[read.actor].add(r.producer)
    try:
        TopologicalSorter(before).prepare()
    except ValueError:
        return True
    return False


# ---- what makes a stage


@pytest.mark.parametrize(
    ("order", "stages"),
    [
        ((0, 0, 1, 1), (0, 1)),
        ((0, 1, 0, 1), (0, 1, 0, 1)),
        ((0, 1, 1, 0), (0, 1, 0)),
        ((1, 0, 2, 0), (1, 0, 2, 0)),
    ],
)
def test_a_stage_is_a_run_of_modules_on_one_placement(order: tuple[int, ...], stages: tuple[int, ...]) -> None:
    plan = chain(order)
    expected = {number: {rank} for number, rank in enumerate(stages)}
    for kind in ("forward", "backward", "optimizer"):
        assert stages_of(plan, kind) == expected
    assert tuple(schedule(plan).summary.stages) == tuple(str(RANKS[r]) for r in stages)


def test_parameters_are_where_their_layer_is() -> None:
    assert homes(chain((0, 1, 0, 1)))["layers.2.weight"] == (0,)
    assert homes(chain((0, 1, 0, 1)))["layers.3.bias"] == (1,)


@settings(max_examples=fewer(8), deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.sampled_from([1, 4]), st.booleans())
def test_whatever_the_order_actors_form_no_circle_and_the_plan_is_live(
    order: list[int], micro_batches: int, weights: bool
) -> None:
    model = Chain(len(order))
    flow.place(model, {rf"layers\.{k}": RANKS[r] for k, r in enumerate(order)})
    plan = laid(model, world=3, micro_batches=micro_batches).cut(Variant(weights=weights))
    assert not circle(plan)
    schedule(plan)  # proves it


def test_two_stages_of_one_rank_are_actors_of_their_own_even_as_neighbours() -> None:
    model = Chain(8)
    flow.place(model, stages=4)
    plan = laid(model, schedule="zb-v").cut()
    assert stages_of(plan, "forward") == {0: {0}, 1: {1}, 2: {1}, 3: {0}}
    turn = [a for a in plan.actors if a.rank == 1 and a.kind == "forward"]
    first, second = sorted(turn, key=lambda a: a.stage)
    assert any(r.producer == first.id and second.id in [x.actor for x in r.readers] for r in plan.registers)
    assert not [a for a in plan.actors if a.comm is not None and a.stage == 1 and a.kind == "send" and "F" in a.name]
    assert not circle(plan)


def test_a_module_list_places_the_layers_in_it() -> None:
    model = nn.Module()
    model.below, model.above = Chain(2), Chain(2)
    model.forward = lambda x: model.above(model.below(x))  # type: ignore[method-assign]
    flow.place(model, {"": RANKS[0], r"above\.layers": RANKS[1]})
    assert homes(laid(model).cut())["below.layers.0.weight"] == (0,)
    assert homes(laid(model).cut())["above.layers.1.weight"] == (1,)


def test_a_module_is_placed_with_the_one_around_it_though_only_its_parts_are_called() -> None:
    model = nn.ModuleDict({"left": Chain(2), "right": Chain(1)})
    flow.place(model, {"": RANKS[1], "left": RANKS[0]})
    model.forward = lambda x: model["right"](model["left"].layers[1](x))  # type: ignore[method-assign]
    found = homes(laid(model).cut())
    assert found["left.layers.1.weight"] == (0,)
    assert found["right.layers.0.weight"] == (1,)


def test_a_loss_may_be_on_the_first_stage() -> None:
    model = Chain(2)
    flow.place(model, {r"layers\.0": RANKS[0], r"layers\.1": RANKS[1]})

    def loss(y: Tensor) -> Tensor:
        with flow.scope.placement("cpu", [0]):
            return F.mse_loss(y, torch.ones_like(y))

    plan = laid(model, loss).cut()
    assert stages_of(plan, "forward") == {0: {0}, 1: {1}, 2: {0}}
    assert stages_of(plan, "backward") == {0: {0}, 1: {1}, 2: {0}}


class Twice(nn.Module):
    """Two layers whose values are computed again in the backward pass, between two others."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), Chain(2), nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_ops_belong_to_the_visit_of_their_forward_ops_in_a_checkpoint_too(
    reentrant: bool,
) -> None:
    model = Twice(reentrant)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.zero_grad()
        loss.backward()
        return loss + sum(p.grad.sum() for p in model.parameters() if p.grad is not None)

    state = find_state(step, model=model)
    argument = TensorArgument("x", (4, 8), torch.float32, True)
    graph = capture(StepToTrace(lambda tensors: [step(*tensors)], [argument], state, True)).graph
    visits = [n.visit for n in graph.nodes if n.phase == "forward"]
    assert visits == sorted(visits)
    products = [n for n in graph.nodes if n.op in ("aten.mm.default", "aten.addmm.default")]
    forward = {n.where: n.visit for n in products if n.phase == "forward"}
    assert list(forward) == ["first", "inner.layers.0", "inner.layers.1", "last"]
    backward = [n for n in products if n.phase == "backward"]
    assert {n.where for n in backward} == set(forward)
    for n in backward:
        assert n.visit == forward[n.where], n


# ---- automatic cuts


def test_stages_take_equal_parts_of_a_chain() -> None:
    model = Chain(8)
    flow.place(model, stages=4)
    found = homes(laid(model, world=4).cut())
    assert [found[f"layers.{k}.weight"][0] for k in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_sequence_of_layers_without_a_class_of_its_own_is_cut_as_well() -> None:
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    flow.place(model, stages=2)
    found = homes(laid(model).cut())
    assert [found[f"{k}.weight"][0] for k in (0, 2, 4, 6)] == [0, 0, 1, 1]


def test_a_list_of_placements_says_where_each_stage_is() -> None:
    model = Chain(6)
    flow.place(model, [RANKS[1], RANKS[0], RANKS[1]])
    plan = laid(model).cut()
    assert stages_of(plan, "forward") == {0: {1}, 1: {0}, 2: {1}}
    assert [homes(plan)[f"layers.{k}.weight"][0] for k in range(6)] == [1, 1, 0, 0, 1, 1]


def test_stages_are_uneven_where_layers_are() -> None:
    narrow = [nn.Linear(WIDTH, 64), *(nn.Linear(64, 64) for _ in range(5))]
    model = nn.Sequential(*narrow, nn.Linear(64, 256), nn.Linear(256, 64))
    flow.place(model, stages=2)
    found = homes(laid(model).cut())
    assert [found[f"{k}.weight"][0] for k in range(8)] == [0, 0, 0, 0, 0, 0, 1, 1]


class Tied(nn.Module):
    """Tokens, with the embedding as the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain(4)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(F.linear(x, self.weight)), self.weight)


def test_a_parameter_of_two_stages_lives_with_the_first() -> None:
    model = Tied()
    flow.place(model, stages=2)
    plan = laid(model).cut()
    assert homes(plan)["weight"] == (0,)
    assert stages_of(plan, "backward") == {0: {0}, 1: {1}}
    assert not circle(plan)


def test_masks_are_computed_where_they_are_used() -> None:
    class Masked(Chain):
        def forward(self, x: Tensor) -> Tensor:
            mask = (x > 0).float()  # of the batch alone
            for layer in self.layers:
                x = layer(x) * mask
            return x

    model = Masked()
    flow.place(model, stages=4)
    plan = laid(model, world=4, train=False).cut()
    for a in plan.actors:
        if a.kind == "send" and a.stage < 3:
            assert len(a.targets) == 1, a.name  # the activations, but no mask


def test_another_job_finds_stages_where_the_parameters_are() -> None:
    model = Chain(8)
    flow.place(model, stages=4)
    first = laid(model, schedule="zb-v").cut()
    fixed = {v.name: v for v in first.variables}
    for batch, train in ((4, True), (8, False)):
        again = laid(model, schedule="zb-v", fixed=fixed, batch=batch, train=train).cut()
        assert homes(again) == homes(first)
        assert stages_of(again, "forward") == {0: {0}, 1: {1}, 2: {1}, 3: {0}}


def test_a_budget_that_equal_stages_exceed_moves_the_cut() -> None:
    class Look(nn.Module):
        """Large, and soon done."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4096, WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.table[0]

    def cut(budget: float | None) -> list[int]:
        model = nn.Sequential(Chain(8), Look(), Look())
        flow.place(model, stages=2)
        found = homes(laid(model, goal=Goal(budget=budget)).cut())
        return [found[f"{k}.table"][0] for k in (1, 2)]

    assert cut(None) == [1, 1]
    assert cut(200_000.0) == [0, 1]


def test_stages_are_cut_by_the_links_between_them() -> None:
    def cut(hardware: Hardware) -> list[int]:
        widths = [WIDTH, 256, 256, 256, 256, WIDTH, 256, 256, WIDTH]
        model = nn.Sequential(*itertools.starmap(nn.Linear, itertools.pairwise(widths)))
        flow.place(model, stages=2)
        found = homes(laid(model, world=4, hardware=hardware).cut())
        return [found[f"{k}.weight"][0] for k in range(8)]

    fast, slow = Hardware(bytes_per_s=1e15), Hardware(bytes_per_s=1e7)
    even, narrow = [0, 0, 0, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 2, 2, 2]
    assert cut(fast) == even
    assert cut(slow) == narrow
    within = Link(1e15, 0.0)
    assert cut(replace(slow, node_size=4, inside=within)) == even  # both stages on one node
    assert cut(replace(slow, node_size=2, inside=within)) == narrow  # each on a node of its own


def test_stages_are_cut_by_the_speed_of_what_is_computed_in() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.double()

    def cut(hardware: Hardware) -> list[int]:
        model = nn.Sequential(Chain(4), Double(), Chain(4).double())
        flow.place(model, stages=2)
        found = homes(laid(model, hardware=hardware).cut())
        return [found[f"{m}.layers.{k}.weight"][0] for m in (0, 2) for k in range(4)]

    assert cut(Hardware(memory_bytes_per_s=1e15)) == [0, 0, 0, 0, 1, 1, 1, 1]
    slow = Hardware(memory_bytes_per_s=1e15, flops_by_dtype=(("float64", 1e6),))
    assert cut(slow) == [0, 0, 0, 0, 0, 0, 1, 1]


def test_a_stage_on_slow_devices_gets_less() -> None:
    def cut(hardware: Hardware, *placements: Placement) -> list[int]:
        model = Chain(6)
        flow.place(model, list(placements) if placements else None, stages=None if placements else 2)
        found = homes(laid(model, world=4, hardware=hardware).cut())
        return [found[f"layers.{k}.weight"][0] for k in range(6)]

    equal = replace(CPU_CORE, bytes_per_s=1e15)
    assert cut(equal) == [0, 0, 0, 2, 2, 2]
    assert cut(replace(equal, speeds=(0.5, 1.0, 1.0, 1.0))) == [0, 0, 2, 2, 2, 2]  # the slowest device counts
    halves = placement("cpu", [0, 1], [1, 9]), placement("cpu", [2, 3])
    assert cut(equal, *halves) == [0, 0, 2, 2, 2, 2]  # rank 1 has nine tenths
    assert cut(replace(equal, speeds=(0.2, 1.8, 1.0, 1.0)), *halves) == [0, 0, 0, 2, 2, 2]


# ---- which devices


def devices(count: int, world: int, schedule: str = "auto") -> list[tuple[int, ...]]:
    everywhere = Placement("cpu", tuple(range(world)), (world,))
    asked = StagesHint(count, (), "flow.place(M, stages)")
    return [p.ranks for p in placements_of(asked, everywhere, schedule_name(schedule))]


def test_stages_share_devices_evenly() -> None:
    assert devices(1, 4) == [(0, 1, 2, 3)]
    assert devices(2, 4) == [(0, 1), (2, 3)]
    assert devices(2, 2, "zb-v") == [(0,), (1,)]
    assert devices(6, 2) == [(0,), (1,)] * 3
    assert devices(6, 2, "zb-v") == [(0,), (1,), (1,), (0,), (0,), (1,)]


@pytest.mark.parametrize(("count", "world", "near"), [(3, 4, "2 or 4"), (6, 4, "4 or 8"), (5, 8, "4 or 8")])
def test_stages_that_do_not_divide_are_answered_with_numbers_that_do(count: int, world: int, near: str) -> None:
    with pytest.raises(LayoutError, match=rf"{count} stages were found for {world} devices.*take {near}"):
        devices(count, world)


def test_each_stage_is_the_mesh_that_is_asked_for() -> None:
    everywhere, asked = Placement("cpu", tuple(range(8)), (8,)), StagesHint(2, (), "flow.place(M, stages=2)")
    assert [str(p) for p in placements_of(asked, everywhere, mesh=(2, 2))] == [
        "cpu:[0,1,2,3](2,2)", "cpu:[4,5,6,7](2,2)",
    ]  # fmt: skip
    with pytest.raises(LayoutError, match=r"each stage has 4 of the 8 devices.* 2 × 4 = 8 for each.*--devices 16"):
        placements_of(asked, everywhere, mesh=(2, 4))


# ---- bad input


@pytest.mark.parametrize("stages", [0, -2, True, "2", 1.5])
def test_a_number_of_stages_below_one_is_refused(stages: Any) -> None:
    with pytest.raises(LayoutError, match=r"flow\.place\(Chain, stages=.*1 or more, was expected"):
        flow.place(Chain(), stages=stages)


def test_without_placements_or_stages_there_is_nothing_to_place() -> None:
    with pytest.raises(LayoutError, match="stages=None"):
        flow.place(Chain())


def test_as_many_placements_as_stages_are_expected() -> None:
    with pytest.raises(LayoutError, match="stages=3 and 2 placements"):
        flow.place(Chain(), RANKS[:2], stages=3)
    with pytest.raises(LayoutError, match=r"'cpu' was found; flow\.placement"):
        flow.place(Chain(), ["cpu"])  # type: ignore[list-item]


def test_patterns_and_stages_contradict_each_other() -> None:
    model = Chain()
    with pytest.raises(LayoutError, match=r"patterns of modules and stages=2"):
        flow.place(model, {"": RANKS[0]}, stages=2)
    flow.place(model, stages=2)
    with pytest.raises(LayoutError, match=r"patterns of modules and flow\.place\(Chain, stages=2\)"):
        flow.place(model, {"": RANKS[0]})
    other = Chain()
    flow.place(other, {"layers": RANKS[0]})
    with pytest.raises(LayoutError, match=r"stages=2\): Chain has the patterns 'layers' already"):
        flow.place(other, stages=2)
    with pytest.raises(LayoutError, match=r"stages=2\) and flow\.place\(Chain, \{'layers': cpu:\[0\]\}\)"):
        resolve({"a": model, "b": other})
    third = Chain()
    flow.place(third, stages=4)
    with pytest.raises(LayoutError, match=r"stages=2\) and flow\.place\(Chain, stages=4\)"):
        resolve({"a": model, "b": third})


def test_a_scope_contradicts_stages() -> None:
    model = Chain()
    flow.place(model, stages=2)

    def loss(y: Tensor) -> Tensor:
        with flow.scope.placement("cpu", [0]):
            return y.exp().sum()

    with pytest.raises(LayoutError, match=r"stages=2\) cuts the whole step, but a scope puts .*exp.* on cpu:\[0\]"):
        laid(model, loss)


def test_where_ops_of_no_scope_are_is_told_where_that_is_not_on_all_devices() -> None:
    class Scoped(Chain):
        """The first layer is in a scope."""

        def forward(self, x: Tensor) -> Tensor:
            with flow.scope.placement("cpu", self.ranks):
                x = self.layers[0](x)
            return torch.tanh(x)

        ranks: Sequence[int] = (0,)

    def told(model: nn.Module) -> list[str]:
        return [note for note in laid(model).cut().notes if "outside of flow.scope.placement" in note]

    (note,) = told(Scoped(1))
    assert re.search(r"placement: \S*test_stages\.py:\d+, \S*test_stages\.py:\d+.* on cpu:\[0\], with what", note)
    assert note.endswith("a scope of their own moves them: flow.scope.placement('cpu', [0, 1])")
    everywhere = Scoped(1)
    everywhere.ranks = (0, 1)
    placed = Chain(2)
    flow.place(placed, {r"layers\.0": RANKS[0]})
    assert told(everywhere) == told(placed) == told(Chain(2)) == []


def test_more_stages_than_parts_would_have_no_op() -> None:
    model = Chain(2)
    flow.place(model, stages=16)
    with pytest.raises(LayoutError, match=r"16 stages were .* can be cut into (\d+) parts.*at most \1"):
        laid(model)


def test_a_function_without_modules_is_told_what_is_missing() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.tanh(x * self.weight)
            return x

    model = Bare()
    flow.place(model, stages=4)
    with pytest.raises(LayoutError, match=r"make modules of the layers"):
        laid(model, world=4)


def test_a_pattern_whose_modules_a_training_step_does_not_call_is_named() -> None:
    model = Chain(3)
    model.spare = Chain(1)
    flow.place(model, {"layers": RANKS[0], r"spare.*": RANKS[1]})
    with pytest.raises(LayoutError, match=r"\{'spare\.\*': cpu:\[1\]\}\): the step calls none .* no op"):
        laid(model)
    assert stages_of(laid(model, train=False).cut(), "forward") == {0: {0}}  # a prediction may need a part only
    flow.place(model, {r"spare.*": RANKS[0]})  # where others are, so that no stage is without an op
    assert stages_of(laid(model).cut(), "forward") == {0: {0}}


def test_stages_of_a_rank_that_the_run_does_not_have_are_refused() -> None:
    model = Chain()
    flow.place(model, [RANKS[0], RANKS[3]])
    with pytest.raises(LayoutError, match=r"cpu:\[3\] names rank 3, but this run has 2 devices"):
        laid(model)


# ---- placing a graph


def test_a_node_with_a_placement_that_no_forward_op_has_is_a_stage_behind_the_others() -> None:
    everywhere = Placement("cpu", (0, 1), (2,))
    nodes = (
        Node("aten.neg.default", (), (), (0,), "forward", RANKS[0], visit=1),
        Node("aten.neg.default", (), (), (1,), "backward", RANKS[1], visit=1),
    )
    graph = Graph((), nodes, dict.fromkeys((0, 1), Meta((), "float32")), (0, 1), ())
    placed = place_ops(graph, everywhere, {}, {})
    assert placed.stages == (RANKS[0], RANKS[1])
    assert [n.stage for n in placed.graph.nodes] == [0, 1]


def zero_of(stage: int) -> dict[str, ZeroHint]:
    return {"w": ZeroHint(stage, 0, "here")}


def test_devices_of_a_stage_hold_the_parts_of_variables_that_modes_and_zero_say() -> None:
    goal = goal_of({"data": 4, "tensor": 2}, None)
    shares = VariableShares.of(goal, goal.mesh, zero_of(2))
    assert (shares.parameter("w"), shares.gradient("w"), shares.state("w")) == (1 / 2, 1 / 8, 1 / 8)
    assert (shares.parameter("other"), shares.state("other")) == (1 / 2, 1 / 2)
    assert VariableShares.of(DATA, (4,), zero_of(3)).parameter("w") == 1 / 4
    assert VariableShares.of(DATA, (4,), {}) == replace(WHOLE, mesh=(4,))


@pytest.mark.parametrize(
    ("layout", "part"), [({}, 1.0), ({"goal": goal_of("tensor", None)}, 0.5)], ids=["data", "tensor"]
)
def test_stages_are_cut_by_what_each_of_their_devices_holds(layout: dict[str, Any], part: float) -> None:
    """Two stages of two devices, of which each has memory for its part of half of the model and little else."""
    case = replace(CASES["mlp"], make=lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    half = 4 * 4 * (64 * 64 + 64) * 4  # bytes: parameters, gradients and Adam's state of four layers
    fits = replace(CPU_CORE, memory_bytes=round(1.2 * part * half))
    asked = Layout(4, prepare=lambda model: flow.place(model, stages=2), **layout)
    assert not any("is cut for equal time" in note for note in plan_of(case, replace(asked, hardware=fits), 8)[0].notes)
    less = replace(fits, memory_bytes=round(0.8 * part * half))
    assert any("is cut for equal time" in note for note in plan_of(case, replace(asked, hardware=less), 8)[0].notes)
