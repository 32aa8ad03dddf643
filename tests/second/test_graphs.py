"""``flow.nn.Graph``: OneFlow's ways of writing it train as one device does, and mistakes are told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import actorflow as flow
import actorflow.nn as nn
import warm
from actorflow.nn.graph import GraphModule
from actorflow_compiler.core.errors import ActorflowError, CallError
from second.launching import command, environment, run
from second.scripts.graphs import CASES, Evaluate, Train, made, nothing

GRAPHS = Path(__file__).with_name("scripts") / "graphs.py"
FEW = ("plain", "amp", "zero 3", "scaled and clipped", "again", "tensor", "pipeline")
ON_FOUR = ("zero 2", "scaled and clipped", "pipeline", "mesh", "again")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, FEW), id="2"),
        pytest.param((2, tuple(CASES)), id="2, all", marks=pytest.mark.slow),
        pytest.param((4, ON_FOUR), id="4", marks=pytest.mark.slow),
    ],
)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    """What each rank has found of the cases."""
    world, cases = request.param
    folder = tmp_path_factory.mktemp("graphs")
    done = run(command("run", str(GRAPHS), "--", str(folder), *cases, processes=world, python=warm.python()), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return world, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def test_a_graph_trains_as_one_device_does(results: tuple[int, list[dict[str, Any]]]) -> None:
    _, ranks = results
    for found in ranks:
        for name in found.keys() & CASES.keys():
            what = {key: found[name][key] for key in ("losses", "parameters", "logits")}
            if name == "amp":  # bfloat16 gradients are rounded on each device, and Adam's steps are 0.05 for any
                assert what["losses"] < 0.02
                assert what["parameters"] < 0.15
                assert found["amp"]["trained"] != pytest.approx(found["plain"]["trained"], abs=1e-5)
            else:
                assert max(what.values()) < 1e-5, (name, what)
            assert found[name]["rate"] == 0.0125


def test_hints_and_global_parameters_say_where_a_graph_keeps_what(
    results: tuple[int, list[dict[str, Any]]],
) -> None:
    world, ranks = results
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    found = {name: dict(sorted(ranks[0][name]["layouts"].items())) for name in ranks[0].keys() & CASES.keys()}
    assert [lies[0] for lies in found["pipeline"].values()] == halves
    expected = {
        "mesh": ["B,S(0)", "B,S(1)"],
        "tensor": ["S(0)", "S(1)"],
        "data": ["B", "B"],
        "zero 3": ["S(0)", "S(0)"],
    }
    for name in expected.keys() & found.keys():
        assert [lies[1] for lies in found[name].values()] == expected[name], name
    if "staged" in found:
        assert [lies[0] for lies in found["staged"].values()] == halves
    text = ranks[0]["pipeline"]["text"]
    assert re.match(r"\(GRAPH:Train_\d+:Train\): \(\n  \(CONFIG:config:GraphConfig\(training=True, grad", text)
    where = ",".join(map(str, halves[1]))
    assert "(MODULE:model.second:Linear(in_features=16, out_features=4, bias=True)) GraphModule(stage_id=1, p" in text
    assert f"(PARAMETER:model.second.weight:tensor(placement=cpu:[{where}], sbp=(B), size=(4, 16), dtype=" in text


def test_a_graph_goes_on_from_the_state_of_another(results: tuple[int, list[dict[str, Any]]]) -> None:
    for found in results[1]:
        assert found["state"]["keys"] == ["model", "loss_fn", "optimizer.0", "lr_scheduler.0", "System-Train-TrainStep"]
        one, two = found["state"]["both"]
        assert one == two


def test_steps_that_overflow_are_left_out(results: tuple[int, list[dict[str, Any]]]) -> None:
    for found in results[1]:
        assert found["overflow"] == {"moved": 0.0, "scale": pytest.approx(1e38 / 8)}


# -- in one process --------------------------------------------------------------------------------


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


def trained(change: Callable[[Any], object] = nothing) -> Any:
    model = made()
    return Train(model, torch.optim.SGD(model.parameters(), lr=0.1), None, change)


NUMBER = 2.0


class Counting(nn.Graph):
    """Uses what a script may change between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)]
        self.factor, self.calls = 1.0, 0

    def build(self, x: torch.Tensor) -> torch.Tensor:
        """The layers, one after the other."""
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return x * NUMBER * self.factor


def test_what_a_script_changes_between_calls_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, (x, _) = Counting(), batch()
    first = graph(x).clone()
    monkeypatch.setattr(sys.modules[__name__], "NUMBER", 6.0)
    torch.testing.assert_close(graph(x), 3 * first)
    graph.factor = 0.5
    torch.testing.assert_close(graph(x), 1.5 * first)
    assert graph.calls == 3


def test_a_norm_by_which_gradients_are_clipped_may_change() -> None:
    x, y = batch()
    model, other = made(), made()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "clip_grad_max_norm": 0.1}], lr=0.5)
    graph, plain = Train(model, optimizer, None, nothing), torch.optim.SGD(other.parameters(), lr=0.5)
    for most in (0.1, 0.01, 10.0):
        optimizer.param_groups[0]["clip_grad_max_norm"] = most
        ours = float(graph(x, y))
        loss = F.cross_entropy(other(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), most)
        plain.step()
        plain.zero_grad()
        assert ours == pytest.approx(float(loss), abs=1e-6)


def test_a_graph_has_a_name_and_other_shapes_have_plans_of_their_own() -> None:
    graph = Evaluate(made())
    assert re.fullmatch(r"Evaluate_\d+", graph.name)
    assert (graph.is_compiled, graph.training, graph.compiled_plan) == (False, False, None)
    x, _ = batch()
    assert [tuple(graph(x[:n]).shape) for n in (8, 5, 3)] == [(8, 4), (5, 4), (3, 4)]
    assert graph.is_compiled
    assert trained().training


def test_functions_and_modules_are_traced() -> None:
    x, _ = batch()
    model = made()
    model.register_forward_hook(lambda module, args, output: 3 * output)
    torch.testing.assert_close(nn.Graph.trace(model)(x), model(x).detach())
    assert float(nn.Graph.trace(lambda x: 2 * x)(x).sum()) == pytest.approx(float(2 * x.sum()), rel=1e-5)


def test_a_compiled_graph_is_printed_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    x, _ = batch()
    for ranks, shown in ((None, True), ([1], False), (-1, True)):
        graph = Evaluate(made())
        graph.debug(0, ranks=ranks)
        graph(x)
        assert ("(GRAPH:" in capsys.readouterr().out) == shown


def test_modules_are_global_and_local_by_methods_and_a_graphs_settings_stay_with_them() -> None:
    model: Any = made()
    assert model.first.to(GraphModule) is model.first.to(GraphModule)
    assert model.to(nn.Module) is model
    assert model.to(torch.float64).first.weight.dtype is torch.float64
    assert repr(model.first.to(GraphModule)) == "GraphModule()"


def test_a_module_in_a_graph_has_a_config_where_it_has_none_of_its_own() -> None:
    model: Any = made()
    assert not hasattr(model, "config")
    model.second.config = {"its": "own"}
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.1), None, nothing)
    graph.model.config.activation_checkpointing = True
    assert model.first.config is model.first.to(GraphModule)
    assert model.second.config == {"its": "own"}
    assert getattr(made(), "config", None) is None
    holder: Any = nn.ModuleDict({"config": nn.Linear(1, 1)})
    graph.more = holder
    assert type(holder.config) is nn.Linear
    with pytest.raises(AttributeError, match=r"the nearest is module.to.GraphModule..activation_checkpointing"):
        model.first.config.activation_checkpoints = True
    float(graph(*batch()))
    assert "GraphModule(activation_checkpointing=True)" in repr(graph)


def test_a_result_of_a_graph_is_whole_where_a_program_asks_for_its_part() -> None:
    x, _ = batch()
    logits: Any = Evaluate(made())(x)
    assert logits.to_local() is logits
    everywhere = logits.to_global(sbp=flow.sbp.broadcast)
    assert everywhere.is_global
    assert everywhere.placement == flow.placement.all("cpu")
    torch.testing.assert_close(everywhere.to_local(), made()(x).detach())


def test_a_forward_that_the_script_has_set_on_a_module_is_there_after_a_call() -> None:
    graph = trained()
    forward = graph.model.first.forward
    graph.model.first.forward = lambda x: 2 * forward(x)
    mine = graph.model.first.forward
    graph.model.first.to(GraphModule).activation_checkpointing = True
    other = made()
    x, y = batch()
    expected = F.cross_entropy(other.second(torch.tanh(2 * other.first(x))), y)
    assert float(graph(x, y)) == pytest.approx(float(expected), abs=1e-6)
    assert graph.model.first.forward is mine
    assert "forward" not in vars(graph.model.second)


def without_backward() -> None:
    class Forgetful(Train):
        """Calls no backward()."""

        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.model(x), y)

    model = made()
    Forgetful(model, torch.optim.SGD(model.parameters(), lr=0.1), None, nothing)(*batch())


def without_optimizer() -> None:
    class Untrained(Train):
        """Was given no optimizer."""

        def __init__(self) -> None:
            nn.Graph.__init__(self)
            self.model, self.loss_fn = made(), nn.CrossEntropyLoss()

    Untrained()(*batch())


def of_another_model() -> None:
    Train(made(), torch.optim.SGD(made().parameters(), lr=0.1), None, nothing)(*batch())


def without_super() -> None:
    class Bare(nn.Graph):
        """Forgets its base."""

        def __init__(self) -> None:
            self.model = made()

    Bare()(batch()[0])


def gradients_by_autograd() -> None:
    class Otherwise(Train):
        """Calls no backward() of the loss itself."""

        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(self.model(x), y)
            torch.autograd.backward(loss)
            return loss

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Otherwise(model, optimizer, None, lambda g: g.set_grad_scaler(flow.amp.GradScaler("cpu")))(*batch())


def late_scaler() -> None:
    graph = trained()
    float(graph(*batch()))
    graph.set_grad_scaler(flow.amp.GradScaler("cpu"))


def nested() -> None:
    class Outer(nn.Graph):
        """Calls another graph."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Evaluate(made())

        def build(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    Outer()(batch()[0])


def own_config() -> None:
    graph: Any = trained()
    graph.config = {"lr": 1.0}


def late_config() -> None:
    graph = trained()
    float(graph(*batch()))
    graph.config.enable_zero()


def twice() -> None:
    graph = trained()
    graph.add_optimizer(graph._trainings[0].optimizer)


def staged() -> Any:
    graph = trained()
    graph.model.second.config.stage_id = 1
    return graph


def foreign_schedule() -> None:
    one, two = (torch.optim.SGD(made().parameters(), lr=0.1) for _ in range(2))
    Train(made(), one, torch.optim.lr_scheduler.StepLR(two, 1), nothing)


def plateau() -> None:
    optimizer = torch.optim.SGD(made().parameters(), lr=0.1)
    Train(made(), optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), nothing)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no backward": (without_backward, "no parameter of SGD has a gradient after build: call backward() on the loss"),
    "backward, no optimizer": (
        without_optimizer,
        "calls backward() in build and has no optimizer, so it computes no gradients: call self.add_optimizer(…)",
    ),
    "of another model": (of_another_model, "the parameters of SGD are not those of the graph's modules"),
    "no super": (without_super, "Bare.__init__ has to call super().__init__() before all else"),
    "scaled otherwise": (gradients_by_autograd, "has a grad scaler, which scales a loss whose backward() is called"),
    "late scaler": (late_scaler, "a grad scaler was found for nn.Graph Train_"),
    "nested": (nested, "was called in the build of another one, or in a job"),
    "own config": (own_config, "Train.config = dict was found; config is the graph's GraphConfig"),
    "late config": (late_config, "config.enable_zero(True) was found for nn.Graph Train_"),
    "twice": (twice, "an optimizer was added twice"),
    "foreign schedule": (foreign_schedule, "a schedule of another optimizer"),
    "plateau": (plateau, "add_optimizer(lr_sch=ReduceLROnPlateau) was found"),
    "no optimizer": (lambda: trained().add_optimizer(0.1), "add_optimizer(0.1) was found; an optimizer"),
    "no scaler": (lambda: trained().set_grad_scaler(2.0), "set_grad_scaler(2.0) was found"),
    "stage": (lambda: trained(lambda g: g.config.enable_zero(stage=4)), "config.enable_zero(stage=4) was found"),
    "steps": (
        lambda: trained(lambda g: g.config.set_gradient_accumulation_steps(0)),
        "config.set_gradient_accumulation_steps(0) was found; a number of micro-batches",
    ),
    "dtype": (lambda: trained(lambda g: g.config.enable_amp(dtype=torch.float32)), "torch.float16 or torch.bfloat16"),
    "switch": (lambda: trained(lambda g: g.config.enable_amp("yes")), "config.enable_amp('yes') was found; True or"),
    "misspelled": (
        lambda: trained(lambda g: g.config.enable_zeros()),
        "config has no attribute 'enable_zeros': the nearest is config.enable_zero (docs/oneflow.md says",
    ),
    "set": (
        lambda: trained(lambda g: setattr(g.config, "enable_amp", True)),
        "config.enable_amp = True was found; a call was expected: config.enable_amp(True)",
    ),
    "set, misspelled": (
        lambda: trained(lambda g: setattr(g.config, "amp", True)),
        "config.amp = True was found, which would change nothing; a method of config was expected, such as config.",
    ),
    "setting of a module": (
        lambda: setattr(made().first.to(GraphModule), "activation_checkpoint", True),
        "has no attribute 'activation_checkpoint': the nearest is module.to(GraphModule).activation_checkpointing",
    ),
    "ignored hints": (
        lambda: trained(lambda g: g.config.enable_auto_parallel_ignore_user_sbp_config()),
        "what the script says of layouts is always kept",
    ),
    "memory": (
        lambda: trained(lambda g: g.config.enable_auto_memory("High")),
        "config.enable_auto_memory('High') was found; one of Disable, SlightMemoryDown",
    ),
    "stage on no device": (
        lambda: staged()(*batch()),
        "the module model.second has stage_id=1 and no placement; one was expected, on which the stage is: set_stage(1",
    ),
    "no placement": (lambda: made().first.to(GraphModule).set_stage(1), "set_stage(stage_id=1, placement=None) was"),
    "state": (lambda: trained().load_state_dict({"modl": {}}), "'modl' is not in the graph, which has model, loss_fn"),
    "build": (lambda: nn.Graph()(batch()[0]), "has no build(self, …): define what it computes"),
}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told(name: str) -> None:
    work, text = WRONG[name]
    with pytest.raises(ActorflowError) as error:
        work()
    assert text in str(error.value)


SETTINGS_WITHOUT_EFFECT = (
    "allow_fuse_model_update_ops", "allow_fuse_add_to_output", "allow_fuse_cast_scale",
    "enable_fused_model_update_cast", "enable_multi_tensor_update", "enable_cudnn_conv_heuristic_search_algo",
    "enable_straighten_algorithm",
    "enable_compress_memory", "enable_choose_best_memory_allocation", "enable_auto_memory", "set_outputs_buffer_size",
    "enable_auto_parallel_trunk_algo", "enable_auto_parallel_mainstem_algo", "enable_auto_parallel_sbp_collector",
    "enable_auto_parallel_prune_parallel_cast_ops",
)  # fmt: skip


def test_settings_that_the_compiler_needs_no_word_for_are_taken() -> None:
    graph = trained()
    for name in SETTINGS_WITHOUT_EFFECT:
        method = getattr(graph.config, name)
        assert method.__doc__.startswith("Nothing")
        method()
    graph.config.set_auto_parallel_computation_cost_ratio(0.05)
    graph.config.set_auto_parallel_wait_time(1e4)
    graph.config.set_zero_redundancy_optimizer_min_size_after_split(512)
    with pytest.raises(CallError, match=r"allow_fuse_cast_scale\(1\) was found; True or False"):
        graph.config.allow_fuse_cast_scale(1)
    assert float(graph(*batch())) == pytest.approx(float(F.cross_entropy(made()(batch()[0]), batch()[1])), abs=1e-6)


def test_a_plan_is_chosen_where_a_graph_asks_for_it() -> None:
    assert trained(lambda g: g.config.enable_auto_parallel()).config.job_options()["parallel"] == "auto"
    assert trained().config.job_options()["parallel"] is None


@pytest.mark.slow
def test_nn_and_its_names_are_imported_as_oneflow_writes_it_and_without_the_machinery_of_jobs() -> None:
    script = (
        "import sys\nimport actorflow.nn as nn\nprint('actorflow.jobs.job' in sys.modules)\n"
        "from actorflow.nn.graph import GraphModule\nfrom actorflow.nn import Graph\nprint(nn.Graph is Graph)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\nTrue\n"
    first = "import actorflow as flow\nprint(flow.nn.graph.GraphModule.__name__)"  # before nn.Graph is used
    done = subprocess.run([sys.executable, "-c", first], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "GraphModule\n"
    assert "Graph" in dir(nn)
    assert flow.nn.Graph is nn.Graph
