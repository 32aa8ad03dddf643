"""Hints by name, on outputs and on tensors: what they mean, what they become, and what bad ones are answered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actorflow as flow
import actorflow_compiler.infer.layout_assignment as lay_out_module
from actorflow.script_state.search import find_state
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.request import History, Preferences, StepRequest, TargetDevices, UserStep
from actorflow_compiler.compile import compile_step
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B, P, Split, parse, show
from actorflow_compiler.graph.graph import Graph
from actorflow_compiler.hints.constrain import CONSTRAIN, parse_wish, show_wish
from actorflow_compiler.hints.hints import ResolvedHints, nearest, resolve
from actorflow_compiler.infer import GraphLayouts, infer
from actorflow_compiler.plan.plan import Plan, Variable
from models import CASES
from trained import Layout, train_eagerly, train_planned


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


# ---- by name


def test_hints_are_found_by_whole_qualified_names() -> None:
    model = Net()
    flow.distribute(model, {r"block\.\d\.weight": flow.sbp.split(0)})
    flow.distribute(model.block, {r"2\.bias": (None, flow.sbp.split(-1))}, outputs={"1": flow.sbp.split(1)})
    found = resolve({"net": model})
    assert {name: show_wish(h.wish) for name, h in found.layouts.items()} == {
        "net.block.0.weight": "S(0)", "net.block.2.weight": "S(0)", "net.block.2.bias": "[*,S(0)]",
    }  # fmt: skip
    assert {id(model.block[1]): "S(1)"} == {module: show_wish(h.wish) for module, h in found.outputs.items()}


def test_a_tensor_with_two_names_has_one_hint_under_the_name_that_the_job_knows() -> None:
    model = Net()
    flow.distribute(model, {r"head\.weight": flow.sbp.split(0)})
    assert set(resolve({"net": model}).layouts) == {"net.embed.weight"}
    assert set(resolve({"net": model}, {id(model.head.weight): "other"}).layouts) == {"other"}


def test_hints_for_different_mesh_axes_are_one_hint() -> None:
    model = Net()
    flow.distribute(model, {r"block\.0\..*": flow.sbp.split(0), r".*0\.weight": (None, flow.sbp.split(1))})
    found = resolve({"net": model}).layouts["net.block.0.weight"]
    assert show_wish(found.wish) == "[S(0),S(1)]"
    assert "block" in found.origin
    assert ".*0" in found.origin


def test_the_same_pattern_again_replaces_its_hint() -> None:
    model = Net()
    flow.distribute(model, {r"block\.0\.weight": flow.sbp.split(0)})
    flow.distribute(model, {r"block\.0\.weight": flow.sbp.split(1)})
    assert resolve({"net": model}).layouts["net.block.0.weight"].wish == (Split(1),)


def test_contradictory_patterns_are_both_named_and_leave_the_hints_as_they_were() -> None:
    model = Net()
    flow.distribute(model, {r"block\..*": flow.sbp.split(0)})
    with pytest.raises(
        flow.LayoutError,
        match=r"(?s)Net\.block\.2\.weight.*block\\\\..*S\(0\).*2\\\\.weight.*S\(1\).*S\(0\) and S\(1\)",
    ):
        flow.distribute(model, {r"block\.2\.weight": flow.sbp.split(1)})
    assert resolve({"net": model}).layouts["net.block.2.weight"].wish == (Split(0),)


def test_tied_parameters_that_are_hinted_differently_are_both_named() -> None:
    with pytest.raises(flow.LayoutError, match=r"(?s)embed\.weight.*same tensor as.*head\.weight.*S\(0\) and S\(1\)"):
        flow.distribute(Net(), {r"embed\.weight": flow.sbp.split(0), r"head\.weight": flow.sbp.split(1)})


def test_hints_on_a_module_and_on_its_parent_may_not_contradict_each_other() -> None:
    model = Net()
    flow.distribute(model, {r"block\.0\.weight": flow.sbp.split(0)})
    flow.distribute(model.block, {r"0\.weight": flow.sbp.split(1)})
    with pytest.raises(flow.LayoutError, match=r"(?s)contradictory.*distribute\(Net.*distribute\(Sequential"):
        resolve({"net": model})


def test_contradictory_hints_on_outputs_are_both_named() -> None:
    with pytest.raises(flow.LayoutError, match=r"(?s)output of Net\.block.*'block'.*'blo.\*'"):
        flow.distribute(Net(), outputs={"block": flow.sbp.split(0), "blo.*": flow.sbp.broadcast})


@pytest.mark.parametrize(
    ("pattern", "offered"),
    [
        (r"blok\.0\.weight", "block.0.weight"),  # a slip
        (r"weight", "embed.weight"),  # a part of a name
        (r"model\.block\.2\.bias", "block.2.bias"),  # from where it is not seen
    ],
)
def test_a_pattern_that_matches_nothing_is_offered_the_nearest_names(pattern: str, offered: str) -> None:
    with pytest.raises(flow.LayoutError, match=f"did you mean .*{offered}"):
        flow.distribute(Net(), {pattern: flow.sbp.split(0)})


def test_patterns_for_modules_are_offered_modules() -> None:
    with pytest.raises(flow.LayoutError, match=r"matches no module of Net; did you mean block"):
        flow.distribute(Net(), outputs={"blocks": flow.sbp.split(0)})
    with pytest.raises(flow.LayoutError, match=r"matches no module of Net; did you mean block"):
        flow.place(Net(), {"blocks": flow.placement("cpu", [0])})
    with pytest.raises(flow.LayoutError, match="not a regular expression"):
        flow.place(Net(), {"(block": flow.placement("cpu", [0])})


CPU = flow.placement("cpu", [0])


@pytest.mark.parametrize("bad", ["cpu", None, 0, [0], flow.scope.placement("cpu", [0])], ids=repr)
def test_what_is_no_placement_is_refused_where_it_is_said(bad: object) -> None:
    with pytest.raises(flow.LayoutError, match=r"place\(Net, \{'head': .*\}\): .* was found; flow\.placement\("):
        flow.place(Net(), {"head": bad})  # type: ignore[dict-item]
    with pytest.raises(flow.LayoutError, match=r"place\(Net, …\): .* was found; flow\.placement\(type, ranks\)"):
        flow.place(Net(), [CPU, bad])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", ["cpu", 2, CPU], ids=repr)
def test_placements_that_name_no_modules_are_refused_with_what_would(bad: object) -> None:
    with pytest.raises(flow.LayoutError, match=r"(?s)flow\.place\(Net, .*was found.*pattern: placement.*list"):
        flow.place(Net(), bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [{"head": CPU, "nothing": CPU}, {"head": CPU, "block": "cpu"}, {"head": CPU, "(": CPU}])
def test_a_call_that_places_one_module_wrong_places_none(bad: Any) -> None:
    model, other = Net(), flow.placement("cpu", [1])
    with pytest.raises(flow.LayoutError):
        flow.place(model, bad)
    assert resolve({"net": model}).places == {}
    flow.place(model, stages=2)  # patterns would be refused beside it
    model = Net()
    flow.place(model, {"head": other})
    with pytest.raises(flow.LayoutError):
        flow.place(model, bad)
    assert resolve({"net": model}).places == {id(model.head): other}


def test_hints_for_one_tensor_that_are_wrong_leave_the_others_of_their_call_out() -> None:
    model = Net()
    with pytest.raises(flow.LayoutError):
        flow.distribute(model, {r"head\.weight": flow.sbp.split(0), r"embed\.weight": "S(0)"})  # type: ignore[dict-item]
    with pytest.raises(flow.LayoutError):
        flow.distribute(model, {r"head\.weight": flow.sbp.split(0)}, outputs={"nothing": flow.sbp.split(0)})
    assert resolve({"net": model}).layouts == {}


@pytest.mark.parametrize("what", ["layouts", "outputs", "optimizer"])
def test_hints_without_patterns_are_refused(what: str) -> None:
    with pytest.raises(flow.LayoutError, match=r"distribute\(Net, .*\[S\(0\)\].* was found; \{pattern: SBP\}"):
        flow.distribute(Net(), **{what: [flow.sbp.split(0)]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hint",
    [
        lambda thing: flow.place(thing, {"": CPU}),
        lambda thing: flow.place(thing, stages=2),
        lambda thing: flow.distribute(thing, {".*": flow.sbp.split(0)}),
        lambda thing: flow.zero(thing, stage=1),
    ],
    ids=["patterns", "stages", "distribute", "zero"],
)
def test_a_hint_on_what_is_no_model_says_so(hint: Callable[[Any], None]) -> None:
    for thing in (Net().state_dict(), 3, Net, torch.optim.SGD(Net().parameters())):
        with pytest.raises(flow.LayoutError, match=r"flow\.\w+: .* was found; a model \(torch\.nn\.Module\) was"):
            hint(thing)


def test_names_that_are_far_from_everything_are_answered_with_what_there_is() -> None:
    assert nearest("zzzz", ["embed.weight", "head.weight"]) == []
    with pytest.raises(flow.LayoutError, match=r"there are embed\.weight"):
        flow.distribute(Net(), {"zzzz": flow.sbp.split(0)})


def test_a_split_dim_out_of_range_names_parameter_shape_and_dim() -> None:
    with pytest.raises(flow.LayoutError, match=r"block\.0\.bias has shape \(16,\).*dim 1 was found.*\[-1, 1\)"):
        flow.distribute(Net(), {r"block\.0\.(weight|bias)": flow.sbp.split(1)})


@pytest.mark.parametrize("bad", [0, "S(0)", (0,), [flow.sbp.split(0)]])
def test_what_is_no_layout_is_refused(bad: object) -> None:
    with pytest.raises(flow.LayoutError, match="where a layout was expected"):
        flow.distribute(Net(), {r"head\.weight": bad})  # type: ignore[dict-item]


def test_a_parameter_cannot_be_a_partial_sum() -> None:
    with pytest.raises(flow.LayoutError, match=r"head\\\\.weight.*a partial sum was found"):
        flow.distribute(Net(), {r"head\.weight": flow.sbp.partial_sum})


@pytest.mark.parametrize("stage", [0, 4, True, "2"])
def test_zero_has_three_stages(stage: int) -> None:
    with pytest.raises(flow.LayoutError, match=r"1, 2 or 3 was expected"):
        flow.zero(Net(), stage)


def test_zero_for_the_innermost_module_counts() -> None:
    model = Net()
    flow.zero(model.block, 1)
    flow.zero(model, 3)
    found = resolve({"net": model}).zero
    assert {name: z.stage for name, z in found.items()} == {
        "net.embed.weight": 3, "net.block.0.weight": 1, "net.block.0.bias": 1, "net.block.2.weight": 1,
        "net.block.2.bias": 1,
    }  # fmt: skip


def test_layouts_have_one_text_form() -> None:
    for wish in [(Split(0),), (None, Split(1)), (B, None, Split(2, 3)), (P,)]:
        assert parse_wish(show_wish(wish)) == wish


# ---- when a job is compiled


def compiled(
    model: nn.Module, world: int = 2, fixed: tuple[Variable, ...] = (), hints: ResolvedHints | None = None,
    inputs: Callable[[], Tensor] = lambda: torch.zeros(8, 6, dtype=torch.int64),
) -> Plan:  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    state = find_state(step, model=model, optimizer=optimizer)
    x = inputs()
    return compile_step(
        StepRequest(
            UserStep(
                "train",
                lambda given: [step(*given)],
                [TensorArgument("x", tuple(x.shape), x.dtype, True)],
                state,
                train=True,
            ),
            TargetDevices(world),
            Preferences(hints or resolve(state.modules)),
            History({v.name: v for v in fixed}),
        )
    ).cut()


def lies(plan: Plan) -> dict[str, str]:
    return {v.name: ",".join(map(str, v.sbp)) for v in plan.variables}


def test_state_of_the_optimizer_lies_as_its_parameter_or_as_hinted() -> None:
    model = Net()
    flow.distribute(model, {r"block\.0\.weight": flow.sbp.split(1)}, optimizer={r"block\.2\.weight": flow.sbp.split(0)})
    found = lies(compiled(model))
    assert found["model.block.0.weight"] == found["optimizer.model.block.0.weight.exp_avg"] == "S(1)"
    assert found["optimizer.model.block.0.weight.step"] == "B"
    assert found["model.block.2.weight"] == "B"
    assert found["optimizer.model.block.2.weight.exp_avg_sq"] == "S(0)"


def test_a_hint_goes_before_zero() -> None:
    model = Net()
    flow.zero(model, 3)
    flow.distribute(model, {r"block\.0\.weight": flow.sbp.split(1), r"block\.2\.weight": flow.sbp.broadcast})
    found = lies(compiled(model))
    assert found["model.block.0.weight"] == "S(1)"
    assert found["model.block.2.weight"] == "B"
    assert found["optimizer.model.block.2.weight.exp_avg"] == "S(0)"
    assert found["model.embed.weight"] == "S(0)"


def test_a_dim_smaller_than_the_number_of_devices_is_refused() -> None:
    model = Net()
    flow.distribute(model, {r"block\.2\.bias": flow.sbp.split(0)})
    with pytest.raises(flow.LayoutError, match=r"block\.2\.bias has shape \(8,\).*over 9 devices"):
        compiled(model, world=9)


def test_a_hint_with_more_entries_than_the_mesh_has_axes_names_the_placement() -> None:
    model = Net()
    flow.distribute(model, {r"block\.2\.weight": (None, flow.sbp.split(0))})
    with pytest.raises(flow.LayoutError, match=r"\[\*,S\(0\)\] was found for model\.block\.2\.weight.*cpu:\[0,1\]"):
        compiled(model)


def test_zero_on_an_axis_that_the_mesh_lacks_names_the_placement() -> None:
    model = Net()
    flow.zero(model, 1, axis=1)
    with pytest.raises(flow.LayoutError, match=r"flow\.zero\(Net, stage=1, axis=1\).*cpu:\[0,1\] has 1 mesh axis"):
        compiled(model)


@pytest.mark.parametrize("how", ["distribute", pytest.param("zero", marks=pytest.mark.slow)])
def test_a_hint_that_comes_after_the_first_job_is_refused(how: str) -> None:
    model = Net()
    first = compiled(model)
    assert lies(compiled(model, fixed=first.variables)) == lies(first)
    if how == "distribute":
        flow.distribute(model, {r"block\.2\.weight": flow.sbp.split(0)})
    else:
        flow.zero(model, 3)
    with pytest.raises(flow.LayoutError, match=r"S\(0\) was found for model\..*earlier job has laid out as B on cpu"):
        compiled(model, fixed=first.variables)


def test_a_hint_that_an_earlier_job_has_followed_holds_for_later_jobs() -> None:
    model = Net()
    flow.zero(model, 3)
    flow.distribute(model, {r"block\.2\.weight": flow.sbp.split(1)})
    first = compiled(model)
    assert lies(compiled(model, fixed=first.variables)) == lies(first)


# ---- on tensors


def test_outside_of_a_job_a_tensor_comes_back_as_it_is() -> None:
    x = torch.zeros(4, 2)
    assert flow.constrain(x, flow.sbp.split(0)) is x


class Watched(nn.Module):
    """Constrains what is between its layers."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(6, 16), nn.Linear(16, 4), change

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.change(self.first(x))))


def batch() -> Tensor:
    return torch.zeros(8, 6)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the constrained tensors of the jobs that are compiled lie, in order."""
    found: list[str] = []

    def spy(graph: Graph, *args: Any, **kwargs: Any) -> GraphLayouts:
        layouts = infer(graph, *args, **kwargs)
        found.extend(show(layouts.value[n.outs[0]]) for n in graph.nodes if n.op == CONSTRAIN)
        return layouts

    monkeypatch.setattr(lay_out_module, "infer", spy)
    return found


@pytest.mark.parametrize("text", ["S(0)", "S(1)", "B", "P"])
def test_a_constrained_tensor_lies_as_asked_and_costs_no_op(text: str, chosen: list[str]) -> None:
    plan = compiled(Watched(lambda x: flow.constrain(x, parse(text))), inputs=batch)
    assert chosen == [text]
    assert "actorflow.constrain" not in {s.op for body in plan.bodies for s in body.steps}


def test_a_constraint_leaves_axes_free_and_holds_on_the_others(chosen: list[str]) -> None:
    mesh = placement("cpu", [[0, 1], [2, 3]])
    for wish, expected in [
        ((None, Split(1)), ",S(1)]"),
        ((Split(1),), "[S(1),"),
        ((Split(0), Split(0)), "[S(0),S(0)]"),
    ]:
        model = Watched(lambda x, wish=wish: flow.constrain(x, wish))
        flow.place(model, {"first|second": mesh})
        compiled(model, world=4, inputs=batch)
        assert expected in chosen.pop()


def test_an_output_hint_is_a_constraint_on_what_the_module_returns(chosen: list[str]) -> None:
    model = Watched(lambda x: x)
    flow.distribute(model, outputs={"first": flow.sbp.split(1)})
    compiled(model, inputs=batch)
    assert chosen == ["S(1)"]


def test_a_dim_that_cannot_be_cut_stays_whole(chosen: list[str]) -> None:
    compiled(Watched(lambda x: flow.constrain(x, flow.sbp.split(0))), inputs=lambda: torch.zeros(1, 6))
    assert chosen == ["B"]


def test_an_output_hint_holds_for_the_first_tensor_that_the_module_returns() -> None:
    seen: list[str] = []

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"name": "pair", "hidden": x * 2, "rest": [x]}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            out = self.pair(x)
            seen.extend(out)
            return out["hidden"] + out["rest"][0]

    model = nn.Sequential(nn.Linear(6, 16), Outer())
    flow.distribute(model, outputs={r"1\.pair": flow.sbp.split(1)})
    hints = resolve({"model": model})
    assert [h.origin for h in hints.outputs.values()] == ["flow.distribute(Sequential, outputs={'1\\\\.pair': S(1)})"]
    compiled(model, inputs=batch)
    assert seen == ["name", "hidden", "rest"]


def test_an_output_hint_on_a_module_that_returns_no_tensor_names_it() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "nothing"

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing, self.layer = Nothing(), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.nothing(x)
            return self.layer(x)

    model = Outer()
    flow.distribute(model, outputs={"nothing": flow.sbp.split(0)})
    with pytest.raises(flow.LayoutError, match=r"'nothing': S\(0\).*returned str without a tensor"):
        compiled(model, inputs=batch)


def test_a_dim_that_a_constrained_tensor_lacks_names_the_line_and_the_shape() -> None:
    model = Watched(lambda x: flow.constrain(x, flow.sbp.split(2)))
    with pytest.raises(flow.LayoutError, match=r"test_hints\.py:\d+: flow\.constrain.*\(8, 16\).*dim 2 was found"):
        compiled(model, inputs=batch)


def test_integers_cannot_be_constrained_to_a_partial_sum() -> None:
    with pytest.raises(flow.LayoutError, match=r"test_hints\.py:\d+.*torch\.int64.*only floating"):
        flow.constrain(torch.zeros(3, dtype=torch.int64), flow.sbp.partial_sum)


def test_a_constraint_with_more_entries_than_the_mesh_has_axes_names_line_and_shape() -> None:
    model = Watched(lambda x: flow.constrain(x, (None, flow.sbp.split(1))))
    with pytest.raises(
        flow.LayoutError, match=r"test_hints\.py:\d+.*\[\*,S\(1\)\].*\(8, 16\).*cpu:\[0,1\] has 1 mesh axis"
    ):
        compiled(model, inputs=batch)


MESH = placement("cpu", [[0, 1], [2, 3]])


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(
    ("sbp", "layout"),
    [
        (flow.sbp.split(1), Layout(2)),
        (flow.sbp.broadcast, Layout(3)),
        (flow.sbp.split(0), Layout(2, 4)),
        (flow.sbp.partial_sum, Layout(2, 2)),
        ((flow.sbp.split(0), flow.sbp.split(1)), Layout(4, 2, mesh=MESH)),
        (flow.sbp.split(0), Layout(9)),  # more devices than rows
    ],
)
def test_a_job_with_constraints_trains_as_the_eager_script_does(sbp: object, layout: Layout) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = flow.constrain(F.relu(model.first(x)), sbp)  # type: ignore[arg-type]
        return F.cross_entropy(model.head(F.relu(model.second(hidden))), y)

    prepare = None if layout.mesh else lambda m: flow.distribute(m, outputs={"second": flow.sbp.split(1)})
    case, how = replace(CASES["mlp"], loss=loss), replace(layout, prepare=prepare or layout.prepare)
    expected, parameters = train_eagerly(case, [8] * 3, 1)
    losses, found, _ = train_planned(case, how, [8] * 3)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-6)
